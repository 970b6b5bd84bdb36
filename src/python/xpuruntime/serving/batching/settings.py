# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Settings of batching, and how long a request waits for others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, Nested
from xpuruntime.policies.document import Node, Refused, SequenceNode, describe, describe_value, from_python
from xpuruntime.policies.kinds import Choice, Flag, Integer, Kind, Number, Text, refuse_control_characters
from xpuruntime.policies.value import Accepts, PolicyValue, field

if TYPE_CHECKING:
    from xpuruntime.serving.batching.scheduler import Dispatch

#: What is left of the earlier gaps after one more, or after a delay without one.
_KEPT = 7 / 8
#: Arrivals that are assumed at first: so many delays pass without one before the first is cut short.
_ASSUMED = 4.0
#: One of so many delays is waited for although nobody is expected.
_PROBE = 128


class _Gaps:
    __slots__ = ("arrivals", "seconds")

    def __init__(self) -> None:
        self.arrivals, self.seconds = _ASSUMED, 0.0


class AdaptiveDelay:
    """Mean gaps between requests of one queue, by the rows that wait."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._gaps: dict[int, _Gaps] = {}
        #: When an instance last became idle.
        self._idle_since = 0.0
        #: Batches that were sent early and run, by group: who comes meanwhile would have been waited for.
        self._early: dict[Hashable, Dispatch] = {}
        self._probing: set[Hashable] = set()
        self._cut = 0

    def until(self, group: Hashable, rows: int, latest: float) -> float | None:
        """Return up to when a group is worth waiting for, with its rows and its latest arrival; `None`: for the delay.

        It is as long as the mean gap, with the present one in it, is no longer than the delay.
        """
        if group in self._probing:
            return None
        gaps = self._gaps_at(rows)
        return self._begin(latest) + max(0.0, gaps.arrivals * self._delay - gaps.seconds)

    def probes(self, group: Hashable) -> bool:
        """Return whether a group is waited for although nobody is expected, so that a change of the load is found."""
        self._cut = (self._cut + 1) % _PROBE
        if self._cut == 0:
            self._probing.add(group)
        return self._cut == 0

    def arrived(self, group: Hashable, at: float, rows: int, latest: float) -> None:
        """Take a request that came to so many waiting rows of its group; 0 where all instances are busy."""
        early = self._early.pop(group, None)
        if early is not None:
            self._end_early(early, at, came=at - early.at < self._delay)
        elif rows:
            self._add(rows, at - self._begin(latest), came=True)
            if group in self._probing:
                self._cut = _PROBE - 1  # it was not in vain: the next one probes as well

    def sent(self, group: Hashable, batch: Dispatch, rows: int, latest: float) -> None:
        """Take a batch of a group that had so many rows before."""
        self._probing.discard(group)
        if batch.reason == "adaptive":
            self._early[group] = batch
        if batch.reason != "full":
            self._add(rows, batch.at - self._begin(latest), came=False)

    def ended(self, batch: Dispatch, at: float, *, idle: bool) -> None:
        """Take the end of a batch; `idle`: whether an instance was idle before."""
        if not idle:
            self._idle_since = at
        group = batch.parts[0].entry.group
        if self._early.get(group) is batch:
            self._end_early(self._early.pop(group), at, came=False)

    def _begin(self, latest: float) -> float:
        return max(latest, self._idle_since)

    def _end_early(self, batch: Dispatch, at: float, *, came: bool) -> None:
        self._add(batch.rows, at - batch.at, came=came)

    def _add(self, rows: int, seconds: float, *, came: bool) -> None:
        seconds = min(max(0.0, seconds), self._delay)
        gaps = self._gaps_at(rows)
        kept = _KEPT if came else _KEPT ** (seconds / self._delay)
        gaps.arrivals = kept * gaps.arrivals + came
        gaps.seconds = kept * gaps.seconds + seconds

    def _gaps_at(self, rows: int) -> _Gaps:
        gaps = self._gaps.get(rows)
        if gaps is None:
            gaps = self._gaps[rows] = _Gaps()
        return gaps


#: Weight of the latest batch in the expected times of one.
_LATEST = 0.2
#: Share of a batch's time that the next one is sent before its expected end, beside what preparing takes.
_AHEAD = 0.25


class SerialDevice:
    """Expected end of the batches that were sent to a device, from the times of earlier ones."""

    def __init__(self) -> None:
        self._running: dict[Dispatch, None] = {}
        self._last_end = 0.0
        self._compute: float | None = None
        self._preparation = 0.0

    def began(self, batch: Dispatch) -> None:
        """Take a batch that was sent."""
        self._running[batch] = None

    def ended(self, batch: Dispatch, now: float, preparation: float) -> None:
        """Take the end of a batch, and the seconds until its inputs were ready."""
        self._running.pop(batch, None)
        seconds = now - max(batch.at, self._last_end)
        self._last_end = now
        first = self._compute is None
        self._compute = seconds if self._compute is None else self._compute + _LATEST * (seconds - self._compute)
        self._preparation += (1.0 if first else _LATEST) * (preparation - self._preparation)

    def hold_until(self) -> float | None:
        """Return up to when another batch would only wait; `None`: nothing runs, or no batch has been timed yet."""
        if not self._running or self._compute is None:
            return None
        begin = max(next(iter(self._running)).at, self._last_end)
        end = begin + len(self._running) * self._compute
        return end - _AHEAD * self._compute - self._preparation


Shapes = Literal["exact", "pad", "bucket", "fixed"]
TimeoutAction = Literal["reject", "delay"]
QueueDelay = Literal["adaptive", "fixed"]

_MOST = 2**31 - 1


class IntegerList(Kind):
    """A list of different whole numbers from 1 to `most`, kept in ascending order."""

    def __init__(self, most: int, doc: str) -> None:
        super().__init__(doc)
        self._item = Integer(1, most)

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a list of numbers, each {self._item.expects().removeprefix('a whole number ')}, such as [4, 8]"

    def _check(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise self.wrong_type(describe_value(value))
        return self._read(from_python(list(value)))

    def _read(self, node: Node) -> tuple[int, ...]:
        if not isinstance(node, SequenceNode):
            raise self.wrong_type(describe(node))
        numbers: list[int] = []
        for index, item in enumerate(node.items):
            try:
                number = self._item.read(item)
                if number in numbers:
                    raise Refused(f"{number} is listed twice")
            except Refused as refused:
                raise refused.at(item).under(index) from None
            numbers.append(number)
        return tuple(sorted(numbers))

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return list(value)

    def _schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self._item.schema(), "uniqueItems": True}


class NamedOf(MappingOf):
    """A mapping of names to values of one kind."""

    def __init__(self, item: Kind, what: str, doc: str = "", *, name: Kind | None = None) -> None:
        super().__init__(doc)
        self.item, self._what, self._name = item, what, name

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a mapping of {self._what}"

    def _check(self, value: Any) -> FrozenDict:
        if isinstance(value, dict) and any(isinstance(entry, PolicyValue) for entry in value.values()):
            for name in value:
                self._check_name(name)
            return FrozenDict({name: self.item.check(entry) for name, entry in sorted(value.items())})
        return super()._check(value)

    def _check_name(self, name: str) -> None:
        refuse_control_characters(name)
        if self._name is not None:
            self._name.check(name)

    def _read_value(self, node: Node) -> Any:
        return self.item.read(node)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return {name: self.item.plain(entry) for name, entry in value.items()}

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the values whose paths are changed by `move`."""
        return FrozenDict({name: self.item.relocate(entry, move) for name, entry in value.items()})

    def _schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema()}


