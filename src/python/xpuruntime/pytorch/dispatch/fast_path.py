# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FastPath`: the route by which PyTorch's dispatcher reaches a policy, with the same results on each.

``addon``
    Kernels in C++ built with the headers of the installed PyTorch (`build_addon`), called without Python.
``stable``
    Kernels in C over PyTorch's stable C ABI for ``mm`` and ``bmm``; the rest as by ``python``.
``python``
    Kernels in Python.

The environment variable ``XPURUNTIME_TORCH_FAST_PATH`` states one; ``auto``, the default, takes the first that this
process has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.paths import not_private
from xpuruntime.pytorch import _private_api, build_addon
from xpuruntime.pytorch.attention.advised import cudnn_version
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.runtime.doctor.facts import TorchFacts

if TYPE_CHECKING:
    from pathlib import Path

#: The environment variable that states a route.
VARIABLE = "XPURUNTIME_TORCH_FAST_PATH"
_ROUTES = ("addon", "stable", "python")


class FastPath(NamedTuple):
    """A route, and why it is no faster one."""

    route: str
    reason: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return self.route if not self.reason else f"{self.route}: {self.reason}"


def fast_path() -> FastPath:
    """Return the route of this process, chosen once."""
    return CONTEXT.fast_path or choose(os.environ.get(VARIABLE, ""))


def facts() -> TorchFacts:
    """Return the route for ``xrt doctor``."""
    path = CONTEXT.fast_path or _find(os.environ.get(VARIABLE, ""))
    return TorchFacts(
        version=str(torch.__version__), route=path.route, reason=path.reason, fix=path.fix, cudnn=cudnn_version()
    )


def choose(stated: str) -> FastPath:
    """Take the route that is stated, or the first that can be had; while no override is in place."""
    path = _find(stated)
    if not path.route:
        raise UnsupportedOperationError(f"{path.reason}. Fix: {path.fix}", engine="torch")
    # What PyTorch knows of a call comes from the addon, or from Python.
    _core.use_torch_addon(load_addon().functions if path.route == "addon" else None)
    CONTEXT.fast_path = path
    return path


def _find(stated: str) -> FastPath:
    """Return the route that is stated, or the first that can be had; one without a name where there is none."""
    stated = stated or "auto"
    if stated not in ("auto", *_ROUTES):
        known = ", ".join(("auto", *_ROUTES))
        return FastPath("", f"{VARIABLE} is {stated!r}", f"state one of {known}")
    build = f"run `{build_addon.COMMAND}`"
    if stated in ("auto", "addon"):
        reason = why_no_addon()
        if not reason:
            return FastPath("addon")
        if stated == "addon":
            return FastPath("", f"{VARIABLE} asks for the addon: {reason}", build)
    else:
        reason, build = f"{VARIABLE} asks for it", f"unset {VARIABLE}"
    if stated in ("auto", "stable"):
        missing = why_no_stable_abi()
        if not missing:
            return FastPath("stable", reason, build)
        if stated == "stable":
            return FastPath("", f"{VARIABLE} asks for the stable C ABI: {missing}", "state auto, addon or python")
        reason = f"{reason}; {missing}"
    return FastPath("python", reason, build)


@functools.cache
def why_no_addon() -> str:
    """Return why the addon cannot be used in this process; empty where it can."""
    try:
        load_addon()
    except XpuRuntimeError as error:
        return str(error)
    except (ImportError, OSError) as error:
        return f"the addon for PyTorch {torch.__version__} cannot be loaded: {error}"
    return ""


@functools.cache
def load_addon() -> Any:
    """Return the extension module built for this PyTorch and this Python."""
    in_package, in_cache = build_addon.places()
    for path in in_package:
        if path.is_file():
            return _load(path)
    if not in_cache.is_file():
        msg = f"the addon is not built for PyTorch {torch.__version__} and Python {sys.version.split()[0]}"
        raise UnsupportedOperationError(msg, engine="torch")
    if (reason := not_private(in_cache.parent)) is not None:
        raise UnsupportedOperationError(reason, engine="torch")
    return _load(in_cache)


def _load(path: Path) -> Any:
    name = f"xpuruntime.{build_addon.MODULE}"
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module", path=str(path))
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def why_no_stable_abi() -> str:
    """Return why no kernel can be placed by the stable C ABI, found by placing one; empty where it can."""

    def opened() -> str:
        missing = _core.find_stable_abi(_private_api.tensors_of_handles, _private_api.handles_of_tensors)
        return f"this PyTorch has no {missing}" if missing else _why_not_raised()

    return self_test(opened)


def _why_not_raised() -> str:
    """Return why an error of a kernel in Python does not pass through PyTorch as it is."""
    space, name = "_xpuruntime_probe", "raises"
    library = torch.library.Library(space, "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    remove = _core.place_raising_kernel(space, name)
    if remove is None:
        return "this PyTorch takes no kernel in C"
    try:
        torch.ops._xpuruntime_probe.raises(torch.empty(0, device="cpu"))
    except LookupError:
        return ""
    except RuntimeError:
        return "an error of Python's does not pass through this PyTorch"
    finally:
        remove()
        _private_api.remove_library(library)
    return "an error of Python's is lost in this PyTorch"


@contextlib.contextmanager
def _isolated_context() -> Iterator[None]:
    """Have what runs inside be real, on plain tensors, whatever the caller traces, transforms or records."""
    # Neither modes of PyTorch's nor a device of its default are seen, nor transforms of ``torch.func``, nor what
    # ``torch.jit.trace`` writes down.
    traced = _private_api.tracing_state()
    transformed = _private_api.has_transforms()
    if traced is not None:  # PyTorch refuses to set it in kernels that a transform has called
        _private_api.set_tracing_state(None)
    try:
        with (
            # Where nothing is transformed, asking for the stack would have PyTorch make one for this thread.
            _private_api.without_transforms() if transformed else contextlib.nullcontext(),
            _private_api.without_modes(),
            _private_api.without_torch_function(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            yield
    finally:
        if traced is not None:
            _private_api.set_tracing_state(traced)


def self_test(test: Callable[[], str]) -> str:
    """Return why a part of PyTorch cannot be used, as `test` finds; an error in it is a reason, too."""
    try:
        with _isolated_context():
            return test()
    except Exception as error:
        return f"this PyTorch failed in a self-test: {type(error).__name__}: {error}"
