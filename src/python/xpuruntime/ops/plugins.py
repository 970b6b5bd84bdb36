# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of third parties: Python objects and shared libraries, by the entry point group ``xpuruntime.kernels``."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.errors import InputError, warn
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import kind_of, user_path
from xpuruntime.ops.torch_kernels import (
    Saved,
    TorchCall,
    TorchKernel,
    distribution_facts,
    environment_values,
    forget_torch_kernels,
    module_digest,
    packages_of_kernel,
    register_torch_kernels,
    source_of,
)
from xpuruntime.policies.kernel_rules import FAMILIES, OPS
from xpuruntime.runtime.packages import load_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "GROUP",
    "KernelBackend",
    "PythonKernel",
    "Saved",
    "TorchCall",
    "TorchKernel",
    "facts_of_kernel",
    "include_folder",
    "load_library",
    "load_plugins",
    "plugin_facts",
    "register",
]

#: Entry points of this group name a function without arguments that registers kernels by `register` or `load_library`.
GROUP = "xpuruntime.kernels"

#: What has registered the kernels of a backend: objects of Python, or the path of a library.
_sources: dict[str, list[Any]] = {}
#: The distribution that a backend is from, where an entry point named it.
_distributions: dict[str, str] = {}
#: The backends of the plugin that is being loaded, so that what it has registered goes with it when it fails.
_loading: ContextVar[list[str] | None] = ContextVar("xpuruntime_plugin", default=None)


class KernelBackend:
    """Where kernels written in Python come from: one library, on one type of device."""

    def __init__(self, name: str, device_type: str, version: str) -> None:
        self.name = name
        self.device_type = device_type
        self._version = version

    def available(self) -> tuple[bool, str]:
        """Say whether it can be used here, and if not why. Never raises."""
        return True, ""

    def version(self) -> str:
        """Return its version."""
        return self._version


class PythonKernel:
    """One kernel written in Python, for one operation. Subclass it."""

    id: str
    op: str
    description: str
    limits: str
    families: tuple[str, ...] = ()
    automatic: bool = True

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        """Say whether it can do exactly this, and if not why. Touches no device.

        `op` has ``operands`` (name to ``dtype``, ``shape``, ``strides``, ``alignment``), ``attributes``, ``device``,
        ``phase``, ``text``, and on CUDA ``compute_capability``. A norm sees ``x`` as two dimensions, rows and columns.
        """
        raise NotImplementedError

    def prepare(self, op: Mapping[str, Any], config: str) -> Callable[[Mapping[str, _core.Tensor], int], None]:
        """Return the function that does it; slow.

        It is called with operand name to `Tensor`, and with the CUDA stream's handle (0 on the CPU). The tensors are
        views that are valid during the call only. It writes the outputs in the order of that stream, and neither
        allocates them nor waits. An attribute ``repeatable = False`` of the function says that its bits differ between
        runs; an attribute ``config`` is a text that `prepare` takes back to do exactly the same, ``""`` by default. A
        `config` that comes back different is refused.

        Raise `UnsupportedOperationError` where it cannot be done after all; then another kernel may serve.
        """
        raise NotImplementedError


def register(backend: KernelBackend, *kernels: PythonKernel | TorchKernel) -> None:
    """Register kernels written in Python, all or none: all on arrays, or all on tensors of PyTorch."""
    for_torch = [kernel for kernel in kernels if isinstance(kernel, TorchKernel)]
    on_arrays = [kernel for kernel in kernels if not isinstance(kernel, TorchKernel)]
    if for_torch and on_arrays:
        raise InputError("one backend has kernels of both kinds. Fix: register them under two backends")
    if for_torch:
        register_torch_kernels(backend.name, backend.device_type, *for_torch)
    else:
        for kernel in on_arrays:
            _check_families(kernel)
        _core.register_python_kernel(backend, *on_arrays)
    _note(backend.name, backend, *kernels)


def _check_families(kernel: PythonKernel) -> None:
    families = getattr(kernel, "families", ())
    op = getattr(kernel, "op", None)
    key = op.removesuffix("_backward") if isinstance(op, str) else None
    if key not in OPS or not isinstance(families, (tuple, list)):
        return  # refused with a reason by the registry
    if not all(isinstance(family, str) for family in families):
        raise InputError(f"kernel {_id(kernel)} has families that are not text. Fix: name each as a str")
    known = _known_families(key)
    unknown = [family for family in families if family not in known]
    if unknown:
        raise InputError(
            f"kernel {_id(kernel)} says that it is of the family {unknown[0]!r}, which no policy"
            f" can name for {key}: the families are {', '.join(known)}. By its id it can be named in any case."
        )


def _known_families(key: str) -> list[str]:
    return [family for family in FAMILIES[key] if family != "auto"]