class PadRule(PolicyValue, frozen=True, kw_only=True):
    """How one input is padded along one axis."""

    value: float = field(Number(-1e308, 1e308, "What the padding is filled with."), default=0.0)
    to: Accepts[tuple[int, ...], Sequence[int]] = field(IntegerList(_MOST, "Sizes that are padded to."), default=())
    axis: int | None = field(Integer(0, 31, "Axis of the input."), default=None)
    outputs: Accepts[dict[str, int], Mapping[str, int]] = field(
        NamedOf(Integer(0, 31), "output to axis, such as {logits: 1}", "Outputs that are cut back."),
        default=FrozenDict(),
    )
    mask: str | None = field(Text("Mask input that is made where a request has none.", what="an input"), default=None)


class BatchSettings(PolicyValue, frozen=True, kw_only=True):
    """How requests of a model are put together."""

    max_batch_size: int = field(
        Integer(0, 2**20, "Most rows of one execution; 0 runs requests as they arrive."), default=0
    )
    preferred_batch_size: Accepts[tuple[int, ...], Sequence[int]] = field(
        IntegerList(2**20, "Batch sizes that are sent without waiting for the delay."), default=()
    )
    max_queue_delay_us: int = field(
        Integer(0, _MOST, "How long a request may wait for others while an instance is idle."), default=0
    )
    queue_delay: QueueDelay = field(
        Choice(get_args(QueueDelay), "Wait for others while some are expected, or always.", what="delays"),
        default="adaptive",
    )
    max_queue_size: int = field(Integer(0, _MOST, "Requests that may wait; 0 for no limit."), default=1024)
    timeout_us: int = field(Integer(0, 2**53, "How long a request may wait and run; 0 for no limit."), default=0)
    timeout_action: TimeoutAction = field(
        Choice(
            get_args(TimeoutAction),
            "What happens past timeout_us; delay serves the request after all that are in time.",
            what="actions",
        ),
        default="reject",
    )
    priority_levels: int = field(Integer(0, 64, "Levels, of which 1 is served first."), default=0)
    default_priority_level: int = field(
        Integer(0, 64, "Level of requests that state none; 0 is the middle level."), default=0
    )
    preserve_ordering: bool = field(Flag("Answer in the order of arrival."), default=False)
    shapes: Shapes = field(Choice(get_args(Shapes), "Which shapes run together."), default="exact")
    pad: Accepts[dict[str, PadRule], Mapping[str, PadRule] | Mapping[str, Mapping[str, Any]]] = field(
        NamedOf(Nested(PadRule), "input to rule", "How inputs are padded."), default=FrozenDict()
    )
    isolate_failures: bool = field(Flag("Rerun the requests of a failed batch once, each alone."), default=True)
    inline_below_us: int = field(
        Integer(0, 100_000, "On the CPU, requests that execute faster skip the queue when nothing waits; 0 for never."),
        default=200,
    )

    @property
    def default_level(self) -> int:
        """The level of a request that states none."""
        return self.default_priority_level or (self.priority_levels + 1) // 2

    def _check_together(self) -> None:
        too_large = [size for size in self.preferred_batch_size if size > max(self.max_batch_size, 1)]
        if too_large:
            raise Refused(
                f"{too_large[0]} is more than max_batch_size {self.max_batch_size}, so it would never be sent; "
                "leave it out, or raise max_batch_size",
                "preferred_batch_size",
            )
        if self.default_priority_level > self.priority_levels:
            raise Refused(
                f"{self.default_priority_level} is no level of priority_levels: {self.priority_levels}",
                "default_priority_level",
            )
        if self.preserve_ordering and self.priority_levels > 1:
            raise Refused(
                "true contradicts priority_levels, which change the order. Fix: state one of the two",
                "preserve_ordering",
            )
        if self.shapes == "fixed" and self.max_batch_size < 1:
            raise Refused("'fixed' needs a max_batch_size of at least 1: it is the size of every execution", "shapes")
        if self.pad and self.shapes == "exact":
            raise Refused(
                "has rules, but shapes is 'exact', which pads nothing. Fix: state pad, bucket or fixed", "pad"
            )
        if not self.pad and self.shapes in ("pad", "bucket"):
            raise Refused(f"'{self.shapes}' needs a rule for each input that is padded, in 'pad'", "shapes")
        for name, rule in self.pad.items():
            if not rule.to and self.shapes in ("bucket", "fixed"):
                raise Refused(f"'{self.shapes}' needs the sizes that are padded to", "pad", name, "to")


def batch_sizes(most: int, preferred: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the powers of two up to a batch size, that size, and preferred ones, ascending."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, max(most, 1), *preferred}))
