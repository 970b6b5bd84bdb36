# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Machines that tests plan for: one with a processor, and GPUs of an H200 unless stated otherwise."""

from __future__ import annotations

from typing import Any

from xpuruntime.runtime.machine import CpuFacts, CudaFacts, Machine


def gpu(index: int = 0, **facts: Any) -> CudaFacts:
    usual = {
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "total_memory": 150 << 30,
        "sm_count": 132,
        "driver_version": (13, 0),
        "runtime_version": (13, 0),
        "pci_id": f"0000:0{index + 1}:00.0",
    }
    return CudaFacts(index=index, **usual | facts)


def machine(**facts: Any) -> Machine:
    usual = {"system": "Linux", "architecture": "x86_64", "python": "3.11.7", "cpu": CpuFacts(name="cpu", cores=2)}
    return Machine(**usual | facts)
