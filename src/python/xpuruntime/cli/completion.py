# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Values of options that a shell completes: engines, devices, precisions, operations with kernels."""

from __future__ import annotations

from typing import get_args

__all__ = ["devices", "engines", "operations", "precisions"]


def engines(incomplete: str) -> list[str]:
    """Return engines that begin so; after a comma, those that are not in the list yet."""
    from xpuruntime.engines.registry import default_registry

    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [
        f"{before}{comma}{name}" for name in default_registry().engines() if name.startswith(last) and name not in taken
    ]


def devices(incomplete: str) -> list[str]:
    """Return devices that begin so."""
    from xpuruntime.policies.device_spec import DeviceKind

    words = [f"{kind}:0" if kind in ("cuda", "rocm", "dml") else kind for kind in get_args(DeviceKind)]
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def precisions(incomplete: str) -> list[str]:
    """Return precisions that begin so."""
    return [word for word in ("model", "fp32", "tf32", "fp16", "bf16", "int8") if word.startswith(incomplete)]


def operations(incomplete: str) -> list[str]:
    """Return operations with kernels that begin so."""
    from xpuruntime.ops.listing import kernels

    return [op for op in dict.fromkeys(one.op for one in kernels()) if op.startswith(incomplete)]
