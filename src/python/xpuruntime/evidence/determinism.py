# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DeterminismTests`: the grades of determinism that were tested, and the highest that passed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from xpuruntime.evidence.documents import Document
from xpuruntime.evidence.records import KeySeen
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xpuruntime.determinism/1"

GradeVerdict = Literal["passed", "failed", "not_applicable", "not_tested"]

_STYLE = {"passed": "green", "failed": "bold red", "not_applicable": "", "not_tested": "yellow"}


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Where results first differ, in the order of the model's nodes.

    Attributes
    ----------
    unit : str or None
        The first node of which a tensor differs; ``None`` where the difference was not seen inside of the model.
    op : str or None
        Operator of that node.
    tensor : str
        The tensor that differs: of that node, else an output of the model.
    ulp_max : int or None
        Largest distance between two elements in units in the last place, for integers in steps of one; ``None`` where
        elements are no numbers, or only one of them is finite.
    note : str
        What limits the finding; empty where nothing does.
    """

    unit: str | None
    op: str | None = None
    tensor: str
    ulp_max: int | None = None
    note: str = ""

    def __str__(self) -> str:
        """Return it as half a sentence."""
        where = f"output {self.tensor!r}" if self.unit is None else f"{self.unit} ({self.op}), tensor {self.tensor!r}"
        far = "" if self.ulp_max is None else f", by up to {self.ulp_max} ulp"
        return f"{where}{far}{f'; {self.note}' if self.note else ''}"


class GradeTest(msgspec.Struct, frozen=True, kw_only=True):
    """The test of one grade.

    Attributes
    ----------
    grade : str
    trials : int
        Results that were compared; 0 where nothing was tested.
    verdict : {"passed", "failed", "not_applicable", "not_tested"}
        ``not_applicable``: the model lacks what the grade is about, such as a batch dimension.
    reason : str
        What was compared, what differed, or why nothing was tested.
    first_difference : FirstDifference or None
        Where `verdict` is ``"failed"``.
    """

    grade: str
    trials: int = 0
    verdict: GradeVerdict
    reason: str
    first_difference: FirstDifference | None = None


class DeterminismTests(Document, frozen=True, kw_only=True):
    """The grades of determinism of one session, as tested.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.determinism/1"``.
    model, engine, device, precision : str
        What ran.
    plan : str
        `Plan.request_hash`.
    requested : str
        The grade asked for, by the call or by the policy; ``"none"`` where none was.
    observed : str
        The highest grade that passed together with all below it; ``"none"`` where none did.
    inputs : str
        Where the inputs come from.
    batch_dimension : str or None
        The dimension along which rows were permuted and batches were cut; ``None`` where the model has none.
    batch_sizes : tuple of int
        Sizes of the batches that were compared with rows alone.
    tests : tuple of GradeTest
        In the order of the grades.
    """

    STATED: ClassVar = ("reached",)

    schema: str = SCHEMA
    model: str
    engine: str
    device: str
    precision: str
    plan: str
    requested: str
    observed: str
    inputs: str
    batch_dimension: str | None = None
    batch_sizes: tuple[int, ...] = ()
    tests: tuple[GradeTest, ...]

    @property
    def reached(self) -> bool:
        """Whether the grade that was asked for passed, and all below it."""
        if self.requested == "none":
            return True
        passed = {test.grade for test in self.tests if test.verdict == "passed"}
        grades = [test.grade for test in self.tests]
        return self.requested in grades and passed.issuperset(grades[: grades.index(self.requested) + 1])

    def failed(self) -> GradeTest | None:
        """Return the test that failed, if any."""
        return next((test for test in self.tests if test.verdict == "failed"), None)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        text = "" if self.requested == "none" else f", asked for {self.requested}"
        return f"determinism: {self.observed}{text}"

    def __str__(self) -> str:
        """Return it as plain text, one grade a line."""
        lines = [f"{self.headline} ({self.model} on {self.engine}@{self.device}, {self.precision})"]
        lines += [f"  {test.grade}: {_verdict_text(test)}: {reason_text(test)}" for test in self.tests]
        return printable("\n".join(lines))

    def __rich__(self) -> RenderableType:
        """Return it as a table."""
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import rows_table

        head = f"{self.headline} ({self.model} on {self.engine}@{self.device}, {self.precision}, {self.inputs})"
        rows = [
            (grade, (word, _STYLE[test.verdict]), trials, why)
            for test, (grade, word, trials, why) in zip(self.tests, determinism_rows(self), strict=True)
        ]
        shown = rows_table("grades", ("grade", "verdict", ">trials", "why"), rows, most=None)
        return Group(Text(head, style="green" if self.reached else "bold red"), *shown)


def determinism_rows(tests: DeterminismTests) -> list[tuple[str, str, str, str]]:
    """Return grade, verdict, number of trials and reason of each test."""
    return [(test.grade, _verdict_text(test), str(test.trials), reason_text(test)) for test in tests.tests]


def determinism_seen(tests: DeterminismTests, requested: str) -> dict[str, KeySeen]:
    """Return the observed value of ``execution.determinism``: nothing where the grade asked for was not tested."""
    key = "execution.determinism"
    grades = [test.grade for test in tests.tests]
    if requested not in grades:
        return {}
    if (failed := tests.failed()) is not None and grades.index(failed.grade) <= grades.index(requested):
        reason = f"tested: {failed.grade} failed: {reason_text(failed)}"
        return {key: KeySeen(observed=tests.observed, status="substituted", reason=reason)}
    wanted = tests.tests[: grades.index(requested) + 1]
    if any(test.verdict != "passed" for test in wanted):
        return {}
    reason = f"tested: {wanted[-1].trials} results were compared bit for bit; {tests.inputs}"
    return {key: KeySeen(observed=tests.observed, status="honoured", reason=reason)}


def _verdict_text(test: GradeTest) -> str:
    return test.verdict.replace("_", " ")


def reason_text(test: GradeTest) -> str:
    """Return why a grade has its verdict, and where results differ."""
    return test.reason if test.first_difference is None else f"{test.reason}; first at {test.first_difference}"
