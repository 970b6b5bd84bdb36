# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuneSpec`: what is searched, for which objective, under which constraints: the content of a ``tune.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from xpuruntime.errors import PolicyError
from xpuruntime.measuring.statistics import LEAST_GAIN
from xpuruntime.policies import AccuracyPolicy, files
from xpuruntime.policies.compound_kinds import Nested, OneOrMore
from xpuruntime.policies.document import Node, describe_value, from_python
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES, Determinism
from xpuruntime.policies.frozen_dict import FrozenDict
from xpuruntime.policies.kernel_ids import OPS
from xpuruntime.policies.kernel_rule import KernelName
from xpuruntime.policies.kinds import Choice, Integer, Kind, Number, Text
from xpuruntime.policies.memory_policy import ByteSize
from xpuruntime.policies.provider_options import ENGINE_PATTERN, check_engine
from xpuruntime.policies.quantities import Duration, Share, ShortDuration
from xpuruntime.policies.refusal import Refused, quote
from xpuruntime.policies.value import PolicyValue, read_fields
from xpuruntime.tuning.spec_kinds import AtMost, OptionValues, Rounds, ThreadCount, WordOr

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

__all__ = [
    "OBJECTIVES", "SCHEMA", "Budget", "Constraints", "Decide", "Objective", "SearchSpace", "TuneSpec",
]  # fmt: skip

#: The version of the file format.
SCHEMA = "xpuruntime.tune/1"

_MINIMISED = ("latency.p50", "latency.p99", "memory", "energy", "cold_start")
_MAXIMISED = ("throughput",)
#: What ``--for`` takes.
OBJECTIVES = (*_MINIMISED[:2], *_MAXIMISED, *_MINIMISED[2:])


def _check_schema(text: str) -> str:
    if text != SCHEMA:
        near = "; upgrade xpuruntime to read it" if text.startswith("xpuruntime.tune/") else ""
        raise Refused(f"{quote(text)} is not a version that this release reads; it reads {SCHEMA}{near}")
    return text


