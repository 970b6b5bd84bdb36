# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""See what would run, and why every other candidate would not, without loading anything."""

from __future__ import annotations

import xpuruntime as xrt

policy = {"mode": "strict", "execution": {"device": "cpu", "precision": "fp32"}}
plan = xrt.plan(xrt.demo_model_path(), policy=policy)
print(f"{plan.engine} on {plan.device}")
for verdict in plan.verdicts:
    print(f"{'accepted' if verdict.accepted else 'rejected'} {verdict.candidate}: {verdict.reason}")
