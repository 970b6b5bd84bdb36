# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of audits: timed runs do the same work as untimed ones."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.precision import compare_within
from xpuruntime.inference.checking import tolerance_of
from xpuruntime.locks.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.locks.verifying.subject import Subject

__all__ = ["audit_claims"]

#: Timed runs, as far as they take no longer than this, and how many of their outputs are kept.
_RUNS, _SECONDS, _KEPT = 200, 1.0, 8


def audit_claims(subject: Subject) -> Iterator[Claim]:
    """Yield ``audit.same_work``: outputs of runs in a timed loop are those of a run outside of it."""
    yield _same_work(subject)


def _same_work(subject: Subject) -> Claim:
    session, feeds = subject.session, subject.feeds
    expected = session.run(feeds)
    kept, runs = _timed_outputs(subject)
    limits = tolerance_of(session)
    wrong = []
    for number, outputs in kept.items():
        found = compare_within(expected, outputs, limits)
        if not found.passed:
            wrong.append(f"run {number}: {found.figures}")
    return Claim(
        id="audit.same_work",
        section="audit",
        requested="timed runs give the outputs of untimed runs",
        observed=f"{len(kept) - len(wrong)} of {len(kept)} sampled runs agree",
        verdict="fail" if wrong else "pass",
        code="other_work" if wrong else "ok",
        reason="; ".join(wrong[:3]) if wrong else f"{len(kept)} of {runs} timed runs were compared",
        fix="compare the outputs of single runs with `xrt compare`" if wrong else None,
        figures={"runs": runs, "sampled": len(kept), "different": len(wrong)},
    )


def _timed_outputs(subject: Subject) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the outputs of some runs of a timed loop, drawn with a fixed seed, and how many runs there were."""
    run, feeds = subject.session.run, subject.feeds
    draw, kept = random.Random(0), {}
    chosen = set(draw.sample(range(_RUNS), _KEPT))
    start = last = time.perf_counter()
    done = 0
    while done < _RUNS and (last - start < _SECONDS or done < _KEPT):
        outputs = run(feeds)
        last = time.perf_counter()
        if done in chosen or done < 2:
            kept[done] = outputs
        done += 1
    return kept, done
