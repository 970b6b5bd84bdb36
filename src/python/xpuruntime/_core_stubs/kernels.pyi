# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for kernels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from xpuruntime._core import Tensor

#: An operation: ``{"op": "matmul", "phase": "infer", "device": "cuda:0", "operands": {"a": {"dtype": "float16",
#: "shape": (16, 64), "strides": (64, 1), "alignment": 256}, ...}, "attributes": {"scale", "epsilon", "dropout_p",
#: "activation", "causal" ("none", "top_left", "bottom_right"), "allow_tf32", "deterministic", "groups", "stride",
#: "dilation", "padding" (top, left, bottom, right)}}``. Strides count elements; `alignment` is the largest power of two
#: up to 256 that divides the address, in bytes. A kernel also finds ``"text"``, ``"compute_capability"``,
#: ``"sm_count"`` and ``"device_name"``. Given by a caller, phase, strides, alignment and attributes may be left out.
OpDict: TypeAlias = dict[str, Any]

class DecisionLog:
    """Decisions under the rules that name it, apart from those of the process; at most 10,000. Thread-safe."""

    def __init__(self) -> None: ...
    def decisions(self) -> list[dict[str, Any]]:
        """Return the distinct decisions since it was made or cleared, oldest first; see `Dispatcher.decisions`."""

    def counts(self) -> list[int]:
        """Return how many calls each of them has served, in the same order."""

    @property
    def dropped(self) -> int:
        """Decisions that were not recorded because 10,000 are."""

    def clear(self) -> None: ...

class KernelRules:
    """The rules of a KernelPolicy for one place; `xpuruntime.ops.rules.compile_rules` makes them. Immutable.

    Each rule is ``{"match": {...}, "use": [...], "source": "kernels.rules[0]"}``; `match` has any of ``op, device``
    (text), ``m, n, k, head_dim`` (first and last number), ``dtypes, phases`` (lists). Names of nodes and modules were
    compared when the rules of the place were selected. With `log`, what is decided by these rules is recorded there,
    and not in the log of the process. `tuning` has any of ``min_effect, confidence, budget``, see `TuningPolicy`.
    """

    def __init__(
        self,
        *,
        rules: Sequence[dict[str, Any]] = (),
        defaults: Sequence[dict[str, Any]] = (),
        enforcement: str = "prefer",
        auto_strategy: str = "first_supported",
        log: DecisionLog | None = None,
        tuning: dict[str, float] | None = None,
    ) -> None: ...
    def choose(
        self,
        desc: OpDict,
        *,
        compute_capability: tuple[int, int] | None = None,
    ) -> tuple[tuple[str, ...], str]:
        """Return the kernels asked for an operation, in order, and the key that asks.

        With `compute_capability` the device need not be there.
        """

class KernelRegistry:
    """Knows which kernels there are."""

    @staticmethod
    def instance() -> KernelRegistry: ...
    def kernels(self, op: str | None = None) -> list[dict[str, Any]]:
        """Return the kernels in the order in which ``first_supported`` tries them. May open the vendors' libraries.

        Each has ``id, op, backend, device_type, description, limits, families, automatic, available, reason, version``.
        """

    def find(self, op: str, word: str) -> list[str]:
        """Return the ids of the kernels that a word of a KernelPolicy means."""

    def supports(
        self, desc: OpDict, *, compute_capability: tuple[int, int] | None = None
    ) -> list[tuple[str, bool, str]]:
        """Return of each kernel its id, whether it can serve an operation, and if not why. Opens no library.

        With `compute_capability` the device need not be there.
        """

    def remove(self, backend: str) -> int:
        """Take out every kernel of a backend. Returns how many."""

    @property
    def version(self) -> int:
        """A number that grows with every change."""

class CallSite:
    """One place that calls operations under one policy, and remembers what it chose.

    Parameters
    ----------
    rules : KernelRules
    node, module : str
        Names that rules may ask for.
    pin : sequence of str
        Kernels that the call itself asks for, before the policy; when none of them can serve, the call is refused.
    """

    def __init__(self, rules: KernelRules, *, node: str = "", module: str = "", pin: Sequence[str] = ()) -> None: ...
    def choose(self, desc: OpDict, stream: int = 0) -> dict[str, Any]:
        """Choose and prepare the kernel for an operation. Returns the decision; see `Dispatcher.decisions`.

        Raises
        ------
        UnsupportedOperationError
            When no kernel can serve, or none of those that are demanded; names every candidate and its reason.
        """

    def decisions(self) -> list[dict[str, Any]]:
        """Return what it has decided and remembers, also where the log is full; see `Dispatcher.decisions`."""

