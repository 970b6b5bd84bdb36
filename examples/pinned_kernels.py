# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run nodes of a model by kernels of this library, inside of ONNX Runtime: which ones is for the policy to say."""

from __future__ import annotations

import xpuruntime as xrt

policy = {"mode": "strict", "kernels": {"matmul": "cpu.blas", "conv": "cpu.gemm_conv"}}
with xrt.InferenceSession(xrt.demo_model_path(), engine="onnxruntime", device="cpu", policy=policy) as session:
    report = session.explain()
print(report.headline)
for unit in report.units:
    if unit.kernel:
        print(f"{', '.join(unit.source_nodes)}: {unit.kernel}")
