# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime: an execution control plane for AI accelerators.

A policy file says which engine, kernels, precision and memory run a model. The library plans it, runs it, and shows
what really ran::

    Policy (requested) -> Plan (resolved) -> run -> Report (observed)

Importing this package imports no vendor package and needs no GPU, driver or vendor library. `xpuruntime.__stability__`
says of each public name whether it is stable, provisional or experimental.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import (
    AccuracyError,
    CudaError,
    DeadlineError,
    EngineError,
    EngineFailed,
    EngineUnavailable,
    InputError,
    LockError,
    ModelError,
    OutOfMemoryError,
    PlanError,
    PolicyError,
    QueueFullError,
    UnsupportedOperationError,
    XpuRuntimeError,
    XpuRuntimeWarning,
)
from xpuruntime.lazy_names import import_msgspec as _import_msgspec
from xpuruntime.lazy_names import import_part as _import_part
from xpuruntime.lazy_names import load_name as _load_name

if TYPE_CHECKING:
    from xpuruntime import distributed as distributed
    from xpuruntime import engines as engines
    from xpuruntime import evidence as evidence
    from xpuruntime import generation as generation
    from xpuruntime import inference as inference
    from xpuruntime import integrations as integrations
    from xpuruntime import locks as locks
    from xpuruntime import ops
    from xpuruntime import planning as planning
    from xpuruntime import policies as policies
    from xpuruntime import pytorch as pytorch
    from xpuruntime import runtime as runtime
    from xpuruntime import serving as serving
    from xpuruntime import testing as testing
    from xpuruntime import training as training
    from xpuruntime import tuning as tuning
    from xpuruntime._core import DeviceManager as DeviceManager
    from xpuruntime._core import MemoryManager as MemoryManager
    from xpuruntime._core import StreamManager as StreamManager
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.demo import demo_images, demo_model_path
    from xpuruntime.evidence import Report, compare_reports
    from xpuruntime.evidence import ReportComparison as ReportComparison
    from xpuruntime.evidence.profile import Profile
    from xpuruntime.inference import (
        Comparison,
        InferenceSession,
        compare_engines,
        compare_generations,
        compile_model,
        plan,
        profile,
    )
    from xpuruntime.inference import (
        GenerationSession as GenerationSession,
    )
    from xpuruntime.inference import (
        SessionSpec as SessionSpec,
    )
    from xpuruntime.lockfile.canonical import load_lock
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.locks.determinism import determinism
    from xpuruntime.locks.diff.diffing import compare_environments
    from xpuruntime.locks.diff.result import Diff
    from xpuruntime.locks.export.exporting import export_lock
    from xpuruntime.locks.export.exporting import export_targets as export_targets
    from xpuruntime.locks.export.result import ExportResult as ExportResult
    from xpuruntime.locks.relock import LockResult as LockResult
    from xpuruntime.locks.relock import lock
    from xpuruntime.locks.verification.claims import Claim as Claim
    from xpuruntime.locks.verification.result import VerificationResult
    from xpuruntime.locks.verification.verify import verify
    from xpuruntime.measuring.tuning_watch import watch_tuning as watch_tuning
    from xpuruntime.ops import clear_decisions as clear_decisions
    from xpuruntime.ops import decisions as decisions
    from xpuruntime.ops import use_policy
    from xpuruntime.planning import Plan
    from xpuruntime.policies import (
        AccuracyPolicy,
        ArtifactPolicy,
        CalibrationPolicy,
        ExecutionPolicy,
        KernelPolicy,
        MemoryPolicy,
        Policy,
    )
    from xpuruntime.runtime.device import (
        Device as Device,
    )
    from xpuruntime.runtime.device import (
        get_all_devices as get_all_devices,
    )
    from xpuruntime.runtime.device import (
        get_current_device as get_current_device,
    )
    from xpuruntime.runtime.device import (
        get_device_count as get_device_count,
    )
    from xpuruntime.runtime.device import (
        set_current_device as set_current_device,
    )
    from xpuruntime.runtime.device import (
        synchronize as synchronize,
    )
    from xpuruntime.runtime.machine import Machine as Machine
    from xpuruntime.runtime.memory import MemoryPool as MemoryPool
    from xpuruntime.runtime.stream import Event as Event
    from xpuruntime.runtime.stream import Graph as Graph
    from xpuruntime.runtime.stream import Stream as Stream
    from xpuruntime.runtime.stream import Tensor as Tensor
    from xpuruntime.stability import __stability__ as __stability__
    from xpuruntime.tuning.spec.tune_spec import TuneSpec as TuneSpec
    from xpuruntime.tuning.tune import tune
    from xpuruntime.tuning.tune_result import TuneResult

