# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the tests of verification share: the demo model, and results with claims of every verdict."""

from __future__ import annotations

import pytest
from claim_records import HOSTILE, claim, result

from xpuruntime.demo import demo_model_path
from xpuruntime.locks.verification.result import VerificationResult


@pytest.fixture(scope="session")
def digits() -> str:
    return str(demo_model_path())


@pytest.fixture
def mixed() -> VerificationResult:
    """A result with every verdict, figures, a place in a policy, and hostile text."""
    return result(
        claim("evidence.execution.engine"),
        claim(
            "evidence.execution.precision",
            "fail",
            fix="do this",
            key="execution.precision",
            line=7,
            column=3,
            figures={"units": 4.0, "share": 0.1},
        ),
        claim("evidence.kernels.matmul", "unobservable"),
        claim("evidence.execution.layout", "skipped"),
        claim(f"accuracy.{HOSTILE}", "fail", reason=HOSTILE, requested=HOSTILE, observed=HOSTILE, fix=HOSTILE),
        claim("accuracy.logits", "inconclusive", code="not_compared"),
        policy="policies/my policy,a:b%.yaml",
        policy_sha256="1" * 64,
        engine="onnxruntime",
        device="cpu",
        notes=(HOSTILE,),
        facts={"load": "0.1"},
    )
