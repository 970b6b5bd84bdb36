# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TorchKernel`: a kernel on tensors of PyTorch, of another package, that serves an operation forward and backward.

Nothing here imports PyTorch or a package that has such kernels: that happens when a policy names one.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.files.digests import file_digest
from xpuruntime.policies.compound_kinds import FrozenDict
from xpuruntime.policies.kernel_rules import FAMILIES, SOURCE_PREFIXES
from xpuruntime.runtime.packages import distributions

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: Operations whose calls go to kernels of NumPy-like arrays alone; see `PythonKernel`.
_BY_ARRAYS = ("matmul", "conv")
#: First part of an id, or a family, to the module of this library that adapts the kernels of that package.
_ADAPTERS = {
    "liger": "xpuruntime.pytorch.providers.liger",
    "quack": "xpuruntime.pytorch.providers.quack",
    "fa4": "xpuruntime.pytorch.providers.flash",
    "torch_masked": "xpuruntime.pytorch.providers.flash",
    "flashinfer": "xpuruntime.pytorch.providers.flashinfer",
    "triton_raw": "xpuruntime.pytorch.providers.one_query",
    "chunked": "xpuruntime.pytorch.providers.chunked",
    "torch_chunked": "xpuruntime.pytorch.providers.chunked",
    "compiled": "xpuruntime.pytorch.providers.compiled",
}
#: What loads kernels that are named by where they come from.
_SOURCES = "xpuruntime.pytorch.providers.sources"

#: ``off`` leaves the comparison with float64 out.
CANARY_VARIABLE = "XPURUNTIME_CANARY"

_lock = threading.RLock()
_registered: dict[str, TorchKernel] = {}
#: Backend to the type of device that it computes on.
_devices: dict[str, str] = {}


class Operand(NamedTuple):
    """What is known of a tensor without its data: strides in elements, and the alignment of its address in bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 256


class _FrozenFacts(FrozenDict):
    __slots__ = ()
    OWNER = "a call"
    FIX = "make a copy with dict(...) and a call by dataclasses.replace"


@dataclass(frozen=True, slots=True)
class TorchCall:
    """One call of an operation, without data.

    Attributes
    ----------
    op, phase : str
        ``"rms_norm"``; ``"train"``, ``"infer"``, ``"prefill"``, ``"decode"`` or ``"backward"``.
    device, arch : str
        ``"cuda:0"`` and ``"sm90"``; ``"cpu"`` and an empty text.
    operands : mapping of str to Operand
        By name, in the order in which the kernel gets the tensors.
    attributes : mapping of str to object
        Of norms ``epsilon`` and ``formula``; of attention ``causal``, ``scale`` and ``dropout_p``.
    deterministic : bool
        Whether the same bits are required in each run.
    """

    op: str
    phase: str
    device: str
    arch: str
    operands: Mapping[str, Operand]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    #: Everything of the call, to be compared.
    key: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("operands", "attributes"):  # calls are kept, and shared by all that are alike
            object.__setattr__(self, name, _FrozenFacts(getattr(self, name)))
        key = (
            self.op, self.phase, self.device, self.deterministic, tuple(self.operands.items()),
            tuple(self.attributes.items()),
        )  # fmt: skip
        object.__setattr__(self, "key", key)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {list(operand.shape)} {operand.dtype}" for name, operand in self.operands.items())
        return f"{self.op} ({self.phase}) of {shown} on {self.device}"


class Saved(NamedTuple):
    """What a backward gets of its forward: the tensors that it was called with, its outputs, and what it saved.

    `outputs` are empty where PyTorch keeps none for the gradient of an operation, as for norms.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    extra: tuple[Any, ...]


