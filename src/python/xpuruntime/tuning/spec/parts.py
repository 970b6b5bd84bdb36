# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parts of a `TuneSpec` and their kinds of values: objective, constraints, search space, budget, noise margins."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from xpuruntime.engines.control_builder import BOOL
from xpuruntime.measuring.statistics import LEAST_GAIN, look_rounds
from xpuruntime.policies import AccuracyPolicy
from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, Nested, OneOrMore, read_entries
from xpuruntime.policies.device_spec import ENGINE_PATTERN, ByteSize, check_engine
from xpuruntime.policies.document import (
    MappingNode,
    Node,
    Refused,
    ScalarNode,
    SequenceNode,
    describe,
    describe_value,
    did_you_mean,
    quote,
)
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES, Determinism
from xpuruntime.policies.kernel_rules import KernelName
from xpuruntime.policies.kinds import (
    Choice,
    Duration,
    Integer,
    Kind,
    Number,
    Percentage,
    ShortDuration,
    Text,
    refuse_control_characters,
)
from xpuruntime.policies.value import PolicyValue, field, read_fields

_MOST_ROUNDS = 10_000


class AtMost(Text):
    """An upper limit: ``<=`` and a value of another kind; stored as that value."""

    def __init__(self, item: Kind, doc: str = "") -> None:
        super().__init__(doc, what=f"'<=' and {item.expects()}", optional=True)
        self._item = item

    def _check(self, value: Any) -> Any:
        if not isinstance(value, str):
            return self._item.check(value)
        refuse_control_characters(value)
        text = value.strip()
        if not text.startswith("<="):
            raise Refused(f"{quote(value)} is not an upper limit. Fix: write '<={text.lstrip('<>= ')}'")
        return self._item.check(text[2:].strip())

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else f"<={self._item.plain(value)}"

    def _schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^\\s*<="}


class WordOr(Kind):
    """One of a few words that stand alone, or a value of another kind."""

    def __init__(self, words: tuple[str, ...], item: Kind, doc: str = "") -> None:
        super().__init__(doc)
        self._words, self._item = words, item

    def expects(self) -> str:
        """Say what is accepted."""
        return f"{', '.join(repr(word) for word in self._words)}, or {self._item.expects()}"

    def _check(self, value: Any) -> Any:
        return str(value) if isinstance(value, str) and value in self._words else self._inner(value, self._item.check)

    def _read(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and node.text in self._words:
            return node.text
        return self._inner(node, self._item.read)

    def _inner(self, value: Any, accept: Any) -> Any:
        text = value.text if isinstance(value, ScalarNode) else value
        if isinstance(text, str) and not isinstance(self._item, Text):
            raise Refused(f"{quote(text)} is not a valid value{did_you_mean(text, self._words, 'words')}")
        return accept(value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return value if isinstance(value, str) and value in self._words else self._item.plain(value)

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self._words)}, self._item.schema()]}


class ThreadCount(Kind):
    """A number of threads, or ``physical``, ``logical`` or ``engine``: the cores, their hardware threads, unstated."""

    WORDS = ("engine", "physical", "logical")
    _COUNT = Integer(1, 4096)

    def expects(self) -> str:
        """Say what is accepted."""
        return f"{', '.join(self.WORDS)}, or {self._COUNT.expects()}"

    def _check(self, value: Any) -> Any:
        if isinstance(value, str):
            if value not in self.WORDS:
                raise Refused(f"{quote(value)} is not a valid value{did_you_mean(value, self.WORDS, 'words')}")
            return str(value)
        return self._COUNT.check(value)

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.WORDS)}, self._COUNT.schema()]}


class Rounds(Kind):
    """The fewest and the most rounds, as a list of two."""

    _ONE = Integer(3, _MOST_ROUNDS)

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a list of two: the fewest and the most rounds, from 3 to {_MOST_ROUNDS}"

    def _check(self, value: Any) -> tuple[int, int]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise self.wrong_type(describe_value(value))
        return self._pair(*map(self._ONE.check, value))

    def _read(self, node: Node) -> tuple[int, int]:
        if not isinstance(node, SequenceNode) or len(node.items) != 2:
            raise self.wrong_type(describe(node))
        return self._pair(*map(self._ONE.read, node.items))

    def _pair(self, least: int, most: int) -> tuple[int, int]:
        if least > most:
            raise Refused(f"the fewest, {least}, are more than the most, {most}")
        return least, most

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return list(value)

    def _schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self._ONE.schema(), "minItems": 2, "maxItems": 2}


