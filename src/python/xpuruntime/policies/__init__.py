# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies: what the user asks, as frozen values that are read from and written to policy files.

Values here know nothing of machines and engines. They check form; planning checks what is there.
"""

from xpuruntime.policies.accuracy_policy import AccuracyPolicy
from xpuruntime.policies.artifact_policy import ArtifactPolicy
from xpuruntime.policies.calibration_policy import CalibrationPolicy
from xpuruntime.policies.device_spec import DeviceSpec
from xpuruntime.policies.execution_policy import ExecutionPolicy
from xpuruntime.policies.kernel_policy import KernelPolicy
from xpuruntime.policies.kernel_rule import KernelRule, RuleMatch
from xpuruntime.policies.memory_policy import MemoryPolicy
from xpuruntime.policies.policy import SCHEMA, Policy
from xpuruntime.policies.schema import policy_schema
from xpuruntime.policies.tuning_policy import TuningPolicy
from xpuruntime.policies.verify_policy import VerifyEvidence, VerifyMemory, VerifyPolicy, VerifySpeed

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
    "VerifyMemory",
    "VerifyPolicy",
    "VerifySpeed",
    "policy_schema",
]
