# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Claim` and `VerificationResult`: what a session is verified for, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.files.paths import json_bytes, json_text
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.vocabulary import SECTIONS, VERDICTS, ClaimVerdict, Section
from xpuruntime.policies.verify_policy import Inconclusive

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["SCHEMA", "SECTIONS", "VERDICTS", "Claim", "ClaimVerdict", "VerificationResult"]

SCHEMA = "xpuruntime.verification/1"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a session is verified for.

    Attributes
    ----------
    id : str
        The section and what in it, such as ``"evidence.execution.precision"``; unique in a result.
    section : str
    requested, observed : str
        What must hold, and what was found, as text.
    verdict : {"pass", "fail", "inconclusive", "unobservable", "skipped"}
        ``inconclusive``: it was tested, and the test did not decide. ``unobservable``: nothing shows it either way.
        ``skipped``: it was not tested; the reason says why.
    code : ClaimCode
        Machine-readable reason.
    reason : str
        One sentence.
    fix : str or None
        The command or the policy edit that resolves it, where one is known.
    figures : dict of str to float
        Measured numbers by name.
    key : str or None
        The policy key that states it.
    line, column : int or None
        Where the policy file states it, counted from 1.
    inconclusive : {"fail", "warn", "pass"} or None
        What this claim does to the exit code where it is inconclusive; ``None``: as `VerificationResult.inconclusive`.
    """

    id: str
    section: Section
    requested: str
    observed: str
    verdict: ClaimVerdict
    code: ClaimCode
    reason: str
    fix: str | None = None
    figures: dict[str, float] = {}
    key: str | None = None
    line: int | None = None
    column: int | None = None
    inconclusive: Inconclusive | None = None

    @property
    def name(self) -> str:
        """The id without the section; the section itself where there is nothing else."""
        return self.id.partition(".")[2] or self.id


class VerificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """All claims of one verification.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.verification/1"``.
    created : str
        When it was made: ISO 8601, UTC.
    version : str
        Of xpuruntime.
    model : str
    model_sha256 : str or None
    policy : str or None
        The policy file; ``None`` where the policy was no file.
    policy_sha256 : str or None
        Of the file, else of the policy as JSON.
    lock : str or None
        The lock file that was verified, if any.
    lock_sha256 : str or None
    engine, device : str or None
        Who ran it; ``None`` where no session could be opened.
    claims : tuple of Claim
        In the order of the sections.
    inconclusive : {"fail", "warn", "pass"} or None
        What an inconclusive claim does to the exit code: 1, 0 with a warning, 0; ``None``: 4.
    comparable : bool
        False where this machine is another than the lock's, so that nothing can be compared: exit code 3.
    notes : tuple of str
        What limits the result, such as inputs that were generated.
    facts : dict of str to str
        What of the machine can change a result: load, throttling, clocks, packages.
    """

    schema: str = SCHEMA
    created: str = ""
    version: str = ""
    model: str
    model_sha256: str | None = None
    policy: str | None = None
    policy_sha256: str | None = None
    lock: str | None = None
    lock_sha256: str | None = None
    engine: str | None = None
    device: str | None = None
    claims: tuple[Claim, ...] = ()
    inconclusive: Inconclusive | None = None
    comparable: bool = True
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = {}

    def of(self, *verdicts: ClaimVerdict) -> tuple[Claim, ...]:
        """Return the claims with one of these verdicts, in their order."""
        return tuple(one for one in self.claims if one.verdict in verdicts)

    def effect(self, claim: Claim) -> Literal["fail", "undecided", "warn", "none"]:
        """Return what a claim does to the exit code."""
        if claim.verdict == "fail":
            return "fail"
        if claim.verdict != "inconclusive":
            return "none"
        word = claim.inconclusive or self.inconclusive
        return {"fail": "fail", "warn": "warn", "pass": "none", None: "undecided"}[word]  # type: ignore[return-value]

    @property
    def verdict(self) -> Literal["pass", "warn", "fail", "inconclusive"]:
        """What came of it as a whole; ``warn``: passed, with inconclusive claims that only warn."""
        effects = {self.effect(one) for one in self.claims}
        if "fail" in effects:
            return "fail"
        if "undecided" in effects or not self.comparable or not self._anything:
            return "inconclusive"
        return "warn" if "warn" in effects else "pass"

    @property
    def exit_code(self) -> int:
        """The exit code of ``xrt verify``: 0 passed, 1 failed, 3 not comparable here, 4 inconclusive."""
        if self.verdict == "inconclusive":
            return 4 if self.comparable else 3
        return 1 if self.verdict == "fail" else 0

    @property
    def _anything(self) -> bool:
        """Whether anything was tested to an end, or left undecided by consent."""
        return any(one.verdict in ("pass", "fail", "inconclusive") for one in self.claims)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if not self.comparable:
            return "not comparable: this is another machine than the lock's"
        if not self._anything:
            return "nothing verified"
        counts = [
            (len(self.of(verdict)), _WORDS[verdict]) for verdict in VERDICTS if verdict not in ("skipped", "pass")
        ]
        told = [f"{number} {word}" for number, word in counts if number]
        passed = len(self.of("pass"))
        if not told:
            return f"verified: {passed} claim{'' if passed == 1 else 's'} passed"
        return ", ".join([*told, f"{passed} passed"] if passed else told)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with `headline`, `verdict` and `exit_code` in them."""
        found: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        said = {"headline": self.headline, "verdict": self.verdict, "exit_code": self.exit_code}
        return {"schema": found.pop("schema"), **said, **found}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.locks.verification.outputs.page import render_page

        return render_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`, as `save` does with the format ``"html"``."""
        return self.save(path, "html")

    def save(self, path: str | os.PathLike[str], format: str = "json") -> Path:
        """Write the result in a format: a name of `xpuruntime.locks.verification.outputs.FORMATS`.

        The file is replaced as a whole or not at all.

        Raises
        ------
        InputError
            There is no such format, or the file cannot be written.
        """
        from xpuruntime.locks.verification.outputs import write_output

        return write_output(self, format, path)

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__(), width=100)

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __rich__(self) -> RenderableType:
        from xpuruntime.locks.verification.text import render

        return render(self)


_WORDS = {"fail": "failed", "inconclusive": "inconclusive", "unobservable": "unobservable"}
