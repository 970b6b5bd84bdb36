# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ShapeCoverage`: which input shapes a session takes, which of them a report saw, and of which it says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from xpuruntime.evidence.kernel_records import KernelDecision

Sizes = tuple["int | str | None", ...]


class InputCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes of one input.

    Attributes
    ----------
    input : str
    model : str
        As the session has it: ``"batch x 3 x 224 x 224"``; ``?`` is a size without a name, ``"any rank"`` a shape that
        the model does not state.
    allowed : str
        What calls may pass: ``"1..8 x 3 x 224 x 224"``; ``any`` is a size without limits.
    observed : str
        What the pass ran: ``"1 x 3 x 224 x 224"``; ``"-"`` where nothing was passed.
    covered : {"all", "some", "none"}
        Whether the report covers every shape that is allowed.
    reason : str
        One sentence.
    """

    input: str
    model: str
    allowed: str
    observed: str
    covered: Literal["all", "some", "none"]
    reason: str


class ShapeCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Which input shapes a session takes, and which of them the report saw.

    Attributes
    ----------
    inputs : tuple of InputCoverage
        In the order of the model.
    by_shape : tuple of str
        What was chosen for the shapes of the pass and may be another thing for others, one sentence each.
    """

    inputs: tuple[InputCoverage, ...]
    by_shape: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every shape that the session takes was seen."""
        return all(input_.covered == "all" for input_ in self.inputs)


class _Input(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sizes | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def limits(self) -> tuple[tuple[int, int] | None, ...]: ...


def covered_text(coverage: InputCoverage) -> str:
    """Return in words whether the report speaks of all shapes of an input."""
    return {"all": "yes", "some": "in part", "none": "no"}[coverage.covered]


def shape_coverage(
    inputs: Sequence[_Input],
    observed: Mapping[str, Sequence[int]],
    *,
    stated: Mapping[str, Sequence[int | str]] | None = None,
    profiles: Mapping[str, Sequence[Sequence[int]]] | None = None,
    decisions: Sequence[KernelDecision] = (),
) -> ShapeCoverage:
    """Hold the shapes that a session takes against those of one pass. Pure."""
    rows = tuple(
        _row(input_, observed.get(input_.name), (stated or {}).get(input_.name), (profiles or {}).get(input_.name))
        for input_ in inputs
    )
    return ShapeCoverage(inputs=rows, by_shape=_by_shape(rows, profiles or {}, observed, decisions))


def _row(
    info: _Input,
    seen: Sequence[int] | None,
    stated: Sequence[int | str] | None,
    profile: Sequence[Sequence[int]] | None,
) -> InputCoverage:
    ranges = _ranges(info, profile)
    if info.kind != "tensor":
        model, allowed = info.kind, "any"
    elif info.shape is None:
        model, allowed = "any rank", "any"
    else:
        model = " x ".join("?" if size is None else str(size) for size in info.shape) or "scalar"
        allowed = " x ".join(map(_range_text, ranges)) or "scalar"
    covered, reason = _covered(info, seen, ranges, fixed_by="policy" if stated is not None else "model")
    observed = "-" if seen is None else _by(seen)
    return InputCoverage(
        input=info.name, model=model, allowed=allowed, observed=observed, covered=covered, reason=reason
    )


def _covered(
    info: _Input, seen: Sequence[int] | None, ranges: Sequence[tuple[int, int] | None], *, fixed_by: str
) -> tuple[Literal["all", "some", "none"], str]:
    if info.kind != "tensor":
        return "none", f"it is no tensor but of the kind {info.kind}, which has no one shape"
    if seen is None:
        return "none", "nothing was passed"
    if info.shape is None:
        return "some", "the model states no rank: other shapes are not covered"
    open_ = [index for index, range_ in enumerate(ranges) if range_ is None or range_[0] != range_[1]]
    if open_:
        return "some", ", ".join(_of_dimension(info.shape, ranges, place, seen) for place in open_)
    return "all", f"the {fixed_by} fixes every size" if ranges else "it has no size"


def _ranges(info: _Input, profile: Sequence[Sequence[int]] | None) -> list[tuple[int, int] | None]:
    shape = info.shape or ()
    limits = info.limits or (None,) * len(shape)
    ranges: list[tuple[int, int] | None] = []
    for index, (size, limit) in enumerate(zip(shape, limits, strict=False)):
        if isinstance(size, int):
            ranges.append((size, size))
        elif limit is not None:
            ranges.append((limit[0], limit[1]))
        elif profile is not None and len(profile) == 3 and len(profile[0]) == len(shape):
            ranges.append((profile[0][index], profile[2][index]))
        else:
            ranges.append(None)
    return ranges


def _of_dimension(shape: Sizes, ranges: Sequence[tuple[int, int] | None], axis: int, seen: Sequence[int]) -> str:
    size, allowed = shape[axis], ranges[axis]
    name = size if isinstance(size, str) else f"dimension {axis}"
    ran = f"{name} was {seen[axis] if axis < len(seen) else '?'}"
    if allowed is None:
        return f"{ran} and may be any size"
    return f"{ran}, one of {allowed[1] - allowed[0] + 1:,} sizes"


def _by_shape(
    rows: Sequence[InputCoverage],
    profiles: Mapping[str, Sequence[Sequence[int]]],
    observed: Mapping[str, Sequence[int]],
    decisions: Sequence[KernelDecision],
) -> tuple[str, ...]:
    told = []
    for name, profile in profiles.items():
        if len(profile) == 3 and name in observed:
            best = tuple(profile[1])
            where = "which was run" if best == tuple(observed[name]) else f"and {_by(observed[name])} was run"
            told.append(f"the engine chose its kernels for {name} = {_by(best)}, {where}")
    shaped = [decision for decision in decisions if decision.shapes]
    if shaped and any(row.covered != "all" for row in rows):
        ops = ", ".join(dict.fromkeys(unit.op for unit in shaped))
        count = "1 decision" if len(shaped) == 1 else f"{len(shaped)} decisions"
        told.append(
            f"{count} about xpuruntime kernels ({ops}) hold for the shapes of this pass: other sizes are decided anew"
        )
    return tuple(told)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape) or "scalar"


def _range_text(range_: tuple[int, int] | None) -> str:
    if range_ is None:
        return "any"
    return str(range_[0]) if range_[0] == range_[1] else f"{range_[0]}..{range_[1]}"
