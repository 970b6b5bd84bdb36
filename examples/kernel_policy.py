# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Say which kernels you want, keep that in a file, and see which of it can be enforced here."""

from __future__ import annotations

import xpuruntime as xrt

policy = xrt.KernelPolicy(matmul="cublasLt", attention="flash_v2")
policy.save("kernels.json")
assert xrt.KernelPolicy.load("kernels.json") == policy

plan = xrt.plan(xrt.demo_model_path(), device="cpu", kernel_policy=policy)
for control in plan.controls:
    print(f"{control.key} = {control.requested}: {control.enforceability}, {control.reason}")
