# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Stability of each public name: how it may change in a later version."""

from __future__ import annotations

__all__ = ["LEVELS", "__stability__"]

LEVELS = {
    "stable": "changes only after a minor version in which it warns with `DeprecationWarning`",
    "provisional": "may change with a minor version; the changelog says how to change calls",
    "experimental": "may change or go with any version",
}
_NAMES = {
    "xpuruntime": {
        "stable": "AccuracyError AccuracyPolicy Artifact ArtifactPolicy CudaError DeadlineError EngineError "
        "EngineFailed EngineUnavailable ExecutionPolicy InferenceSession InputError KernelPolicy Lock "
        "LockError MemoryPolicy ModelError OutOfMemoryError Plan PlanError Policy PolicyError "
        "QueueFullError Report UnsupportedOperationError VerificationResult XpuRuntimeError "
        "XpuRuntimeWarning __version__ compile_model demo_images demo_model_path load_lock lock ops plan "
        "use_policy verify",
        "provisional": "CalibrationPolicy Comparison Diff Profile TuneResult compare_engines compare_environments "
        "compare_reports determinism export_lock profile tune",
        "experimental": "compare_generations",
    },
    "xpuruntime.distributed": {
        "provisional": "CollectiveChoice CollectivePolicy Communicator group init_from_env read_choices",
    },
    "xpuruntime.engines": {
        "stable": "EngineRegistry default_registry",
        "provisional": "Binding Engine Judgement LoadedModel Observed Request",
    },
    "xpuruntime.evidence": {
        "stable": "Control Difference Enforceability Observation Report Status Verdict",
        "provisional": "Boundary Conversion GraphBlocker GraphStatus InputCoverage KernelCandidate KernelDecision "
        "Latency LiveBytes MemorySample ReportComparison ShapeCoverage SourceNode Time Unit build_report "
        "compare_reports observations",
    },
    "xpuruntime.generation": {
        "experimental": "Gate GateReport LogprobSource SessionLogprobs check_gates read_texts",
    },
    "xpuruntime.inference": {
        "stable": "InferenceSession SessionSpec compile_model plan",
        "provisional": "Comparison compare_engines profile",
        "experimental": "Generation GenerationComparison GenerationSession compare_generations",
    },
    "xpuruntime.integrations": {"experimental": "accelerate lightning ray training transformers"},
    "xpuruntime.locks": {"provisional": "bisect_versions determinism diff export relock verification"},
    "xpuruntime.ops": {
        "stable": "attention clear_decisions conv2d current_policy decisions layer_norm matmul rms_norm use_policy",
        "provisional": "KernelInfo attention_backward conv2d_input_gradient conv2d_weight_gradient kernels "
        "layer_norm_backward rms_norm_backward",
    },
    "xpuruntime.planning": {
        "stable": "Plan",
        "provisional": "InputFacts ModelFacts PlanRequest Resolution decide plan_here possible_engines resolve",
    },
    "xpuruntime.policies": {
        "stable": "AccuracyPolicy ArtifactPolicy DeviceSpec ExecutionPolicy KernelPolicy KernelRule MemoryPolicy "
        "Policy RuleMatch SCHEMA policy_schema",
        "provisional": "CalibrationPolicy TuningPolicy VerifyEvidence VerifyMemory VerifyPolicy VerifySpeed "
        "WeightsPolicy",
        "experimental": "VerifyGeneration",
    },
    "xpuruntime.pytorch": {
        "stable": "Explanation autocast capture_graph clear_kernel_policy explain get_kernel_policy kernel_policy "
        "set_kernel_policy",
        "provisional": "CoverageGap Exported LayerParity Parity StepCandidate TunedStep allocator_stats coverage_gaps "
        "export lock memory_report parity profile register_flash_attention reset_allocator set_allocator "
        "tune",
        "experimental": "LinearWeights RankAgreement WeightTraffic capture_decode logprobs_of quantize",
    },
    "xpuruntime.pytorch.ops": {"stable": "fused_attention fused_layernorm fused_rms_norm"},
    "xpuruntime.runtime": {
        "stable": "Buffer Device Event Machine MemoryPool MemoryReport MemoryStats Stream Tensor get_all_devices "
        "get_current_device get_device_count load_machine machine_snapshot memory_report "
        "set_current_device synchronize",
        "provisional": "Graph profiled",
    },
    "xpuruntime.serving": {
        "provisional": "Access Models ServeSettings Server ServingError Status Tls TransportOptions asgi_app",
    },
    "xpuruntime.testing": {
        "provisional": "CompileSuite EngineSuite NumpyArrays OpSuite TorchArrays check_kernel op_cases",
    },
    "xpuruntime.tuning": {"provisional": "spec tune tune_result"},
}
#: Dotted name, or module with names, to its level; `xpuruntime.training` has the names of `xpuruntime.pytorch`.
__stability__ = {
    f"{package}.{name}": level
    for package, levels in _NAMES.items()
    for level, names in levels.items()
    for name in names.split()
}
