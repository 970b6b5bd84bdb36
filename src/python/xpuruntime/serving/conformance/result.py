# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ConformanceResult`: what was checked of a server, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

__all__ = ["Check", "Checker", "ConformanceResult", "FailedCheck", "UnobservableCheck"]

Outcome = Literal["pass", "fail", "unobservable"]

#: Checks of inference in which a model answered; in the others it refused.
_ANSWERED = ("JSON", "binary tensors", "raw contents", "typed contents")
#: After so many answers in a row that did not come in time, no more are waited for.
_MOST_LATE = 3


class FailedCheck(Exception):  # noqa: N818 - an outcome, and no error of ours
    """The server does something else than the protocol says."""


class UnobservableCheck(Exception):  # noqa: N818 - an outcome, and no error of ours
    """It could not be seen from outside."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes
    ----------
    transport : {"rest", "grpc"}
    name : str
    outcome : {"pass", "fail", "unobservable"}
    detail : str
        What was seen, or why nothing was.
    """

    transport: str
    name: str
    outcome: Outcome
    detail: str = ""


class ConformanceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked of one server.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.oip-check/1"``.
    url, grpc : str
        Addresses; empty where a transport was not checked.
    server : str
        Name and version that the server states.
    models : tuple of str
        Models that inference was checked with.
    checks : tuple of Check
    """

    schema: str = "xpuruntime.oip-check/1"
    url: str
    grpc: str
    server: str
    models: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(one for one in self.checks if one.outcome == "fail")

    @property
    def exit_code(self) -> int:
        """1 where a check failed, 4 where inference could not be checked, else 0."""
        if self.failed:
            return 1
        answered = (one for one in self.checks if one.outcome == "pass" and one.name.startswith("infer "))
        return 0 if any(one.name.rpartition(": ")[2] in _ANSWERED for one in answered) else 4

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__(), 100)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.server or 'server'} at {self.url or self.grpc}", title_justify="left")
        for column in ("transport", "check", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        styles = {"pass": "green", "fail": "bold red", "unobservable": "yellow"}
        for one in self.checks:
            outcome = Text(one.outcome, style=styles[one.outcome])
            table.add_row(one.transport, one.name, outcome, Text(one.detail))
        counted = {word: sum(one.outcome == word for one in self.checks) for word in styles}
        passed, failed, unseen = counted.values()
        return Group(table, Text(f"{passed} passed, {failed} failed, {unseen} unobservable"))


class Checker:
    """Runs checks of one transport, and keeps what came of them."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.checks: list[Check] = []
        self._late = 0

    def run(self, name: str, check: Callable[[], str | None]) -> bool:
        """Run a check, which returns what it saw or raises; return whether it passed."""
        outcome: Outcome = "pass"
        late, self._late = self._late, 0
        try:
            if late == _MOST_LATE:
                self._late = late
                raise UnobservableCheck(f"not asked: {late} answers in a row did not come in time")
            detail = check() or ""
        except FailedCheck as error:
            outcome, detail = "fail", str(error)
        except UnobservableCheck as error:
            outcome, detail = "unobservable", str(error)
        except TimeoutError:
            outcome, detail, self._late = "fail", "no answer came in time", late + 1
        except Exception as error:  # whatever a server answers is no error of the client
            outcome, detail = "fail", f"{type(error).__name__}: {error}"
        self._keep(name, outcome, detail)
        return outcome == "pass"

    def not_seen(self, name: str, reason: str) -> None:
        """Keep what could not be checked, and why."""
        self._keep(name, "unobservable", reason)

    def fail(self, name: str, detail: str) -> None:
        """Keep a check that failed."""
        self._keep(name, "fail", detail)

    def _keep(self, name: str, outcome: Outcome, detail: str) -> None:
        self.checks.append(Check(transport=self.transport, name=name[:300], outcome=outcome, detail=detail[:500]))
