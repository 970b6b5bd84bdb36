# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VerificationResult`: what came of a verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from xpuruntime.evidence.documents import Page
from xpuruntime.locks.verification.claims import VERDICTS, Claim, ClaimVerdict, place_text, worst_first
from xpuruntime.policies.verify_policy import Inconclusive
from xpuruntime.tables import rows_table

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

SCHEMA = "xpuruntime.verification/1"
_WORDS = {"fail": "failed", "inconclusive": "inconclusive", "unobservable": "unobservable"}


_STYLE = {"pass": "green", "fail": "bold red", "inconclusive": "bold yellow", "unobservable": "yellow", "skipped": ""}
_HEAD = {"pass": "bold green", "warn": "bold yellow", "fail": "bold red", "inconclusive": "bold yellow"}


class VerificationResult(Page, frozen=True, kw_only=True):
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

    NOUN: ClassVar = "the verification"
    TABLE: ClassVar = "claims"
    STATED: ClassVar = ("headline", "verdict", "exit_code")

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
    facts: dict[str, str] = msgspec.field(default_factory=dict)

    def of(self, *verdicts: ClaimVerdict) -> tuple[Claim, ...]:
        """Return the claims with one of these verdicts, in their order."""
        return tuple(claim for claim in self.claims if claim.verdict in verdicts)

    def effect(self, claim: Claim) -> Literal["fail", "undecided", "warn", "none"]:
        """Return what a claim does to the exit code."""
        if claim.verdict == "fail":
            return "fail"
        if claim.verdict != "inconclusive":
            return "none"
        word = claim.inconclusive or self.inconclusive
        return {"fail": "fail", "warn": "warn", "pass": "none", None: "undecided"}[word]  # type: ignore[return-value]

    def file_of(self, claim: Claim) -> str | None:
        """Return the file whose lines a claim names: the lock for what differs from it, else the policy."""
        return self.lock if claim.id.startswith("evidence.lock.") else self.policy

    @property
    def verdict(self) -> Literal["pass", "warn", "fail", "inconclusive"]:
        """What came of it as a whole; ``warn``: passed, with inconclusive claims that only warn."""
        effects = {self.effect(claim) for claim in self.claims}
        if "fail" in effects:
            return "fail"
        if "undecided" in effects or not self.comparable or not self._anything:
            return "inconclusive"
        return "warn" if "warn" in effects else "pass"

    @property
    def exit_code(self) -> Literal[0, 1, 3, 4]:
        """The exit code of ``xrt verify``: 0 passed, 1 failed, 3 not comparable here, 4 inconclusive."""
        if self.verdict == "inconclusive":
            return 4 if self.comparable else 3
        return 1 if self.verdict == "fail" else 0

    @property
    def _anything(self) -> bool:
        """Whether anything was tested to an end, or left undecided by consent."""
        return any(claim.verdict in ("pass", "fail", "inconclusive") for claim in self.claims)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if not self.comparable and not self.of("fail"):
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

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.locks.verification.formats import render_page

        return render_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`, as `save` does with the format ``"html"``."""
        return self.save(path, "html")

    def save(self, path: str | os.PathLike[str], format: str = "json") -> Path:
        """Write the result in a format: a name of `xpuruntime.locks.verification.formats.FORMATS`.

        The file is replaced as a whole or not at all.

        Raises
        ------
        InputError
            There is no such format, or the file cannot be written.
        """
        from xpuruntime.locks.verification.formats import write_output

        return write_output(self, format, path)

    def __rich__(self) -> RenderableType:
        """Return headline, a table of all claims, and the reasons of those that did not pass."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(self.headline, style=_HEAD[self.verdict])]
        where = f"{self.model} on {self.engine}@{self.device}" if self.engine else self.model
        parts.append(Text(where + (f", lock {self.lock}" if self.lock else "")))
        claims = worst_first(self.claims)
        rows = [(claim.id, claim.requested, claim.observed, (claim.verdict, _STYLE[claim.verdict])) for claim in claims]
        columns = ("claim", "?requested", "observed", "verdict")
        parts += rows_table("claims", columns, rows, most=None)
        for claim in claims:
            if claim.verdict == "pass":
                continue
            text = place_text(self, claim)
            parts.append(Text(f"{claim.verdict}: {claim.id}: {claim.reason}{f' ({text})' if text else ''}"))
            if claim.fix:
                parts.append(Text(f"  fix: {claim.fix}"))
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)
