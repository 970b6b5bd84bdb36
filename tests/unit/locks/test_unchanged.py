# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verifications of an unchanged model, ``XPURUNTIME_VERIFY_REPEATS`` of them, as a rule 4: none may fail."""

from __future__ import annotations

import collections
import os

import pytest

import xpuruntime as xrt

REPEATS = int(os.environ.get("XPURUNTIME_VERIFY_REPEATS", "4"))
SPEED = {"max_slowdown": "5%", "budget": "300ms" if REPEATS <= 10 else "5s"}
POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "verify": {"speed": SPEED}}


@pytest.mark.timeout(1200)
def test_an_unchanged_model_never_fails(digits):
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failed = []
    for _ in range(REPEATS):
        result = xrt.verify(digits, POLICY, only=["accuracy", "audit", "speed"])
        counts.update((claim.id, claim.verdict) for claim in result.claims)
        failed += [f"{one.id}: {one.reason} {one.figures}" for one in result.of("fail")]
    for (claim, verdict), count in sorted(counts.items()):
        print(f"{claim:24} {verdict:14} {count}")
    assert not failed, "\n".join(failed)
    assert counts["accuracy.logits", "pass"] == REPEATS
