# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels that a policy names by where they come from: an operator of a module, or a layer of a repository.

``triton:package.module.operator``, ``hf:organization/repository@<commit>/Layer`` and
``hf:/folder@sha256:<digest>/Layer``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.files.digests import file_digest
from xpuruntime.ops.torch_kernels import TorchKernel

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import Saved, TorchCall

#: Attributes of a call that say how this library calls a kernel, and are no arguments of it.
_OURS = ("formula", "paired", "upcast", "needs", "mirrored")
#: Folder to the digest of the code that this process has loaded from it: its modules are imported once.
_loaded: dict[str, str] = {}
_importing = threading.Lock()
_LOADER = 'pip install "kernels>=0.17,<0.18" installs it'
_UNPAIRED = (
    "PyTorch calls the gradient of its norm without epsilon, from which this kernel cannot compute it; it serves a "
    "norm that records no gradient"
)


class _Function(TorchKernel):
    """A differentiable function on tensors: called with the operands in order, then with the other arguments."""

    # Its gradient is that of its own autograd formula, for which the function is called once more.

    def __init__(self, word: str, op: str, function: Callable[..., Any]) -> None:
        self.id = word
        self.op = op
        self._function = function

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.op == "attention":
            return False, "a function returns no logarithm of the sums of exponentials, which attention has to"
        if call.op == "layer_norm":
            return False, "a function returns no mean and no rstd, which a layer norm has to"
        if call.phase in ("train", "backward") and not call.attributes.get("paired", True):
            return False, _UNPAIRED
        if call.attributes.get("upcast"):
            return False, "it is called for the loss in the type of the logits"
        if call.attributes.get("formula", "torch") != "torch":
            return False, "it is called for the formula of F.rms_norm alone"
        return True, ""

    def _call(self, call: TorchCall, tensors: Sequence[Any]) -> tuple[Any, ...]:
        options = [value for name, value in call.attributes.items() if name not in _OURS]
        result = self._function(*tensors, *options)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result or ())

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        with torch.no_grad():
            outputs = self._call(call, [x.detach() for x in tensors])
        if call.op != "rms_norm":
            return outputs, ()
        wide = tensors[0] if tensors[0].dtype == torch.float64 else tensors[0].float()
        return outputs, (torch.rsqrt(wide.pow(2).mean(-1) + call.attributes["epsilon"]),)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in saved.inputs]
            outputs = self._call(call, inputs)
            wanted = [x for x in inputs if x.requires_grad]
            gradients = iter(torch.autograd.grad(outputs, wanted, list(grads)))
        return [next(gradients).contiguous() if x.requires_grad else None for x in inputs]


class _Layer(_Function):
    """The forward of a layer without state of its own, as Hugging Face repositories of kernels have them."""

    def __init__(self, word: str, op: str, layer: Any) -> None:
        self.differentiable = bool(getattr(layer, "has_backward", True))
        self.signature = source_facts(word).get("signature", "")
        forward = inspect.unwrap(layer.forward)  # a policy adapts the norms of all classes, this one too

        def run(x: Any, weight: Any, epsilon: float) -> Any:
            return forward(SimpleNamespace(weight=weight, variance_epsilon=epsilon, eps=epsilon), x)

        super().__init__(word, op, run)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.op != "rms_norm" or "weight" not in call.operands:
            return False, "layers of repositories serve RMS norms with a weight alone"
        if call.phase in ("train", "backward") and not self.differentiable:
            return False, "the layer says has_backward = False"
        return super().supports(call)


def kernel_of_source(word: str, op: str) -> TorchKernel:
    """Return the kernel that a word names by its source, for an operation."""
    kind, _, rest = word.partition(":")
    if kind == "hf":
        return _made(_Layer, word, op, _layer_of(rest))
    module, _, name = rest.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise InputError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise InputError(f"{module} has no operator {name}")
    return _made(_Function, word, op, function)


@functools.lru_cache(maxsize=256)
def _made(kind: type[_Function], word: str, op: str, function: Any) -> TorchKernel:
    """Return the kernel of what a word names now: a module may have been imported anew."""
    return kind(word, op, function)


