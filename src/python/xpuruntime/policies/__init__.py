# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies: what the user asks, as frozen values that are read from and written to policy files.

Values here know nothing of machines and engines. They check form; planning checks what is there.
"""

from xpuruntime.policies.device_spec import ArtifactPolicy, DeviceSpec, MemoryPolicy
from xpuruntime.policies.execution_policy import ExecutionPolicy, WeightsPolicy
from xpuruntime.policies.kernel_policy import KernelPolicy
from xpuruntime.policies.kernel_rules import KernelRule, RuleMatch, TuningPolicy
from xpuruntime.policies.policy import SCHEMA, Policy, policy_schema
from xpuruntime.policies.verify_policy import (
    AccuracyPolicy,
    CalibrationPolicy,
    VerifyEvidence,
    VerifyGeneration,
    VerifyMemory,
    VerifyPolicy,
    VerifySpeed,
)

__all__ = [
    "SCHEMA",
    "AccuracyPolicy",
    "ArtifactPolicy",
    "CalibrationPolicy",
    "DeviceSpec",
    "ExecutionPolicy",
    "KernelPolicy",
    "KernelRule",
    "MemoryPolicy",
    "Policy",
    "RuleMatch",
    "TuningPolicy",
    "VerifyEvidence",
    "VerifyGeneration",
    "VerifyMemory",
    "VerifyPolicy",
    "VerifySpeed",
    "WeightsPolicy",
    "policy_schema",
]