class OptionValues(MappingOf):
    """Engine to option to the values to try; an engine with no options has none of them searched."""

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of engine to a mapping of option to a list of values"

    def _check_name(self, name: str) -> None:
        check_engine(name)

    def _read_value(self, node: Node) -> FrozenDict:
        if not isinstance(node, MappingNode):
            raise Refused(f"got {describe(node)}. Fix: state a mapping of option to a list of values")
        return read_entries(node, refuse_control_characters, _values)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return {engine: {name: list(values) for name, values in options.items()} for engine, options in value.items()}

    def _schema(self) -> dict[str, Any]:
        scalar = {"type": ["string", "number", "boolean"]}
        values = {"type": "array", "items": scalar, "minItems": 1}
        return {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": values}}


class Resources(MappingOf):
    """What one trial needs of a Ray node: ``num_cpus``, ``num_gpus``, and custom resources by their names."""

    _WHOLE = Integer(1, 4096)
    _CUSTOM = Number(1e-4, 1e6)

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of num_cpus, num_gpus and custom resources to numbers"

    def _check_name(self, name: str) -> None:
        refuse_control_characters(name)
        if name in ("CPU", "GPU"):
            raise Refused(f"{quote(name)} is Ray's own. Fix: write num_{name.lower()}s")
        if name in ("", "memory", "object_store_memory"):
            raise Refused(f"{quote(name)} cannot be a custom resource. Fix: leave it out, or use another name")

    def _read_value(self, node: Node) -> Any:
        return self._CUSTOM.read(node)

    def _read(self, node: Node) -> FrozenDict:
        limits = super()._read(node)
        for name in ("num_cpus", "num_gpus"):
            if name in limits and limits[name] != int(limits[name]):
                raise Refused("a trial has whole ones, which it shares with no other").under(name)
        return FrozenDict({name: int(limit) if name.startswith("num_") else limit for name, limit in limits.items()})

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return dict(value)

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"num_cpus": self._WHOLE.schema(), "num_gpus": self._WHOLE.schema()},
            "additionalProperties": self._CUSTOM.schema(),
        }


def _values(node: Node) -> tuple[str, ...]:
    if not isinstance(node, SequenceNode) or not node.items:
        raise Refused(f"got {describe(node)}. Fix: state a list of values to try")
    texts = []
    for index, item in enumerate(node.items):
        if not isinstance(item, ScalarNode) or item.value is None:
            raise Refused(f"expected text, a number, true or false, got {describe(item)}", index).at(item)
        text = BOOL[item.value] if isinstance(item.value, bool) else str(item.value)
        refuse_control_characters(text)
        if text in texts:
            raise Refused(f"{quote(text)} is listed twice", index).at(item)
        texts.append(text)
    return tuple(texts)