@functools.lru_cache(maxsize=256)
def _layer_of(source: str) -> Any:
    location, _, name = source.rpartition("/")
    repository, _, pin = location.rpartition("@")
    try:
        from kernels import get_kernel, get_local_kernel
    except ImportError as error:
        raise InputError(_no_loader(error)) from None
    try:
        if repository.startswith("/"):
            digest = folder_digest(Path(repository))
            if f"sha256:{digest}" != pin:
                raise InputError(f"{repository} has the digest sha256:{digest}, and the policy names {pin}")
            if (before := _loaded.setdefault(repository, digest)) != digest:
                raise InputError(
                    f"this process has loaded {repository} with the digest sha256:{before}; start another process"
                )
            folder = Path(repository)
            with _compiled_anew():
                module = get_local_kernel(folder, trust_remote_code=False)
        else:
            _, folder = _signature(repository, pin)
            with _compiled_anew():
                module = get_kernel(repository, revision=pin, trust_remote_code=False)
        if other := _from_elsewhere(module, folder):
            raise InputError(f"its module {module.__name__} is that of {other}, loaded before; start another process")
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{repository} cannot be loaded: {type(error).__name__}: {error}") from error
    layer = getattr(getattr(module, "layers", None), name, None)
    if layer is None:
        raise InputError(f"{repository} has no layer {name}")
    return layer


def _no_loader(error: ImportError) -> str:
    if error.name == "kernels":
        return f"the package kernels is not installed; {_LOADER}"
    return f"the package kernels cannot be imported: {error}; {_LOADER} with what it needs"


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Have modules compiled from their files: bytecode beside these is part of no digest and of no signature."""
    with _importing:
        before = sys.pycache_prefix, sys.dont_write_bytecode
        sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
        try:
            yield
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = before


def _from_elsewhere(module: Any, folder: Path) -> str:
    """Return the file of a part of a module that is outside of a folder; repositories may have the same names."""
    names = [name for name in sys.modules if f"{name}.".startswith(f"{module.__name__}.")]
    files = [file for name in names if (file := getattr(sys.modules[name], "__file__", None)) is not None]
    inside = folder.resolve()
    return next((file for file in files if not Path(file).parent.resolve().is_relative_to(inside)), "")


@functools.lru_cache(maxsize=256)
def _signature(repository: str, commit: str) -> tuple[str, Path]:
    # Return whether a commit of a repository is ``verified`` or ``unsigned``, and where it is; nothing of it has run. A
    # signature that is wrong, or that cannot be checked, is an InputError.
    replaced = {entry.partition("=")[0] for entry in os.environ.get("LOCAL_KERNELS", "").split(":")}
    if repository in replaced:
        raise InputError(f"LOCAL_KERNELS puts a folder in the place of {repository}; unset LOCAL_KERNELS")
    try:
        from huggingface_hub import constants
        from kernels.install import install_kernel
        from kernels.verify import VerificationResult, verify_variant
    except ImportError as error:
        raise InputError(_no_loader(error)) from None
    try:
        folder = install_kernel(
            repository, revision=commit, local_files_only=constants.HF_HUB_OFFLINE, trust_remote_code=False
        )
    except Exception as error:
        raise InputError(f"{repository} cannot be loaded: {type(error).__name__}: {error}") from error
    try:
        result = verify_variant(folder)
    except Exception as error:
        raise InputError(f"the signature of {repository} cannot be checked: {type(error).__name__}: {error}") from error
    if isinstance(result, VerificationResult.SignatureBundleMissing):
        return "unsigned", folder
    if not isinstance(result, VerificationResult.Success):
        why = getattr(result, "reason", "") or ", ".join(map(str, getattr(result, "violations", ())))
        raise InputError(f"the signature of {repository} does not hold: {type(result).__name__}: {why}".rstrip(": "))
    return "verified", folder


def source_facts(word: str) -> dict[str, str]:
    """Return the digest of the files of a repository in a folder, or of the file of a module.

    Of a repository of the Hub it is the commit, and whether that is signed.
    """
    kind, _, rest = word.partition(":")
    if kind == "hf":
        repository, _, pin = rest.rpartition("/")[0].rpartition("@")
        if repository.startswith("/"):
            return {"code": f"sha256 {folder_digest(Path(repository))}"}
        return {"code": f"commit {pin}", "signature": _signature(repository, pin)[0]}
    module = rest.rpartition(".")[0]
    try:
        file = getattr(importlib.import_module(module), "__file__", None)
        return {"code": "unreadable" if file is None else f"sha256 {file_digest(file)}"}
    except Exception as error:
        raise InputError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files in a folder, but for bytecode, which is not run.

    A link to a folder is refused: what it holds is elsewhere.
    """
    digest = hashlib.sha256()
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    if linked := next((path for path in paths if path.is_symlink() and path.is_dir()), None):
        raise InputError(f"{linked} is a link to a folder. Fix: put a copy of that folder in its place")
    files = sorted(path for path in paths if path.is_file())
    if not files:
        raise InputError(f"{folder} has no files")
    for path in files:
        try:
            digest.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