class Dispatcher:
    """Chooses kernels, and keeps the log of decisions."""

    @staticmethod
    def instance() -> Dispatcher: ...
    def plan(
        self,
        rules: KernelRules,
        desc: OpDict,
        *,
        node: str = "",
        module: str = "",
        pin: Sequence[str] = (),
        compute_capability: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Decide without preparing or measuring anything. With `compute_capability` the device need not be there."""

    def decisions(self) -> list[dict[str, Any]]:
        """Return the distinct decisions of the process since the start or the last clear, oldest first.

        Those under rules with a log of their own are not among them.

        Each has ``op, phase, device, dtype, shapes, description, node, module, asked, asked_by, candidates, chosen,
        config, source`` (``pinned``, ``rule``, ``tuned``, ``first``, ``fallback``), ``notes, count, text``; a candidate
        has ``id, config, accepted, reason, measured_us``.
        """

    @property
    def dropped_decisions(self) -> int:
        """Decisions that were not recorded because 10,000 are."""

    def clear_decisions(self) -> None: ...
    def set_tuning_store(self, store: TuningStore | None) -> None:
        """Keep measured choices in an object with `find` and `put`; ``None``: in this process only."""

    def set_advisor(self, function: Callable[[str, str, dict[str, Any]], str], kernels: set[str]) -> None:
        """Call a function with the id, the version of the backend and the operation before one of `kernels` is chosen.

        It returns why not, or nothing.
        """

    def set_tuning_watch(self, function: Callable[[str, int, int, int, float], bool] | None) -> None:
        """Call a function before every round with the operation, candidates, rounds, the most rounds and seconds.

        It returns whether to end there. ``None``: nobody is asked.
        """

    def forget_measurements(self) -> None:
        """Forget what was measured in this process."""

    def workspace_bytes(self) -> int:
        """Return the bytes of scratch memory that are held for kernels."""

    def clear_workspaces(self) -> None:
        """Give scratch memory back that no graph holds."""

def compare_paired(
    times: Sequence[float],
    control: Sequence[float],
    twin: Sequence[float],
    *,
    relative: float = 0.02,
    absolute_us: float = 0.0,
    confidence: float = 0.99,
    looks: int = 1,
    family: int = 1,
) -> dict[str, Any]:
    """Decide as the core's tuner: ``ratio, low, high, margin, rounds, verdict, not_faster``; times in microseconds."""

def look_rounds(first: int, last: int, *, confidence: float = 0.99, family: int = 1) -> list[int]:
    """Return after how many rounds the core's tuner looks at its times."""

class TuningStore(Protocol):
    """Keeps what was measured; see `xpuruntime.ops.tuning_cache.TuningCache`. Called from any thread."""

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]: ...
    def put(self, key: str, entry: Mapping[str, Any]) -> str: ...

class PythonBackend(Protocol):
    """A library of kernels, written in Python."""

    @property
    def name(self) -> str:
        """The word before the dot of a kernel id."""

    @property
    def device_type(self) -> str:
        """Either ``"cpu"`` or ``"cuda"``."""

    def available(self) -> tuple[bool, str]:
        """Return whether it can be used here, and if not why and what to install."""

    def version(self) -> str:
        """Return what decides how fast and how exact its kernels are."""

class PythonKernel(Protocol):
    """A kernel, written in Python. May also have `families`, `automatic` and ``configs(desc, most)``."""

    @property
    def id(self) -> str:
        """Name of the form ``backend.name``."""

    @property
    def op(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def limits(self) -> str: ...
    def supports(self, desc: OpDict) -> tuple[bool, str]:
        """Return whether it can do exactly this, and if not why. Touches no device."""

    def prepare(self, desc: OpDict, config: str) -> Callable[[dict[str, Tensor], int], None]:
        """Return what does the work: called with the operands by name and the stream.

        The tensors are views that are valid during the call only; inputs are not to be written. The callable may have
        `config`, a text that `prepare` takes back, and `repeatable`. UnsupportedOperationError means that it cannot be
        done after all. Where `config` is given, the callable has the same one, or it is refused.
        """

def register_python_kernel(backend: PythonBackend, *kernels: PythonKernel) -> None:
    """Register kernels that Python objects define, all or none.

    Raises
    ------
    InputError
        For an object that lacks something, an id that is taken or not of this backend, or a name that another backend
        has.
    """

def register_plugin_library(path: str, families: Mapping[str, Sequence[str]]) -> list[str]:
    """Register the kernels of a shared library, all or none; see ``kernel_plugin.h``. Returns their ids.

    `families` are the words that policies know for an operation, by its name; those of others are not checked.

    Raises
    ------
    InputError
        When it cannot be opened, is no such library, describes a kernel that makes no sense or is of an unknown
        family, or brings an id or the name of a backend that is taken.
    """

def set_search_folders(folders: Iterable[str]) -> None:
    """Set the folders in which vendors' libraries are looked for, in order."""

def search_folders() -> list[str]: ...