_MINIMISED = ("latency.p50", "latency.p99", "memory", "energy", "cold_start")
_MAXIMISED = ("throughput",)
#: What ``--for`` takes.
OBJECTIVES = (*_MINIMISED[:2], *_MAXIMISED, *_MINIMISED[2:])
#: Ways to call a session, by its methods.
CALLS = ("run", "bind")


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
    call : {"run", "bind"} or None
        How they call it: ``session.run`` with host arrays, or ``run()`` of what ``session.bind`` returns, whose buffers
        stay on the device. ``None``: ``"bind"`` where CUDA graphs are asked for, else ``"run"``.
    """

    minimise: str | None = field(Choice(_MINIMISED, "What is made small.", what="objectives"), default=None)
    maximise: str | None = field(Choice(_MAXIMISED, "What is made large.", what="objectives"), default=None)
    batch: int = field(Integer(1, 65536, "Rows of one run: as many samples are joined."), default=1)
    concurrency: int = field(Integer(1, 1024, "Threads that call the session concurrently."), default=1)
    call: str | None = field(
        Choice(
            CALLS,
            "How they call it: run with host arrays, or bind once. By default bind where CUDA graphs are requested.",
            what="calls",
        ),
        default=None,
    )

    def _check_together(self) -> None:
        if self.minimise is not None and self.maximise is not None:
            raise Refused(f"contradicts maximise {self.maximise!r}. Fix: state one objective", "minimise")
        if self.concurrency > 1 and self.name in ("memory", "energy", "cold_start"):
            raise Refused(f"{self.concurrency} has no meaning for {self.name}. Fix: leave it out", "concurrency")

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

    accuracy: AccuracyPolicy | str = field(
        WordOr(
            ("inherit",),
            Nested(AccuracyPolicy),
            "How close outputs must be to the reference; inherit is the accuracy of the base policy, else the "
            "tolerance of the precision.",
        ),
        default="inherit",
    )
    memory_peak: int | None = field(
        AtMost(ByteSize(), "Peak memory of the process that opens and runs the model."), default=None
    )
    latency_p99: float | None = field(
        AtMost(ShortDuration(), "Time that 99 of 100 runs must keep, tested with at least 662 runs."), default=None
    )
    determinism: Determinism | None = field(
        Choice(
            DETERMINISM_GRADES,
            "Determinism grade that must pass; by default that of the base policy.",
            what="grades",
        ),
        default=None,
    )
    start: float | None = field(
        AtMost(Duration(), "Longest time to the first result, without starting the interpreter."), default=None
    )

    #: The keys of a file.
    DOCUMENT: ClassVar[dict[str, str]] = {"memory.peak": "memory_peak", "latency.p99": "latency_p99"}

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


class ConstraintsKind(Nested):
    """Constraints, under the keys of a file."""

    @property
    def kinds(self) -> dict[str, Kind]:
        """The keys of a file and their kinds."""
        return Constraints.document_kinds()


def _kernels(op: str) -> OneOrMore:
    return OneOrMore(KernelName(op), f"Kernels to try for {op}.", optional=True)


class KernelChoices(PolicyValue, frozen=True, kw_only=True):
    """Kernels to try, by operation."""

    matmul: tuple[str, ...] | None = field(_kernels("matmul"), default=None)
    attention: tuple[str, ...] | None = field(_kernels("attention"), default=None)
    layer_norm: tuple[str, ...] | None = field(_kernels("layer_norm"), default=None)
    rms_norm: tuple[str, ...] | None = field(_kernels("rms_norm"), default=None)
    conv: tuple[str, ...] | None = field(_kernels("conv"), default=None)
    swiglu: tuple[str, ...] | None = field(_kernels("swiglu"), default=None)
    geglu: tuple[str, ...] | None = field(_kernels("geglu"), default=None)
    rope: tuple[str, ...] | None = field(_kernels("rope"), default=None)
    softmax: tuple[str, ...] | None = field(_kernels("softmax"), default=None)
    cross_entropy: tuple[str, ...] | None = field(_kernels("cross_entropy"), default=None)
    linear_cross_entropy: tuple[str, ...] | None = field(_kernels("linear_cross_entropy"), default=None)
    grouped_matmul: tuple[str, ...] | None = field(_kernels("grouped_matmul"), default=None)
    cache_update: tuple[str, ...] | None = field(_kernels("cache_update"), default=None)


class SearchSpace(PolicyValue, frozen=True, kw_only=True):
    """Values to try. Keys left out are searched as the engines declare them.

    Attributes
    ----------
    batch : tuple of int
        Rows of one run, beside ``objective.batch``, which the control has. Only throughput compares them.
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

    batch: tuple[int, ...] = field(
        OneOrMore(Integer(1, 65536), "Rows of one run to try, for throughput.", empty=True), default=()
    )
    engine: tuple[str, ...] = field(
        OneOrMore(
            Text(what="the name of an engine", parse=check_engine, pattern=ENGINE_PATTERN),
            "Engines to try.",
            empty=True,
        ),
        default=(),
    )
    precision: tuple[str, ...] = field(
        OneOrMore(
            Choice(("model", "fp32", "tf32", "fp16", "bf16", "int8"), what="precisions"),
            "Precisions to try; by default only where an accuracy is stated. int8 needs --calibration.",
            empty=True,
        ),
        default=(),
    )
    cuda_graph: tuple[str, ...] = field(
        OneOrMore(Choice(("off", "prefer", "require")), "CUDA graphs to try.", empty=True), default=()
    )
    threads: tuple[int | str, ...] = field(OneOrMore(ThreadCount(), "Threads to try.", empty=True), default=())
    layout: tuple[str, ...] = field(
        OneOrMore(Choice(("auto", "nchw", "nhwc"), what="layouts"), "Layouts to try.", empty=True), default=()
    )
    kernels: KernelChoices | str = field(
        WordOr(("off", "auto"), Nested(KernelChoices), "Kernels to try."), default="auto"
    )
    options: dict[str, dict[str, tuple[str, ...]]] = field(
        OptionValues(
            "Options to try, by engine and option; replaces all that the engine declares. {onnxruntime: {}} tries none "
            "of that engine; {} leaves those of all engines as declared."
        ),
        default=FrozenDict(),
    )


