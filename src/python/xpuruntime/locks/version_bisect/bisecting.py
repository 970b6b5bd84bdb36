# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`bisect_versions`: which version of a package changed a claim about a model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model import read_model
from xpuruntime.errors import EngineError, InputError, XpuRuntimeError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.diff.diffing import compare_environments
from xpuruntime.locks.diff.side import PythonSide, call, start_worker
from xpuruntime.locks.version_bisect.environments import (
    InstallError,
    listed_versions,
    make_environment,
    remove,
    versions_between,
)
from xpuruntime.locks.version_bisect.journal import BisectJournal
from xpuruntime.locks.version_bisect.result import VersionBisect, VersionVerdict
from xpuruntime.locks.version_bisect.search import first_bad
from xpuruntime.locks.version_bisect.version_claims import VersionClaim, judge, read_claim
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.policies.refusal import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.locks.diff.result import Diff
    from xpuruntime.locks.version_bisect.search import Judgement

__all__ = ["bisect_versions"]


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
    subject = {"package": package, "good": good, "bad": bad, "claim": wanted.text, "model": digest}
    known = BisectJournal(journal, subject, resume=resume)
    if wanted.kind == "unit":
        _check_node(wanted, read_model(model, trust=bool(arguments.get("trust"))))
    versions = versions_between(listed_versions(package, pre=pre), good, bad)
    with ScratchFolder("bisect") as name:
        folder = Path(name)

        def compared(control: str, version: str) -> Diff:
            python = make_environment(folder / "tested", package, version, extra)
            timed = wanted.kind == "speed"
            return compare_environments(
                f"py:{control}", f"py:{python}", model, inputs=inputs, budget=budget if timed else 0.0,
                margin=wanted.limit if timed else 10.0, **arguments,
            )  # fmt: skip

        control = ""

        def judged(version: str) -> Judgement:
            nonlocal control
            if version not in known.verdicts:
                start = time.monotonic()
                if not control:
                    control = _good_version(folder / "good", package, good, extra, model, arguments)
                try:
                    verdict, reason = judge(wanted, compared(control, version))
                except InstallError as error:
                    verdict, reason = "skipped", str(error)
                except XpuRuntimeError as error:
                    said = _without_path(error.reason, folder)
                    verdict, reason = ("bad" if wanted.kind == "runs" else "skipped"), f"it does not run: {said}"
                finally:
                    remove(folder / "tested")
                seconds = time.monotonic() - start
                known.add(VersionVerdict(version=version, verdict=verdict, reason=reason, seconds=round(seconds, 3)))
                if progress is not None:
                    progress(known.verdicts[version])
            return known.verdicts[version].verdict

        at_end = judged(bad)
        found = first_bad(versions, judged) if at_end == "bad" else None
    of_good = VersionVerdict(version=good, verdict="good", reason="what the others are compared with")
    verdicts = {**known.verdicts, good: of_good}
    shown = tuple(verdicts[one] for one in versions if one in verdicts)
    result = VersionBisect(
        package=package,
        good=good,
        bad=bad,
        model=os.fspath(model),
        claim=wanted.text,
        outcome="nothing changed" if at_end == "good" else "not judged",
        versions=shown,
        untested=len(versions) - len(shown),
    )
    if found is None:
        return result
    from msgspec.structs import replace

    return replace(
        result,
        outcome="not decided" if found.between else "found",
        last_good=versions[found.last_good],
        first_bad=versions[found.first_bad],
        between=tuple(versions[place] for place in found.between),
    )


def _check_node(claim: VersionClaim, info: ModelInfo) -> None:
    """Refuse a claim about a node that the model does not have: nothing of it could ever differ."""
    names = [one.name for one in info.nodes]
    if claim.node not in names:
        near = nearest(claim.node, names)
        hint = f"did you mean {near!r}?" if near else "name one of `xrt explain`"
        raise InputError(f"claim {claim.text!r}: the model has no node {claim.node!r}. Fix: {hint}")


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
            place = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
            call(worker, "", "open_session", model=place, inputs=str(inputs), arguments=dict(arguments))
    except XpuRuntimeError as error:
        said = _without_path(error.reason, folder)
        raise EngineError(
            f"the good version, {package} {version}, does not run: {said}", fix="name a version that runs as good"
        ) from error
    return python


def _without_path(text: str, folder: Path) -> str:
    """Return a message without the folder that is gone when it is read."""
    return text.replace(f"py:{folder}/tested/bin/python: ", "").replace(f"{folder}/", "")[:500]