class Objective(PolicyValue, frozen=True, kw_only=True):
    """What is made small or large, and under which load.

    Attributes
    ----------
    minimise : {"latency.p50", "latency.p99", "memory", "energy", "cold_start"} or None
        Of single runs: their median and 99th percentile. ``memory``: the peak of a fresh process that opens and runs
        the model. ``energy``: joules of a run. ``cold_start``: seconds until the first result of a fresh process.
    maximise : {"throughput"} or None
        Rows a second.
    batch : int
        Rows of one run.
    concurrency : int
        Threads that call the session at the same time.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "minimise": Choice(_MINIMISED, "What is made small.", what="objectives", optional=True),
        "maximise": Choice(_MAXIMISED, "What is made large.", what="objectives", optional=True),
        "batch": Integer(1, 65536, "Rows of one run."),
        "concurrency": Integer(1, 1024, "Threads that call the session at the same time."),
    }

    minimise: str | None = None
    maximise: str | None = None
    batch: int = 1
    concurrency: int = 1

    def check_together(self) -> None:
        """Refuse two objectives, and a load where none is measured."""
        if self.minimise is not None and self.maximise is not None:
            raise Refused(f"contradicts maximise {self.maximise!r}; state one objective", "minimise")
        if self.concurrency > 1 and self.name in ("memory", "energy", "cold_start"):
            raise Refused(f"{self.concurrency} has no meaning for {self.name}; leave it out", "concurrency")

    @property
    def name(self) -> str:
        """The objective as ``--for`` takes it; ``latency.p50`` where none is stated."""
        return self.maximise or self.minimise or "latency.p50"

    @classmethod
    def named(cls, name: str, **load: Any) -> Objective:
        """Return the objective of a name. Raises `PolicyError`."""
        which: dict[str, Any] = {"maximise" if name in _MAXIMISED else "minimise": name}
        return cls(**which, **load)


class Constraints(PolicyValue, frozen=True, kw_only=True):
    """What a candidate must keep to be chosen. In a file ``memory_peak`` is ``memory.peak``, and so on.

    Attributes
    ----------
    accuracy : AccuracyPolicy or "inherit"
        How close all outputs for all inputs must be to the reference. ``"inherit"``: as the base policy states, else as
        the precision of the candidate allows.
    memory_peak : int or None
        Most bytes that a process may have resident while it opens and runs the model.
    latency_p99 : float or None
        Seconds that 99 of 100 runs must keep.
    determinism : str or None
        The grade that must pass; ``None``: that of the base policy.
    start : float or None
        Most seconds until the first result.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "accuracy": WordOr(("inherit",), Nested(AccuracyPolicy), "How close outputs must be to the reference."),
        "memory_peak": AtMost(ByteSize(), "Most memory of the process."),
        "latency_p99": AtMost(ShortDuration(), "Time that 99 of 100 runs must keep."),
        "determinism": Choice(DETERMINISM_GRADES, "Grade that must pass.", what="grades", optional=True),
        "start": AtMost(Duration(), "Longest time until the first result."),
    }
    #: The keys of a file.
    DOCUMENT: ClassVar[dict[str, str]] = {"memory.peak": "memory_peak", "latency.p99": "latency_p99"}

    accuracy: AccuracyPolicy | str = "inherit"
    memory_peak: int | None = None
    latency_p99: float | None = None
    determinism: Determinism | None = None
    start: float | None = None

    @classmethod
    def document_kinds(cls) -> dict[str, Kind]:
        """Return the keys of a file and their kinds."""
        names = {field: key for key, field in cls.DOCUMENT.items()}
        return {names.get(field, field): kind for field, kind in cls.KINDS.items()}

    @classmethod
    def read(cls, node: Node, kinds: dict[str, Kind] | None = None) -> Self:
        """Read a mapping of a document. Raises `Refused` with the node concerned."""
        del kinds
        fields = read_fields(node, cls.document_kinds())
        return cls(**{cls.DOCUMENT.get(key, key): value for key, value in fields.items()})

    def to_plain(self, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return what a file says of this value."""
        names = {field: key for key, field in self.DOCUMENT.items()}
        return {names.get(field, field): value for field, value in super().to_plain(hidden).items()}


class _ConstraintsKind(Nested):
    @property
    def kinds(self) -> dict[str, Kind]:
        return Constraints.document_kinds()


def _kernels(op: str) -> OneOrMore:
    return OneOrMore(KernelName(op), f"Kernels to try for {op}.", optional=True)


class KernelChoices(PolicyValue, frozen=True, kw_only=True):
    """Kernels to try, by operation."""

    KINDS: ClassVar[dict[str, Kind]] = {op: _kernels(op) for op in OPS}

    matmul: tuple[str, ...] | None = None
    attention: tuple[str, ...] | None = None
    layer_norm: tuple[str, ...] | None = None
    rms_norm: tuple[str, ...] | None = None
    conv: tuple[str, ...] | None = None


class SearchSpace(PolicyValue, frozen=True, kw_only=True):
    """Values to try. What is left out is searched as the engines declare it.

    Attributes
    ----------
    engine : tuple of str
        Default: all that ``engine: auto`` may choose.
    precision : tuple of str
        Default: the precision of the base policy; where an accuracy is stated, all that the engine declares.
    cuda_graph, layout : tuple of str
    threads : tuple of int or str
        Numbers, ``"physical"`` and ``"logical"`` cores, and ``"engine"``: not stated.
    kernels : KernelChoices, "auto" or "off"
        ``"auto"``: what a plan accepts of the families of each operation.
    options : dict of str to dict of str to tuple of str
        Engine to option to values, in place of those that the engine declares.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "engine": OneOrMore(
            Text(what="the name of an engine", parse=check_engine, pattern=ENGINE_PATTERN),
            "Engines to try.",
            empty=True,
        ),
        "precision": OneOrMore(
            Choice(("model", "fp32", "tf32", "fp16", "bf16", "int8"), what="precisions"),
            "Precisions to try.",
            empty=True,
        ),
        "cuda_graph": OneOrMore(Choice(("off", "prefer", "require")), "CUDA graphs to try.", empty=True),
        "threads": OneOrMore(ThreadCount(), "Threads to try.", empty=True),
        "layout": OneOrMore(Choice(("auto", "nchw", "nhwc"), what="layouts"), "Layouts to try.", empty=True),
        "kernels": WordOr(("off", "auto"), Nested(KernelChoices), "Kernels to try."),
        "options": OptionValues("Options of engines to try: engine to option to list."),
    }

    engine: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    cuda_graph: tuple[str, ...] = ()
    threads: tuple[int | str, ...] = ()
    layout: tuple[str, ...] = ()
    kernels: KernelChoices | str = "auto"
    options: dict[str, dict[str, tuple[str, ...]]] = FrozenDict()


class Budget(PolicyValue, frozen=True, kw_only=True):
    """How long a search may take, in seconds (``"10m"`` in a file), and how many candidates it opens at most."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "time": Duration("Time that the search may take."),
        "candidates": Integer(1, 100_000, "Most candidates that are opened."),
    }

    time: float = 600.0
    candidates: int = 200


class Decide(PolicyValue, frozen=True, kw_only=True):
    """When a difference counts.

    Attributes
    ----------
    min_effect : float
        Smallest gain that makes a winner: 0.02, ``"2%"`` in a file.
    confidence : float
        Of the result, from 0.5 to 0.9999.
    rounds : tuple of int
        Fewest rounds before anything is decided, and most of one race.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "min_effect": Share("Smallest gain that makes a winner.", most=1.0),
        "confidence": Number(0.5, 0.9999, "Confidence of the result."),
        "rounds": Rounds("Fewest and most rounds of a race."),
    }

    min_effect: float = LEAST_GAIN
    confidence: float = 0.99
    rounds: tuple[int, int] = (7, 61)