class TorchKernel:
    """A kernel on tensors of PyTorch. Subclass it, and register an object by `xpuruntime.ops.plugins.register`.

    Attributes
    ----------
    id, op : str
        ``"mine.rms_norm"``, and the operation that it serves.
    families : tuple of str
        Families of a policy that include it.
    distributions : tuple of str
        The packages that bring it, each with the versions that fit, such as ``"liger-kernel>=0.8.5,<0.9"``. All of
        them must be installed, and a lock holds their versions and contents.
    install : str
        The command that installs them.
    environment : tuple of str
        Patterns of the environment variables that change what it computes.
    operators, device_kernels : tuple of str
        Patterns of the names that profilers show of it.
    capturable, deterministic : bool or str
        Whether a CUDA graph may be captured of it, and whether it gives the same bits in each run; a sentence says
        why not.
    by_kind : bool
        Whether its code is made for the types and layouts of each call, so that it is compared with float64 for those.
    adds_masks : bool
        Whether its attention makes numbers to be added of a boolean mask, and takes such numbers as well: compiled code
        then makes them once for all calls with that mask.
    traceable : bool
        Whether the forward of its attention calls operators of PyTorch's alone, whose gradients do what its backward
        does: compiled code then has these in its graph, where all sizes are numbers.
    automatic : bool or str
        Whether ``auto`` with ``best_performance`` may measure and choose it, or the type of device on which it may. The
        package is then imported for that.
    """

    id: str
    op: str
    description: str = ""
    limits: str = ""
    families: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    install: str = ""
    environment: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    device_kernels: tuple[str, ...] = ()
    capturable: bool | str = True
    deterministic: bool | str = True
    by_kind: bool = False
    adds_masks: bool = False
    traceable: bool = False
    automatic: bool | str = True
    #: Of this library's own: whether it calls no operator that autocast or the fast kernels of a policy would change,
    #: and returns what it has to.
    alone: bool = False

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        """Say whether it can do exactly this, and if not why. Touches no device and imports nothing of its package.

        All limits belong here: those that its package states by ``assert`` are gone under ``python -O``.
        """
        raise NotImplementedError

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the outputs, and what the backward needs beside inputs and outputs, all newly allocated.

        What an operation saves is fixed for norms, ``(rstd,)``, and for attention, ``(lse,)``: another kernel may
        compute the gradient. For other operations it is what `saved_like` says.
        """
        raise NotImplementedError

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        """Return a gradient for each input, ``None`` where it has none. Writes no tensor that it gets."""
        raise NotImplementedError

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        """Return tensors as `forward` saves them, without data: for code that is compiled, which knows them before."""
        del call, tensors
        return ()


def register_torch_kernels(backend: str, device_type: str, *kernels: TorchKernel) -> None:
    """Register kernels, all or none. Raises `InputError`."""
    from packaging.requirements import InvalidRequirement, Requirement

    with _lock:
        for kernel in kernels:
            name, op = getattr(kernel, "id", None), getattr(kernel, "op", None)
            if (
                not isinstance(name, str)
                or name.partition(".")[0] != backend
                or not name.partition(".")[2].isidentifier()
            ):
                raise InputError(f"a TorchKernel of the backend {backend!r} has the id {name!r}. Fix: {backend}.name")
            if op not in FAMILIES or op in _BY_ARRAYS:
                known = ", ".join(known for known in FAMILIES if known not in _BY_ARRAYS)
                raise InputError(f"the TorchKernel {name} has the operation {op!r}. Fix: state one of {known}")
            unknown = [family for family in kernel.families if family == "auto" or family not in FAMILIES[op]]
            if unknown:
                raise InputError(f"the TorchKernel {name} is of the family {unknown[0]!r}, which {op} does not have")
            if name in _registered or backend in _ADAPTERS:
                raise InputError(f"a kernel {name} is registered already. Fix: give this one another id")
            try:
                hash(kernel)
                for requirement in kernel.distributions if isinstance(kernel.distributions, tuple) else "?":
                    Requirement(requirement)
            except (InvalidRequirement, TypeError) as error:
                what = "; ".join(str(error).split("\n")[:1])
                fix = 'state a tuple such as ("liger-kernel>=0.8.5,<0.9",), and leave __hash__ as it is'
                raise InputError(f"the TorchKernel {name} cannot be registered: {what}. Fix: {fix}") from None
        _registered.update((kernel.id, kernel) for kernel in kernels)
        _devices[backend] = device_type


def registered_torch_kernels() -> list[tuple[TorchKernel, str]]:
    """Return the kernels that plugins have registered, each with the type of device that it computes on."""
    with _lock:
        return [(kernel, _devices[kernel.id.partition(".")[0]]) for kernel in _registered.values()]


def forget_torch_kernels(backend: str) -> None:
    """Remove the kernels of a backend."""
    with _lock:
        for name in [name for name in _registered if name.partition(".")[0] == backend]:
            del _registered[name]


def is_torch_kernel(word: str) -> bool:
    """Say whether a word of a policy means a `TorchKernel`, without importing any."""
    first = word.partition("@")[0].partition(".")[0]
    return word.startswith(SOURCE_PREFIXES) or first in _ADAPTERS or _registered_for(word, None) is not None


def find_torch_kernel(word: str, op: str) -> TorchKernel | None:
    """Return the kernel that a word means for an operation; ``None`` where it means none.

    Raises
    ------
    InputError
        The word names a source, and what it names is missing.
    """
    if op in _BY_ARRAYS:
        return None
    if word.startswith(SOURCE_PREFIXES):
        named: TorchKernel = importlib.import_module(_SOURCES).kernel_of_source(word, op)
        return named
    if word.partition(".")[0] in _ADAPTERS:
        return _of_adapter(word, op)
    return _registered_for(word, op)


@functools.lru_cache(maxsize=256)
def _of_adapter(word: str, op: str) -> TorchKernel | None:
    every: tuple[TorchKernel, ...] = importlib.import_module(_ADAPTERS[word.partition(".")[0]]).KERNELS
    return next((kernel for kernel in every if kernel.op == op and _means(kernel, word)), None)


def automatic_torch_kernels(op: str, device_type: str) -> tuple[TorchKernel, ...]:
    """Return the kernels that may be chosen for an operation without being named: those whose packages are installed.

    No package is imported for it.
    """
    if op in _BY_ARRAYS:
        return ()
    modules = dict.fromkeys(_ADAPTERS.values())
    every = [kernel for module in modules for kernel in importlib.import_module(module).KERNELS]
    every += [kernel for kernel, device in registered_torch_kernels() if device == device_type]
    mine = (kernel for kernel in every if kernel.op == op and kernel.automatic in (True, device_type))
    return tuple(kernel for kernel in mine if not missing_distributions(kernel))


def _registered_for(word: str, op: str | None) -> TorchKernel | None:
    with _lock:
        return next(
            (kernel for kernel in _registered.values() if op in (None, kernel.op) and _means(kernel, word)), None
        )


def _means(kernel: TorchKernel, word: str) -> bool:
    return word == kernel.id or word in kernel.families


def _every(word: str) -> tuple[TorchKernel, ...]:
    """Return the kernels that a word means for any operation; none where nothing can be imported here."""
    kernels = []
    for op in FAMILIES:
        try:
            kernel = find_torch_kernel(word, op)
        except (ImportError, InputError):
            continue
        if kernel is not None:
            kernels.append(kernel)
    return tuple(kernels)


def packages_of_kernel(word: str) -> tuple[str, ...]:
    """Return the names of the distributions that bring a kernel; none for one of this library or of PyTorch."""
    from packaging.utils import canonicalize_name

    if not is_torch_kernel(word):
        return ()
    stated = [wanted.name for kernel in _every(word) for wanted in _requirements(kernel)]
    return tuple(dict.fromkeys(map(str, map(canonicalize_name, stated))))


def _requirements(kernel: TorchKernel) -> list[Requirement]:
    """Return what a kernel's packages have to be here; markers may leave some out."""
    from packaging.requirements import Requirement

    every = map(Requirement, kernel.distributions)
    return [wanted for wanted in every if wanted.marker is None or wanted.marker.evaluate()]