def _id(kernel: object) -> str:
    """Return what messages call a kernel; objects of plugins are not asked for their `repr`."""
    name = getattr(kernel, "id", None)
    return repr(name) if isinstance(name, str) else f"of type {type(kernel).__name__}"


def _note(backend: str, *sources: Any) -> None:
    _sources.setdefault(backend, []).extend(sources)
    loading = _loading.get()
    if loading is not None and backend not in loading:
        loading.append(backend)


def load_library(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Register the kernels of a shared library that is written against ``xpuruntime/kernel_plugin.h``, all or none.

    Libraries that were built against version 1 of that header are loaded as well. The library stays loaded for as long
    as the process lives.
    """
    file = user_path(path, "the kernel library").absolute()
    kind = kind_of(file)
    if kind != "file":
        raise InputError(
            f"the kernel library {file} {'does not exist' if kind == 'missing' else f'is not a file: {kind}'}. "
            "Fix: correct the path"
        )
    families = {op: _known_families(key) for key in OPS for op in (key, f"{key}_backward")}
    ids = tuple(_core.register_plugin_library(os.fspath(file), families))
    _note(ids[0].partition(".")[0], os.fspath(file))
    return ids


def plugin_facts(backend: str) -> dict[str, str] | None:
    """Return what the kernels of a plugin are: version, distribution, and a digest of the code that brings them.

    Of a class it is the digest of the files in the folder of its package, or of its module; in a script, of the text
    of the class. ``None`` where no plugin has such a backend; ``"unreadable"`` for code that has no text.
    """
    sources = _sources.get(backend)
    if not sources:
        return None
    facts = {"package": _distributions[backend]} if backend in _distributions else {}
    digest = hashlib.sha256()
    for source in sources:
        if isinstance(source, KernelBackend):
            facts["version"] = str(source.version())
    try:
        texts = {text for source in sources for text in _code_of(source)}
    except (OSError, TypeError):
        return {**facts, "code": "unreadable"}
    for text in sorted(texts):
        digest.update(text.encode())
    return {**facts, "code": f"sha256 {digest.hexdigest()}"}


def facts_of_kernel(kernel: TorchKernel) -> dict[str, str]:
    """Return what a result of a kernel holds for: packages with versions and contents, code, variables and adapter."""
    versions = {name: " ".join((distribution_facts(name) or {}).values()) for name in packages_of_kernel(kernel.id)}
    versions |= source_of(kernel.id) or {}
    kind = type(kernel)
    versions["adapter"] = f"{kind.__module__}.{kind.__qualname__} {module_digest(kind.__module__)}"
    if (facts := plugin_facts(kernel.id.partition(".")[0])) is not None:
        versions["plugin"] = " ".join(facts.values())
    return versions | environment_values(kernel)


def _code_of(source: Any) -> Iterator[str]:
    """Yield digests and texts of a kernel source. Raises OSError where it cannot be read."""
    if isinstance(source, str):
        yield file_digest(source)
        return
    for kind in type(source).__mro__:
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if kind.__module__.partition(".")[0] in ("xpuruntime", "builtins"):
            continue
        if kind.__module__ == "__main__" or file is None:
            yield inspect.getsource(kind)
        elif getattr(module, "__package__", None):
            folder = Path(file).parent
            for path in sorted(
                entry for entry in folder.iterdir() if entry.suffix in (".py", ".so") and entry.is_file()
            ):
                yield f"{path.name} {file_digest(path)}"
        else:
            yield file_digest(file)


def include_folder() -> str:
    """Return the folder to compile kernel libraries with: it has ``xpuruntime/kernel_plugin.h``."""
    return os.fspath(Path(__file__).resolve().parent.parent / "include")


def load_plugins() -> None:
    """Load what installed packages name under the entry point group ``xpuruntime.kernels``, in order of name.

    A plugin that fails is left out with all that it has registered, with one `XpuRuntimeWarning` that names it and the
    reason. Called once a process, before the first operation or listing.
    """

    def load(point: EntryPoint) -> None:
        backends: list[str] = []
        token = _loading.set(backends)
        try:
            point.load()()
            if point.dist is not None:
                _distributions.update(dict.fromkeys(backends, f"{point.dist.name}=={point.dist.version}"))
        except BaseException:
            for backend in backends:
                _sources.pop(backend, None)
                forget_torch_kernels(backend)
                _core.KernelRegistry.instance().remove(backend)
            raise
        finally:
            _loading.reset(token)

    failures = [
        f"the kernel plugin {name} is left out, because it failed to load: {reason}"
        for name, reason in load_points(GROUP, load)
    ]
    for failure in failures:  # at the end, for a filter may turn a warning into an error
        warn(failure)