class TuneSpec(PolicyValue, frozen=True, kw_only=True):
    r"""What is searched, for which objective, under which constraints.

    Attributes
    ----------
    base : str or None
        A policy file. What it states is fixed, and what is found is compared with it.
    inputs : str or None
        Real inputs, as `Calibration` reads them: an ``.npz`` or ``.npy`` file or a folder. ``"random"`` makes some up.
    objective : Objective
    constraints : Constraints
    space : SearchSpace
    budget : Budget
    decide : Decide
    seed : int
        Of the bootstrap and of inputs that are made up.
    isolation : {"process", "none"}
        ``"none"``: candidates share this process, where a crash ends all.

    Raises
    ------
    PolicyError
        For an unknown key or a bad value.

    Examples
    --------
    >>> spec = TuneSpec.loads("objective: {maximise: throughput, concurrency: 4}\nbudget: {time: 2m}\n")
    >>> spec.objective.name, spec.budget.time
    ('throughput', 120.0)
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "base": Text("Policy whose stated keys are fixed.", what="the path of a policy file", optional=True),
        "inputs": Text("Real inputs; 'random' makes some up.", what="a path, or 'random'", optional=True),
        "objective": Nested(Objective, "What is made small or large, and under which load."),
        "constraints": _ConstraintsKind(Constraints, "What a candidate must keep."),
        "space": Nested(SearchSpace, "Values to try."),
        "budget": Nested(Budget, "How long a search may take."),
        "decide": Nested(Decide, "When a difference counts."),
        "seed": Integer(0, 2**31 - 1, "Of the bootstrap, and of inputs that are made up."),
        "isolation": Choice(("process", "none"), "Whether each candidate has a process of its own."),
    }
    #: The keys of a file.
    DOCUMENT: ClassVar[dict[str, Kind]] = {
        "schema": Text("Version of the file format.", what=f"'{SCHEMA}'", parse=_check_schema, pattern=f"^{SCHEMA}$"),
        **KINDS,
    }

    base: str | None = None
    inputs: str | None = None
    objective: Objective = Objective()
    constraints: Constraints = Constraints()
    space: SearchSpace = SearchSpace()
    budget: Budget = Budget()
    decide: Decide = Decide()
    seed: int = 0
    isolation: Literal["process", "none"] = "process"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file: ``.yaml``, ``.yml`` or ``.json``. Paths in it are relative to its folder.

        Raises
        ------
        PolicyError
            ``file:line:column: message``.
        """
        from pathlib import Path

        spec = cls.from_document(files.load(path))
        folder = Path(path).parent
        moved = {
            name: str(folder / value)
            for name in ("base", "inputs")
            if (value := getattr(spec, name)) is not None and value != "random"
        }
        return spec._replaced(moved) if moved else spec

    @classmethod
    def loads(cls, text: str, format: Literal["yaml", "json"] = "yaml", *, name: str = "tune") -> Self:
        """Read the text of a file; `name` stands for the file in messages. Raises `PolicyError`."""
        return cls.from_document(files.loads(text, format, name))

    @classmethod
    def coerce(cls, value: TuneSpec | str | os.PathLike[str] | Mapping[str, Any] | None) -> TuneSpec:
        """Make a specification of what a caller may give: one, a path, a mapping with the keys of a file, or ``None``.

        Raises
        ------
        PolicyError
        """
        if value is None:
            return cls()
        if isinstance(value, TuneSpec):
            return value
        if isinstance(value, Mapping):
            try:
                document = files.Document(from_python(dict(value)), "tune")
            except Refused as refused:
                raise files.policy_error(refused, "tune", "the specification") from None
            return cls.from_document(document)
        if isinstance(value, str) or hasattr(value, "__fspath__"):
            return cls.load(value)
        raise PolicyError(f"tune: expected a TuneSpec, a path or a mapping, got {describe_value(value)}")

    @classmethod
    def from_document(cls, document: files.Document) -> Self:
        """Make a specification of a document that was read. Raises `PolicyError` with the place."""
        try:
            fields = read_fields(document.root, cls.DOCUMENT)
        except Refused as refused:
            raise files.policy_error(refused, document.name, "the specification") from None
        fields.pop("schema", None)
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return what a file says, without what is at its default."""
        return {"schema": SCHEMA, **self.to_plain()}