_import_msgspec()

__version__ = "0.1.0"

__all__ = [
    "AccuracyError",
    "AccuracyPolicy",
    "Artifact",
    "ArtifactPolicy",
    "CalibrationPolicy",
    "Comparison",
    "CudaError",
    "DeadlineError",
    "Diff",
    "EngineError",
    "EngineFailed",
    "EngineUnavailable",
    "ExecutionPolicy",
    "InferenceSession",
    "InputError",
    "KernelPolicy",
    "Lock",
    "LockError",
    "MemoryPolicy",
    "ModelError",
    "OutOfMemoryError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "Profile",
    "QueueFullError",
    "Report",
    "TuneResult",
    "UnsupportedOperationError",
    "VerificationResult",
    "XpuRuntimeError",
    "XpuRuntimeWarning",
    "__version__",
    "compare_engines",
    "compare_environments",
    "compare_generations",
    "compare_reports",
    "compile_model",
    "demo_images",
    "demo_model_path",
    "determinism",
    "export_lock",
    "load_lock",
    "lock",
    "ops",
    "plan",
    "profile",
    "tune",
    "use_policy",
    "verify",
]

#: Name to the module that has it; loaded on first use. Those outside `__all__` are public in their packages, such as
#: `xpuruntime.runtime`, and can be imported from here too.
_LAZY = {
    "__stability__": "stability",
    "AccuracyPolicy": "policies",
    "Artifact": "artifacts.manifest",
    "ArtifactPolicy": "policies",
    "CalibrationPolicy": "policies",
    "Claim": "locks.verification.claims",
    "Comparison": "inference",
    "Device": "runtime.device",
    "DeviceManager": "_core",
    "Diff": "locks.diff.result",
    "Event": "runtime.stream",
    "ExecutionPolicy": "policies",
    "ExportResult": "locks.export.result",
    "GenerationSession": "inference",
    "Graph": "runtime.stream",
    "InferenceSession": "inference",
    "KernelPolicy": "policies",
    "Lock": "lockfile.records",
    "LockResult": "locks.relock",
    "Machine": "runtime.machine",
    "MemoryManager": "_core",
    "MemoryPolicy": "policies",
    "MemoryPool": "runtime.memory",
    "Plan": "planning",
    "Policy": "policies",
    "Profile": "evidence.profile",
    "Report": "evidence",
    "ReportComparison": "evidence",
    "SessionSpec": "inference",
    "Stream": "runtime.stream",
    "StreamManager": "_core",
    "Tensor": "runtime.stream",
    "TuneResult": "tuning.tune_result",
    "TuneSpec": "tuning.spec",
    "VerificationResult": "locks.verification.result",
    "clear_decisions": "ops",
    "compare_engines": "inference",
    "compare_generations": "inference",
    "compare_environments": "locks.diff.diffing",
    "compare_reports": "evidence",
    "compile_model": "inference",
    "decisions": "ops",
    "demo_images": "demo",
    "demo_model_path": "demo",
    "determinism": "locks.determinism",
    "export_lock": "locks.export.exporting",
    "export_targets": "locks.export.exporting",
    "get_all_devices": "runtime.device",
    "get_current_device": "runtime.device",
    "get_device_count": "runtime.device",
    "load_lock": "lockfile.canonical",
    "lock": "locks.relock",
    "plan": "inference",
    "profile": "inference",
    "set_current_device": "runtime.device",
    "synchronize": "runtime.device",
    "tune": "tuning.tune",
    "use_policy": "ops",
    "verify": "locks.verification.verify",
    "watch_tuning": "measuring.tuning_watch",
}

#: Packages that are imported when they are first used as attributes. `pytorch` and `training` require PyTorch.
_PACKAGES = frozenset((
    "distributed", "engines", "evidence", "generation", "inference", "integrations", "locks", "ops", "planning",
    "policies", "pytorch", "runtime", "serving", "testing", "training", "tuning",
))  # fmt: skip


def get_version() -> str:
    """Return the version of this package."""
    return __version__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return _import_part(f"{__name__}.{name}")
        return _load_name(__name__, name, _LAZY)


def __dir__() -> list[str]:
    packages = _PACKAGES if _has_torch() else _PACKAGES - {"pytorch", "training"}
    return sorted({*globals(), *__all__, *packages})


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ValueError:  # it is in sys.modules, and is no module
        return False
