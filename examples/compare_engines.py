# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hold engines against fp32 on the CPU. The null engine answers zeros: it shows how a mismatch is traced to a node."""

from __future__ import annotations

import xpuruntime as xrt

table = xrt.compare_engines(xrt.demo_model_path(), ["onnxruntime", "null"], device="cpu")
for row in table.rows:
    print(f"{row.engine}@{row.device}: {row.status}, {row.reason}")
    if row.divergence is not None:
        print(f"first node that differs: {', '.join(row.divergence.nodes)}")
