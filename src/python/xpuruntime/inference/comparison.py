# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Comparisons of engines as values, text and tables, and the drift of a model layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.documents import Page
from xpuruntime.evidence.tolerances import OutputFigures, Tolerance, compare_within
from xpuruntime.inference.intermediates import Divergence, Inside
from xpuruntime.printable import error_line, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.engines.model import ModelInfo

    Answer = Callable[[ModelInfo], Mapping[str, Any]]

SCHEMA = "xpuruntime.comparison/1"


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine did."""

    engine: str
    device: str
    precision: str
    status: Literal["agrees", "differs", "inconclusive", "rejected", "failed"]
    reason: str
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    median_us: float | None = None
    tolerance: Tolerance | None = None
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()
    outputs: tuple[OutputFigures, ...] = ()
    drift: DriftReport | None = None


class Comparison(Page, frozen=True, kw_only=True):
    """One model on several engines.

    Attributes
    ----------
    model : str
    reference : str
        Who computed what the others are compared with, as ``"engine.device.precision"``.
    inputs : str
        Where the input comes from.
    rows : tuple of EngineRow
        In the order asked.
    layers : bool
        Whether the drift of each layer was asked for.
    """

    NOUN: ClassVar = "the comparison"
    STATED: ClassVar = ("agreed",)

    model: str
    reference: str
    inputs: str
    rows: tuple[EngineRow, ...]
    layers: bool = False
    schema: str = SCHEMA

    @property
    def agreed(self) -> bool:
        """Whether every engine that the plan accepted ran and is within tolerance, and at least one did."""
        ran = [row for row in self.rows if row.status != "rejected"]
        return bool(ran) and all(row.status == "agrees" for row in ran)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        ran = [row for row in self.rows if row.status != "rejected"]
        if not ran:
            return "nothing ran: every engine was rejected"
        if self.agreed:
            rejected = len(self.rows) - len(ran)
            words = "the engine agrees" if len(ran) == 1 else f"all {len(ran)} engines agree"
            return f"{words}, {rejected} {'was' if rejected == 1 else 'were'} rejected" if rejected else words
        counts = [(sum(row.status == "differs" for row in ran), "differ", "differs")]
        counts.append((sum(row.status == "failed" for row in ran), "failed", "failed"))
        counts.append((sum(row.status == "inconclusive" for row in ran), "are inconclusive", "is inconclusive"))
        words = " and ".join(
            f"{number} {singular if number == 1 else many}" for number, many, singular in counts if number
        )
        return f"of {len(ran)} engines, {words}" if len(ran) > 1 else f"the engine {words.removeprefix('1 ')}"

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.evidence.page import render_comparison

        return render_comparison({"headline": self.headline, "agreed": self.agreed, **msgspec.to_builtins(self)})

    def __str__(self) -> str:
        """Return it as plain text, one engine a line."""
        lines = [f"{self.model} against {self.reference}, input {self.inputs}"]
        for row in self.rows:
            lines.append(f"  {row.engine}@{row.device} ({row.precision}): {row.status}: {row.reason}")
            if row.divergence is not None:
                lines.append(f"    {row.divergence}")
            if row.drift is not None:
                lines.append(f"    {row.drift}")
        return printable("\n".join(lines))

    def __rich__(self) -> RenderableType:
        """Return the verdict, a table, and the divergences below."""
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.evidence.render_text.changes import duration_text
        from xpuruntime.tables import table

        shown = table(
            f"{self.model} against {self.reference}, input {self.inputs}",
            ("engine", "?precision", ">max abs", ">max rel", ">cosine", ">median", "verdict"),
        )
        for row in self.rows:
            numbers = [
                "-" if value is None else format(value, form)
                for value, form in (
                    (row.max_abs, ".3g"),
                    (row.max_rel, ".3g"),
                    (row.cosine, ".5f"),
                )
            ]
            numbers.append("-" if row.median_us is None else duration_text(row.median_us))
            shown.add_row(Text(f"{row.engine}@{row.device}"), row.precision, *numbers, row.status)
        verdict = Text(self.headline, "bold green" if self.agreed else "bold red")
        return Group(verdict, shown, *(Text(line) for row in self.rows for line in _story(row)))


def _story(row: EngineRow) -> list[str]:
    head = f"{row.engine}@{row.device}: "
    lines = [] if row.status == "agrees" else [f"{head}{row.status}: {row.reason}"]
    if row.divergence is not None:
        lines.append(f"{head}{row.divergence}")
    if row.drift is not None:
        lines.append(f"{head}{row.drift}")
    return lines + [f"{head}{note}" for note in row.notes]


#: Of the tensors that are kept at once, by their elements: those of one group, once for each side.
_ELEMENTS = 32 << 20
#: Models that an engine may refuse before the rest is given up.
_REFUSALS = 48


class LayerDrift(msgspec.Struct, frozen=True, kw_only=True):
    """How far one node is from the reference."""

    place: int
    name: str
    op: str
    figures: OutputFigures


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the layers of a model are from the reference on one engine."""

    layers: tuple[LayerDrift, ...] = ()
    first: int | None = None
    skipped: dict[str, str] = {}
    note: str = ""

    def __str__(self) -> str:
        """Return it as one sentence."""
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'} measured"
        if self.first is not None:
            layer = self.layers[self.first]
            count += f", the first out of tolerance is {layer.name!r} ({layer.op}): {layer.figures.reason}"
        elif self.layers:
            count += ", all within tolerance"
        missing = f"; {len(self.skipped)} not measured" if self.skipped else ""
        return f"{count}{missing}{'. ' if self.note else ''}{self.note}"


