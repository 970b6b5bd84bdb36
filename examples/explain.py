# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compare what was asked with what really ran."""

from __future__ import annotations

import xpuruntime as xrt

with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", precision="fp32") as session:
    report = session.explain()
print(report.headline)
for unit in report.units:
    print(f"{', '.join(unit.source_nodes) or unit.op}: {unit.relation}, on {unit.device} in {unit.precision_run}")