def environment_of(word: str) -> tuple[str, ...]:
    """Return patterns of the environment variables that change what a kernel computes."""
    if not is_torch_kernel(word):
        return ()
    return tuple(dict.fromkeys(pattern for kernel in _every(word) for pattern in kernel.environment))


@functools.lru_cache(maxsize=256)
def module_digest(name: str) -> str:
    """Return the digest of the file of a module, which is not imported for that."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None) if loaded is not None else _file_of(name)
    try:
        return "unreadable" if file is None else f"sha256 {file_digest(file)}"
    except OSError:
        return "unreadable"


def _file_of(name: str) -> str | None:
    package, *rest = name.split(".")
    folders = getattr(sys.modules.get(package), "__path__", ())  # several of an editable installation
    paths = (f"{Path(folder, *rest)}.py" for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113 - a text


def adapter_facts(word: str) -> dict[str, str] | None:
    """Return the class that calls a kernel of another package, and the digest of its code; ``None`` for no such."""
    kernel = next(iter(_every(word)), None) if is_torch_kernel(word) else None
    if kernel is None:
        return None
    kind = type(kernel)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "code": module_digest(kind.__module__)}


def compares(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether kernels of other packages are compared with float64 before their first use."""
    return environment.get(CANARY_VARIABLE, "").strip().lower() != "off"


def canary_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a kernel that serves was compared by, and that it passed; a kernel that fails cannot serve."""
    names = (*(f"pytorch.providers.{name}" for name in ("canary", "canary_cases", "operations")), "evidence.tolerances")
    cases = " ".join(module_digest(f"xpuruntime.{name}") for name in names)
    return {"cases": cases, "result": "passed" if compares(environment) else "not compared"}


def distribution_facts(name: str) -> dict[str, str] | None:
    """Return the version of an installed distribution and the digest of the list of its files; ``None`` without one."""
    installed = next((distribution for distribution in distributions() if distribution.name == name), None)
    if installed is None:
        return None
    try:
        record = f"sha256 {file_digest(Path(installed.record, 'RECORD'))}"
    except OSError:
        record = "its installer kept no list"
    return {"version": installed.version, "record": record}


def source_of(word: str) -> dict[str, str] | None:
    """Return the digest of the code that a word names by where it comes from; ``None`` for other words."""
    if not word.startswith(SOURCE_PREFIXES):
        return None
    try:
        facts: dict[str, str] = importlib.import_module(_SOURCES).source_facts(word)
    except (ImportError, InputError) as error:
        return {"code": f"unreadable: {error}"}
    return facts


def environment_values(kernel: TorchKernel) -> dict[str, str]:
    """Return the environment variables that are set and change what a kernel computes."""
    names = {name for pattern in kernel.environment for name in fnmatch.filter(os.environ, pattern)}
    return {name: os.environ[name] for name in sorted(names)}


def missing_distributions(kernel: TorchKernel) -> str:
    """Return what of a kernel's packages is missing or of another version, with the command; empty where none is."""
    from packaging.utils import canonicalize_name

    installed = {distribution.name: distribution.version for distribution in reversed(list(distributions()))}
    wrong = []
    for wanted in _requirements(kernel):
        version = installed.get(canonicalize_name(wanted.name))
        if version is None:
            wrong.append(f"{wanted.name} is not installed")
        elif not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} is {version}, and {wanted.specifier} is needed")
    if not wrong:
        return ""
    command = kernel.install or f"pip install {' '.join(repr(text) for text in kernel.distributions)}"
    return f"{'; '.join(wrong)}; {command} installs it"
