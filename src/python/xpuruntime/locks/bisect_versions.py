# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`bisect_versions`: which version of a package changed a claim about a model.

Only the version of the package differs between the environments that are compared; `find_divergence`, which finds a
node, is unrelated.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from xpuruntime.engines.arrays import digest_parts
from xpuruntime.engines.registry import read_model
from xpuruntime.errors import EngineError, InputError, XpuRuntimeError
from xpuruntime.evidence.documents import Document
from xpuruntime.files.digests import file_digest
from xpuruntime.files.journal import Journal
from xpuruntime.files.paths import kind_of
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.diff.diffing import compare_environments
from xpuruntime.locks.environments import (
    InstallError,
    PythonSide,
    call,
    listed_versions,
    make_environment,
    start_worker,
    versions_between,
)
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.statistics import RatioVerdict
from xpuruntime.policies.document import nearest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.locks.diff.result import Diff

_SCHEMA = "xpuruntime.bisect/1"
_STYLE = {"good": "green", "bad": "bold red", "skipped": "yellow"}
#: How a claim is written, for messages and help.
_FORMS = (
    "runs", "plan", "placement", "kernels", "numerics", "accuracy <= 1e-3", "unit:NODE.kernel",
    "speed.latency.p50 <= +5%",
)  # fmt: skip
_CLAIM = re.compile(
    r"(?P<level>runs|plan|placement|kernels|numerics)"
    r"|unit:(?P<node>.+)\.(?P<aspect>[a-z]+)"
    r"|(?P<figure>accuracy|speed\.latency\.p50)\s*"
    r"(?:<=\s*(?P<limit>\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%)?)?",
    re.DOTALL,
)
_DEFAULT_LIMIT = {"accuracy": 1e-3, "speed": 0.05}
#: What of a unit can be claimed, to how rows of a difference name it.
_ASPECTS = {
    "kernel": ("kernel", "xpuruntime kernel"),
    "precision": ("precision",),
    "layout": ("layout",),
    "placement": ("placement",),
    "fusion": ("grouping", "folding"),
}

Judgement = Literal["good", "bad", "skipped"]


class VersionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One version that was judged.

    Attributes
    ----------
    version : str
    verdict : {"good", "bad", "skipped"}
    reason : str
        What was observed, or why it could not be judged.
    seconds : float
        That installing and comparing took.
    """

    version: str
    verdict: Judgement
    reason: str
    seconds: float = 0.0


class VersionBisect(Document, frozen=True, kw_only=True):
    """The version of a package that changed a claim.

    Attributes
    ----------
    schema : str
    package, good, bad : str
        As given.
    model, claim : str
    outcome : {"found", "not decided", "nothing changed", "not judged"}
        ``"not decided"``: the versions of `between` were skipped, and any of them may be the first that is bad.
        ``"nothing changed"``: the claim holds with the bad version. ``"not judged"``: that one was skipped.
    last_good, first_bad : str or None
    between : tuple of str
    versions : tuple of VersionVerdict
        In the order of the versions.
    untested : int
        Versions of the range that did not have to be judged.
    """

    STATED: ClassVar = ("headline", "exit_code")

    schema: str = _SCHEMA
    package: str
    good: str
    bad: str
    model: str
    claim: str
    outcome: Literal["found", "not decided", "nothing changed", "not judged"]
    last_good: str | None = None
    first_bad: str | None = None
    between: tuple[str, ...] = ()
    versions: tuple[VersionVerdict, ...] = ()
    untested: int = 0

    @property
    def exit_code(self) -> int:
        """0 the first bad version was found, 1 nothing changed, 3 the bad version was skipped, 4 not decided."""
        return {"found": 0, "nothing changed": 1, "not judged": 3, "not decided": 4}[self.outcome]

    @property
    def headline(self) -> str:
        """One sentence."""
        if self.outcome == "found":
            return f"{self.package} {self.first_bad} changed it; {self.last_good} is the last good version"
        if self.outcome == "not decided":
            suspects = ", ".join((*self.between, self.first_bad or ""))
            return f"one of {self.package} {suspects} changed it: the others could not be judged"
        if self.outcome == "nothing changed":
            return f"the claim holds with {self.package} {self.bad} as with {self.good}: nothing to find"
        return f"{self.package} {self.bad} could not be judged"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import rows_table

        rows = [
            (version.version, (version.verdict, _STYLE[version.verdict]), f"{version.seconds:.1f}", version.reason)
            for version in self.versions
        ]
        shown = rows_table("versions", ("version", "verdict", ">seconds", "why"), rows, most=None)
        head = Text(self.headline, style="bold green" if self.exit_code == 0 else "bold yellow")
        what = Text(f"claim: {self.claim}, model: {self.model}, {self.package} {self.good}..{self.bad}")
        number = f"{self.untested} version{'s' * (self.untested != 1)}"
        rest = Text(f"{number} of the range did not have to be judged")
        return Group(head, what, *shown, *([rest] if self.untested else []))


def bisect_versions(
    package: str,
    good: str,
    bad: str,
    model: str | os.PathLike[str],
    *,
    claim: str,
    inputs: Mapping[str, Any] | None = None,
    extra: Sequence[str] = (),
    pre: bool = False,
    budget: float = 60.0,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[VersionVerdict], None] | None = None,
    **arguments: Any,
) -> VersionBisect:
    """Find the version of a package that changed a claim about a model.

    Each version is installed into a virtual environment of its own, in which all else is what this process imports;
    the model runs there and with the good version, and the two are compared as ``xrt diff`` does. A version that
    cannot be installed, run or decided is skipped, and the search goes around it.

    Parameters
    ----------
    package : str
        As pip knows it.
    good, bad : str
        Versions; `bad` may be the older one.
    model : str or path
    claim : str
        What must be as with the good version, such as ``"numerics"`` or ``"speed.latency.p50 <= +5%"``.
    inputs : mapping of str to array, optional
        Default: generated from the model's shapes, the same each time.
    extra : sequence of str
        Further requirements of each environment, such as ``"numpy<2"``; installed without what they depend on.
    pre : bool
        Take pre-releases, too.
    budget : float
        Seconds for timing one version, where the claim is of speed.
    journal : path, optional
        A file that gets each verdict as it is known.
    resume : bool
        Take the verdicts of a journal that is there.
    progress : callable, optional
        Called with each verdict.
    **arguments
        Of `InferenceSession`: policy, device, engine, precision. JSON must carry them.

    Returns
    -------
    VersionBisect
        Printable; ``.first_bad``, ``.versions``, ``.exit_code``, ``.to_dict()``, ``.save()``.

    Raises
    ------
    InputError
        The package, a version, the claim or the journal is wrong.
    EngineError
        The good version cannot be installed or does not run the model; pip is missing or reaches no index.
    """
    wanted = read_claim(claim)
    try:
        digest = file_digest(os.fspath(model))
    except OSError as error:
        raise InputError(f"cannot read the model '{os.fspath(model)}': {error.strerror}") from error
    policy = arguments.get("policy")
    subject = {
        "package": package, "good": good, "bad": bad, "claim": wanted.text, "model": digest, "with": list(extra),
        "inputs": None if inputs is None else _digest_of(inputs),
        "policy": file_digest(policy) if isinstance(policy, (str, os.PathLike)) and kind_of(policy) == "file" else None,
        "arguments": msgspec.to_builtins(arguments, enc_hook=str),
    }  # fmt: skip
    if resume and (journal is None or kind_of(journal) != "file"):
        named = "" if journal is None else f" {journal}"
        raise InputError(f"there is no journal{named} to resume. Fix: leave --resume out, or give --journal FILE")
    if wanted.kind == "unit":
        _check_node(wanted, read_model(model, trust=bool(arguments.get("trust"))))
    versions = versions_between(listed_versions(package, pre=pre), good, bad)
    budget, margin = (budget, wanted.limit) if wanted.kind == "speed" else (0.0, 10.0)
    known: dict[str, VersionVerdict] = {}
    with Journal(journal, "bisect_journal/2", subject, resume=resume) as log, ScratchFolder("bisect") as name:
        folder, begin, control = Path(name), time.monotonic(), ""

        def judged(version: str) -> Judgement:
            nonlocal control
            if log.has(version):
                known[version] = msgspec.convert(log.recall(version), VersionVerdict)
                return known[version].verdict
            start = time.monotonic()
            if not control:
                control = _good_version(folder / "good", package, good, extra, model, arguments)
            try:
                tested = make_environment(folder / "tested", package, version, extra)
                diff = compare_environments(
                    f"py:{control}", f"py:{tested}", model, inputs=inputs, budget=budget, margin=margin, **arguments
                )
                verdict, reason = judge(wanted, diff)
            except InstallError as error:
                verdict, reason = "skipped", str(error)
            except XpuRuntimeError as error:
                verdict = "bad" if wanted.kind == "runs" else "skipped"
                reason = f"it does not run: {_without_path(error.reason, folder)}"
            finally:
                shutil.rmtree(folder / "tested", ignore_errors=True)
            seconds = round(time.monotonic() - start, 3)
            known[version] = VersionVerdict(version=version, verdict=verdict, reason=reason, seconds=seconds)
            log.record(version, msgspec.to_builtins(known[version]), time.monotonic() - begin)
            if progress is not None:
                progress(known[version])
            return verdict

        at_end = judged(bad)
        low, high = first_bad(versions, judged) if at_end == "bad" else (0, 0)
        log.finish(time.monotonic() - begin)
    known[good] = VersionVerdict(version=good, verdict="good", reason="what the others are compared with")
    shown = tuple(known[version] for version in versions if version in known)
    between = tuple(versions[low + 1 : high])
    unchanged: Any = "nothing changed" if at_end == "good" else "not judged"
    return VersionBisect(
        package=package,
        good=good,
        bad=bad,
        model=os.fspath(model),
        claim=wanted.text,
        outcome=("not decided" if between else "found") if at_end == "bad" else unchanged,
        last_good=versions[low] if at_end == "bad" else None,
        first_bad=versions[high] if at_end == "bad" else None,
        between=between,
        versions=shown,
        untested=len(versions) - len(shown),
    )


def first_bad(versions: Sequence[str], judge: Callable[[str], Judgement]) -> tuple[int, int]:
    """Find where ordered versions turn from good to bad; the first is known as good and the last as bad.

    Return the places of the last good and of the first bad version; all between the two were skipped. Where a version
    is skipped, the nearest that is left is judged instead, as ``git bisect skip`` does.
    """
    low, high, skipped = 0, len(versions) - 1, set[int]()
    while left := [index for index in range(low + 1, high) if index not in skipped]:
        middle = (low + high) / 2
        middle_index = min(left, key=lambda candidate: (abs(candidate - middle), candidate))
        verdict = judge(versions[middle_index])
        if verdict == "good":
            low = middle_index
        elif verdict == "bad":
            high = middle_index
        else:
            skipped.add(middle_index)
    return low, high


def _check_node(claim: VersionClaim, info: ModelInfo) -> None:
    """Refuse a claim about a node that the model does not have: nothing of it could ever differ."""
    names = [node.name for node in info.nodes]
    if claim.node not in names:
        near = nearest(claim.node, names)
        hint = f"write {near}" if near else "name one of `xrt explain`"
        raise InputError(f"claim {claim.text!r}: the model has no node {claim.node!r}. Fix: {hint}")


def _digest_of(inputs: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for part in digest_parts({name: np.asarray(array) for name, array in inputs.items()}):
        digest.update(part)
    return digest.hexdigest()


def _good_version(
    folder: Path,
    package: str,
    version: str,
    extra: Sequence[str],
    model: str | os.PathLike[str],
    arguments: Mapping[str, Any],
) -> str:
    """Return the interpreter of the good version, once the model could be opened there."""
    try:
        python = make_environment(folder, package, version, extra)
        with start_worker(PythonSide(f"py:{python}", python), folder) as worker:
            inputs = folder / "no-inputs"
            write_arrays(inputs, {})
            path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
            call(worker, "", "open_session", model=path, inputs=str(inputs), arguments=dict(arguments))
    except XpuRuntimeError as error:
        reason = _without_path(error.reason, folder)
        raise EngineError(
            f"the good version, {package} {version}, does not run: {reason}", fix="name a version that runs as good"
        ) from error
    return python


def _without_path(text: str, folder: Path) -> str:
    """Return a message without the folder that is gone when it is read."""
    return text.replace(f"py:{folder}/tested/bin/python: ", "").replace(f"{folder}/", "")[:500]


class VersionClaim(NamedTuple):
    """One claim about a model that is compared between two environments.

    `kind` is ``"runs"``, a level of a difference, ``"accuracy"``, ``"unit"`` or ``"speed"``; `limit` is of the drift as
    a share of the largest value, or of the slowdown.
    """

    text: str
    kind: str
    limit: float = 0.0
    node: str = ""
    aspect: str = ""


def read_claim(text: str) -> VersionClaim:
    """Read a claim. Raises `InputError` where it has none of the forms."""
    text = text.strip()
    match = _CLAIM.fullmatch(text)
    if match and match["level"]:
        return VersionClaim(text, match["level"])
    if match and match["node"]:
        if match["aspect"] not in _ASPECTS:
            raise InputError(f"claim {text!r}: of a unit {', '.join(_ASPECTS)} can be claimed, not {match['aspect']!r}")
        return VersionClaim(text, "unit", node=match["node"], aspect=match["aspect"])
    if match:
        kind = match["figure"].partition(".")[0]
        limit = float(match["limit"] or _DEFAULT_LIMIT[kind]) / (100 if match["percent"] else 1)
        if limit < float("inf"):
            return VersionClaim(text, kind, limit=limit)
    raise InputError(f"claim {text!r} cannot be bisected. Fix: give one of {'; '.join(_FORMS)}")


def judge(claim: VersionClaim, diff: Diff) -> tuple[Judgement, str]:
    """Return whether a claim holds in the second environment as in the first, and why."""
    if claim.kind == "runs":
        return "good", "the model runs"
    if claim.kind == "speed":
        return _judge_speed(diff)
    if claim.kind == "unit":
        return _judge_unit(claim, diff)
    level = diff.level("numerics" if claim.kind == "accuracy" else claim.kind)
    if level.verdict == "same":
        return "good", level.reason or f"{level.name}: same"
    if level.verdict != "differs":
        return "skipped", f"{level.verdict}: {level.reason}"
    if claim.kind == "accuracy":
        return _judge_accuracy(claim, diff)
    first, remaining = level.rows[0], len(level.rows) - 1
    if first.figures:
        return "bad", f"{first.subject}: {first.code}"
    subject = f"{first.code}: {', '.join(first.nodes[:2]) or first.subject}" if first.code else first.subject
    return "bad", f"{subject}: {first.before} -> {first.after}" + (f" and {remaining} more" if remaining else "")


def _judge_unit(claim: VersionClaim, diff: Diff) -> tuple[Judgement, str]:
    kernels = diff.level("kernels")
    for row in (*diff.level("placement").rows, *kernels.rows):
        if row.code in _ASPECTS[claim.aspect] and claim.node in row.nodes:
            return "bad", f"{claim.aspect} of {claim.node}: {row.before} -> {row.after}"
    if claim.aspect == "kernel" and kernels.verdict == "unobservable":
        return "skipped", f"unobservable: {kernels.reason}"
    return "good", f"{claim.aspect} of {claim.node} is the same"


def _judge_speed(diff: Diff) -> tuple[Judgement, str]:
    speed = diff.speed
    if speed is None:
        return "skipped", diff.level("time").reason
    ratio = f"{speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}] of the good version's time"
    if speed.verdict is RatioVerdict.SLOWER:
        return "bad", ratio
    if speed.within_limit:
        return "good", ratio
    return "skipped", f"undecided: {ratio}" + ("; the machine is too noisy" if speed.too_noisy else "")


def _judge_accuracy(claim: VersionClaim, diff: Diff) -> tuple[Judgement, str]:
    worst, reason = 0.0, ""
    for row in diff.level("numerics").rows:
        if not row.subject.startswith("output "):
            continue
        drift = row.figures.get("max_rel")
        if drift is None or not drift <= claim.limit:
            return "bad", f"{row.subject}: {row.code or f'{row.before} -> {row.after}'}"
        if drift >= worst:
            worst, reason = drift, f"{row.subject}: drift {drift:.2g} of the largest value"
    return "good", reason
