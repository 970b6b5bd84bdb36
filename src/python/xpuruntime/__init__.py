# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime: an execution control plane for AI accelerators.

A policy file says which engine, kernels, precision and memory run a model. The library plans it, runs it, and shows
what really ran::

    Policy (requested) -> Plan (resolved) -> run -> Report (observed)

Importing this package imports no vendor package and needs no GPU, driver or vendor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import (
    CudaError,
    EngineError,
    InputError,
    LockError,
    ModelError,
    OutOfMemoryError,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
    XpuRuntimeWarning,
)

if TYPE_CHECKING:
    from xpuruntime import ops
    from xpuruntime._core import DeviceManager, MemoryManager, StreamManager
    from xpuruntime.demo import demo_images, demo_model_path
    from xpuruntime.engines.artifact import Artifact
    from xpuruntime.evidence import Report, ReportComparison, compare_reports
    from xpuruntime.evidence.profile import Profile
    from xpuruntime.inference import Comparison, InferenceSession, compare_engines, compile_model, plan, profile
    from xpuruntime.ops import clear_decisions, decisions, use_policy
    from xpuruntime.planning import Plan
    from xpuruntime.policies import AccuracyPolicy, ArtifactPolicy, ExecutionPolicy, KernelPolicy, MemoryPolicy, Policy
    from xpuruntime.runtime.device import (
        Device,
        get_all_devices,
        get_current_device,
        get_device_count,
        set_current_device,
        synchronize,
    )
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.runtime.memory import MemoryPool
    from xpuruntime.runtime.stream import Event, Graph, Stream
    from xpuruntime.runtime.tensor import Tensor

__version__ = "0.1.0"

__all__ = [
    "AccuracyPolicy",
    "Artifact",
    "ArtifactPolicy",
    "Comparison",
    "CudaError",
    "Device",
    "DeviceManager",
    "EngineError",
    "Event",
    "ExecutionPolicy",
    "Graph",
    "InferenceSession",
    "InputError",
    "KernelPolicy",
    "LockError",
    "Machine",
    "MemoryManager",
    "MemoryPolicy",
    "MemoryPool",
    "ModelError",
    "OutOfMemoryError",
    "Plan",
    "Policy",
    "PolicyError",
    "Profile",
    "Report",
    "ReportComparison",
    "Stream",
    "StreamManager",
    "Tensor",
    "UnsupportedOperationError",
    "XpuRuntimeError",
    "XpuRuntimeWarning",
    "__version__",
    "clear_decisions",
    "compare_engines",
    "compare_reports",
    "compile_model",
    "decisions",
    "demo_images",
    "demo_model_path",
    "get_all_devices",
    "get_current_device",
    "get_device_count",
    "get_version",
    "ops",
    "plan",
    "profile",
    "set_current_device",
    "synchronize",
    "use_policy",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "AccuracyPolicy": "policies",
    "Artifact": "engines.artifact",
    "ArtifactPolicy": "policies",
    "Comparison": "inference",
    "Device": "runtime.device",
    "DeviceManager": "_core",
    "Event": "runtime.stream",
    "ExecutionPolicy": "policies",
    "Graph": "runtime.stream",
    "InferenceSession": "inference",
    "KernelPolicy": "policies",
    "Machine": "runtime.machine",
    "MemoryManager": "_core",
    "MemoryPolicy": "policies",
    "MemoryPool": "runtime.memory",
    "Plan": "planning",
    "Policy": "policies",
    "Profile": "evidence.profile",
    "Report": "evidence",
    "ReportComparison": "evidence",
    "Stream": "runtime.stream",
    "StreamManager": "_core",
    "Tensor": "runtime.tensor",
    "clear_decisions": "ops",
    "compare_engines": "inference",
    "compare_reports": "evidence",
    "compile_model": "inference",
    "decisions": "ops",
    "demo_images": "demo",
    "demo_model_path": "demo",
    "get_all_devices": "runtime.device",
    "get_current_device": "runtime.device",
    "get_device_count": "runtime.device",
    "plan": "inference",
    "profile": "inference",
    "set_current_device": "runtime.device",
    "synchronize": "runtime.device",
    "use_policy": "ops",
}


def get_version() -> str:
    """Return the version of this package."""
    return __version__


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("xpuruntime.ops")
    module = _LAZY.get(name)
    if module is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
