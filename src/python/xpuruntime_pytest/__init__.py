# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plugin of pytest: ``@pytest.mark.xrt_lock("model.lock")`` holds a test's model to a lock.

It lies outside of `xpuruntime`, which it imports when the first marked test runs: pytest loads it in every run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from xpuruntime import InferenceSession, Lock, VerificationResult

_VERIFIED = pytest.StashKey[dict[tuple[str, str], "VerificationResult"]]()
_ANNOTATIONS = pytest.StashKey[list[str]]()


class _Marked:
    """What a mark states, with paths that begin in the folder of the test."""

    def __init__(
        self,
        item: pytest.Item,
        lock: str | os.PathLike[str],
        model: str | os.PathLike[str] | None = None,
        policy: Any = None,
        *,
        only: Sequence[str] | None = ("evidence", "accuracy"),
        other_machine: Literal["fail", "skip"] = "fail",
        **options: Any,
    ) -> None:
        from xpuruntime import load_lock
        from xpuruntime.lockfile.canonical import model_beside

        if other_machine not in ("fail", "skip"):
            pytest.fail(f"xrt_lock: other_machine is 'fail' or 'skip', got {other_machine!r}", pytrace=False)
        folder = item.path.parent
        self.item, self.only, self.other_machine, self.options = item, only, other_machine, options
        self.path = folder / lock
        self.lock: Lock = load_lock(self.path)
        self.model: Path = model_beside(self.lock, self.path) if model is None else folder / model
        named = isinstance(policy, (str, os.PathLike)) and (folder / policy).is_file()
        self.policy = folder / policy if named else policy

    def verified(self) -> VerificationResult:
        """Verify once in a run of pytest for all tests with the same mark."""
        from xpuruntime import verify
        from xpuruntime.locks.verification.formats import workflow_commands

        seen = self.item.config.stash.setdefault(_VERIFIED, {})
        key = (str(self.path), repr((self.model, self.policy, self.only, self.options)))
        if key not in seen:
            seen[key] = verify(self.model, self.policy, lock=self.path, only=self.only, **self.options)
            _annotate(self.item, workflow_commands(seen[key], _place(self.item)))
        return seen[key]


def _place(item: pytest.Item) -> tuple[Path, int]:
    file, line, _ = item.location
    return item.config.rootpath / file, (line or 0) + 1


def _annotate(item: pytest.Item, lines: list[str]) -> None:
    if os.environ.get("GITHUB_ACTIONS") == "true":
        item.stash[_ANNOTATIONS] = lines


def _refused(item: pytest.Item, error: Exception) -> BaseException:
    from xpuruntime.locks.verification.formats import workflow_command

    _annotate(item, [workflow_command("error", "xrt_lock", str(error), _place(item))])
    return pytest.fail.Exception(f"xrt_lock: {error}", pytrace=False)


def _marked(item: pytest.Item) -> _Marked:
    from xpuruntime import XpuRuntimeError

    mark = item.get_closest_marker("xrt_lock")
    if mark is None:
        pytest.fail("this fixture needs a lock. Fix: add @pytest.mark.xrt_lock('model.lock')", pytrace=False)
    try:
        return _Marked(item, *mark.args, **mark.kwargs)
    except (XpuRuntimeError, TypeError) as error:
        raise _refused(item, error) from None


def _hold(marked: _Marked) -> None:
    """Fail the test, or skip it where the lock is of another machine and the mark says so, unless the lock holds."""
    from xpuruntime import XpuRuntimeError

    try:
        result = marked.verified()
    except (XpuRuntimeError, TypeError) as error:
        raise _refused(marked.item, error) from None
    facts = {"lock": str(marked.path), "digest": marked.lock.digest, "engine": result.engine, "device": result.device}
    properties = [(f"xrt.{name}", str(value)) for name, value in {**facts, "verdict": result.verdict}.items()]
    for claim in result.claims:
        properties += [(f"xrt.{claim.id}.{name}", f"{figure:.17g}") for name, figure in claim.figures.items()]
    marked.item.user_properties += [
        property_ for property_ in properties if property_ not in marked.item.user_properties
    ]
    if not result.comparable and marked.other_machine == "skip":
        pytest.skip(f"{result.headline}: {marked.path}")
    if result.exit_code:
        pytest.fail(str(result), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark."""
    config.addinivalue_line(
        "markers",
        "xrt_lock(lock, model=None, policy=None, only=('evidence', 'accuracy'), other_machine='fail', **options): "
        "verify the model against the lock, as `xrt verify --lock` does, before the test runs",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Hold a marked test to its lock."""
    if item.get_closest_marker("xrt_lock") is not None:
        _hold(_marked(item))


@pytest.fixture
def xrt_lock(request: pytest.FixtureRequest) -> Lock:
    """Return the lock of the test's mark."""
    return _marked(request.node).lock


@pytest.fixture
def xrt_session(request: pytest.FixtureRequest) -> Iterator[InferenceSession]:
    """Open the model of the test's mark under its lock."""
    from xpuruntime import InferenceSession

    marked = _marked(request.node)
    _hold(marked)
    names = ("device", "engine", "precision", "calibration", "trust", "registry", "machine")
    options = {name: value for name, value in marked.options.items() if name in names}
    with InferenceSession(str(marked.model), marked.policy, lock=marked.path, **options) as session:
        yield session


@pytest.hookimpl(hookwrapper=True)  # which every pytest has that may be installed beside
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Hand annotations on with the report, which pytest-xdist sends to the process that prints."""
    outcome = yield
    if lines := item.stash.get(_ANNOTATIONS, None):
        outcome.get_result().__dict__["xrt_annotations"] = lines
        del item.stash[_ANNOTATIONS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print annotations for GitHub, which reads lines that begin with two colons."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for line in getattr(report, "xrt_annotations", ()):
                terminalreporter.write_line(line)