def measure_drift(
    info: ModelInfo, feeds: Mapping[str, Any], limits: Tolerance, answer: Answer, *, agreed: bool
) -> DriftReport:
    """Measure how far every layer is from the reference."""
    return _Measuring(info, feeds, limits, answer, agreed).run()


class _Measuring:
    def __init__(
        self, info: ModelInfo, feeds: Mapping[str, Any], limits: Tolerance, answer: Answer, agreed: bool
    ) -> None:
        self.inside, self.limits, self.answer, self.agreed = Inside(info, feeds), limits, answer, agreed
        self.sizes = _named_sizes(info, feeds)
        self.figures: dict[str, OutputFigures] = {}
        self.hidden: dict[str, str] = {}
        self.refusals = 0
        self.otherwise = False

    def run(self) -> DriftReport:
        places = [(i, node) for i, node in enumerate(self.inside.nodes) if node.op_type != "Constant"]
        for group in self._groups([name for _, node in places for name in node.output if name]):
            self._measure(group)
        layers, skipped = [], {}
        for index, node in places:
            seen = [self.figures[name] for name in node.output if name in self.figures]
            if seen:
                worst = max(seen, key=lambda figures: (not figures.passed, figures.nan + figures.inf, figures.max_rel))
                layers.append(LayerDrift(place=index, name=node.name, op=node.op_type, figures=worst))
            else:
                reasons = (self.hidden[name] for name in node.output if name in self.hidden)
                skipped[node.name] = next(reasons, "it makes no tensor")
        return DriftReport(
            layers=tuple(layers),
            first=next((i for i, layer in enumerate(layers) if not layer.figures.passed), None),
            skipped=skipped,
            note=self._note(),
        )

    def _note(self) -> str:
        if not self.otherwise:
            return ""
        was, now = ("within", "out of") if self.agreed else ("out of", "within")
        return (
            f"The outputs are {was} tolerance, and {now} it while layers are outputs too, which keeps the engine from "
            "fusing them: what is measured here is not what runs otherwise"
        )

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        groups: list[list[str]] = [[]]
        held = 0
        for name in names:
            size = self._elements(name)
            if groups[-1] and held + size > _ELEMENTS:
                groups.append([])
                held = 0
            groups[-1].append(name)
            held += size
        return groups if groups[0] else []

    def _elements(self, name: str) -> int:
        """Return how many elements a tensor has, as far as the graph says; sizes that it does not tell count once."""
        if name not in self.inside.described:
            return 1
        sizes = self.inside.described[name].type.tensor_type.shape.dim
        return math.prod(self.sizes.get(dim.dim_param, 1) if dim.dim_param else dim.dim_value for dim in sizes)

    def _measure(self, names: Sequence[str]) -> None:
        if self.refusals >= _REFUSALS:
            self._hide(names, f"not tried: the engine had refused {self.refusals} models with more outputs")
            return
        try:
            want = self.inside.reference((*names, *self.inside.outputs))
            wanted = {name: want[name] for name in names if name in want}
            model = self.inside.with_outputs(wanted)
            got = self.answer(model) if wanted else {}
        except XpuRuntimeError as error:
            self.refusals += 1
            if len(names) == 1:
                self._hide(names, f"the model was refused with it as an output: {error_line(error)}")
            else:
                middle = len(names) // 2
                self._measure(names[:middle])
                self._measure(names[middle:])
            return
        self._hide([name for name in names if name not in want], "no plain array can be had of it")
        self._hide([name for name in wanted if name not in got], "the engine gave no array for it")
        seen = {name: array for name, array in wanted.items() if name in got}
        for output in compare_within(
            seen, {name: got[name] for name in seen}, self.limits, model.random_outputs
        ).outputs:
            self.figures[output.name] = output
        outputs = {name: want[name] for name in self.inside.outputs if name in want and name in got}
        if wanted and outputs:
            same = {name: got[name] for name in outputs}
            passed = compare_within(outputs, same, self.limits, model.random_outputs).passed
            self.otherwise |= passed is not self.agreed

    def _hide(self, names: Sequence[str], reason: str) -> None:
        self.hidden.update(dict.fromkeys(names, reason))


def _named_sizes(info: ModelInfo, feeds: Mapping[str, Any]) -> dict[str, int]:
    return {
        dim: size
        for tensor in info.inputs
        if tensor.name in feeds
        for dim, size in zip(tensor.shape or (), getattr(feeds[tensor.name], "shape", ()), strict=False)
        if isinstance(dim, str)
    }