class Budget(PolicyValue, frozen=True, kw_only=True):
    """How long a search may take, in seconds (``"10m"`` in a file), and how many candidates it opens at most."""

    time: float = field(Duration("Time that the search may take."), default=600.0)
    candidates: int = field(Integer(1, 100_000, "Most candidates that are opened."), default=200)


class Decide(PolicyValue, frozen=True, kw_only=True):
    """When a difference counts."""

    min_effect: float = field(Percentage("Smallest gain that makes a winner.", most=1.0), default=LEAST_GAIN)
    confidence: float = field(Number(0.5, 0.9999, "Confidence of the result."), default=0.99)
    rounds: tuple[int, int] = field(Rounds("Fewest and most rounds of a race."), default=(7, 61))
    duel_rounds: int | None = field(
        Integer(3, 100_000, "Most rounds of a final duel; left out, four times those of a race."), default=None
    )

    @property
    def most_duel_rounds(self) -> int:
        """Most rounds of a final duel."""
        return self.duel_rounds or 4 * self.rounds[1]

    def duel_looks(self, family: int) -> tuple[int, ...]:
        """After how many rounds each of so many final duels may be decided."""
        least, last = self.rounds
        most = self.most_duel_rounds
        return look_rounds(least, min(last, most), most=most, confidence=self.confidence, family=family)


class RayPlacement(PolicyValue, frozen=True, kw_only=True):
    """The Ray cluster whose nodes candidates are measured on.

    Attributes
    ----------
    address : str
        As ``ray.init`` takes it: ``"auto"`` or ``"host:port"``.
    resources : dict of str to number
        What a trial needs of its node: ``num_cpus``, ``num_gpus``, and custom resources by their names. Left out: a
        GPU where the policy runs on ``cuda``, else all processors of a node.
    trials : int or None
        Trials at once; left out, as many as the cluster has room for.
    model : {"store", "shared"}
        How nodes get the model: from Ray's object store, or by the same path. Its digest is checked in any case.
    wait : float
        Seconds that a node is waited for.
    """

    address: str = field(Text("Address of the cluster.", what="'auto' or 'host:port'"), default="auto")
    resources: dict[str, Any] = field(
        Resources(
            "What a trial needs from its node: num_cpus, num_gpus and custom resources. By default a GPU if the "
            "policy states cuda, else all processors of the smallest node."
        ),
        default=FrozenDict(),
    )
    trials: int | None = field(
        Integer(1, 1024, "Concurrent trials; by default as many as fit on the cluster."), default=None
    )
    model: str = field(
        Choice(("store", "shared"), "How nodes get the model: Ray's object store, or the same path on every node."),
        default="store",
    )
    wait: float = field(
        Duration("How long to wait for a node, including the start of the trial's process."), default=60.0
    )
