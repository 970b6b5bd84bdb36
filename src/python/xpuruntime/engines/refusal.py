# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Refusal`: why an engine does not take a request, as `Engine.judge` answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.base import Judgement
from xpuruntime.evidence.records import Verdict
from xpuruntime.evidence.verdict_codes import VerdictCode

if TYPE_CHECKING:
    from xpuruntime.runtime.machine import Machine

__all__ = ["Refusal", "missing_cuda_device"]


class Refusal(NamedTuple):
    """A verdict's code, its reason, and the fix."""

    code: VerdictCode
    reason: str
    fix: str | None = None

    def verdict(self, engine: str, device: str) -> Verdict:
        """Return the verdict on this engine on this device."""
        candidate = f"{engine}@{device}"
        return Verdict(candidate=candidate, accepted=False, code=self.code, reason=self.reason, fix=self.fix)

    def judgement(self, engine: str, device: str) -> Judgement:
        """Return the answer to a request for this engine on this device."""
        return Judgement(verdict=self.verdict(engine, device))


def missing_cuda_device(device: str, machine: Machine) -> Refusal | None:
    """Refuse a CUDA device that is not on this machine; ``"cuda"`` is the first one."""
    if not machine.cuda:
        reason = f"{device} is not there: {machine.cuda_reason or 'no CUDA device'}"
        return Refusal(VerdictCode.DEVICE_MISSING, reason)
    if int(device.partition(":")[2] or 0) not in {one.index for one in machine.cuda}:
        have = ", ".join(f"cuda:{one.index}" for one in machine.cuda)
        return Refusal(VerdictCode.DEVICE_MISSING, f"{device} is not there: this machine has {have}")
    return None
