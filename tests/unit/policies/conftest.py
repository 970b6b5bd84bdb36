# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A policy in which nothing is at its default."""

from __future__ import annotations

import pytest

from xpuruntime.policies import (
    AccuracyPolicy,
    ArtifactPolicy,
    CalibrationPolicy,
    ExecutionPolicy,
    KernelPolicy,
    KernelRule,
    MemoryPolicy,
    Policy,
    RuleMatch,
    VerifyPolicy,
    WeightsPolicy,
)


@pytest.fixture
def full_policy() -> Policy:
    return Policy(
        mode="strict",
        execution=ExecutionPolicy(
            engine=["tensorrt", "onnxruntime"],
            device="cuda:0",
            precision="fp16",
            fallback=["onnxruntime@cuda:0", "onnxruntime@cpu"],
            allow_cpu_ops=["Shape"],
            static_shape=True,
            shapes={"image": [1, 3, 224, 224], "scale": []},
            cuda_graph="prefer",
            memory=MemoryPolicy(pool="caching", limit="8GiB"),
            artifacts=ArtifactPolicy(cache="/data/cache", stale="rebuild"),
            determinism="run_to_run",
            tf32=False,
            weights=WeightsPolicy(storage="int4", compute="float", group=32, exclude=["lm_head"]),
            layout="nhwc",
            threads=4,
            provider_options={"onnxruntime": {"use_tf32": "off", "x": 1, "y": 1.5, "z": True}},
        ),
        kernels=KernelPolicy(
            matmul="cublasLt",
            attention=["cudnn", "flash_v2"],
            layer_norm="cuda_raw",
            rms_norm="torch",
            conv=["cudnn_heuristic", "auto"],
            rules=[
                KernelRule(match=RuleMatch(op="matmul", m="<=16", dtype="bf16"), use="cuda_raw.skinny"),
                KernelRule(match=RuleMatch(node="layers.*.ln_1"), use="torch", precision="fp32"),
            ],
            auto_strategy="best_performance",
            tuning={"min_effect": "5%", "confidence": 0.95, "budget": "500ms"},
        ),
        accuracy=AccuracyPolicy(reference="onnxruntime.cpu.model", rtol=1e-2, atol=1e-3, cosine=0.999),
        calibration=CalibrationPolicy(path="/data/calibration.npz", digest=f"sha256:{'0f' * 32}", samples=64),
        verify=VerifyPolicy(
            evidence={"require": ["engine", "placement"], "allow": "kernels.*"},
            determinism="restart",
            metrics={"top1": 0.98},
            speed={
                "metric": ["latency.p50", "latency.p99"],
                "max_slowdown": "3%",
                "control": "anchor",
                "confidence": 0.95,
                "budget": "90s",
                "inconclusive": "warn",
            },
            memory={"max_growth": "20%", "max_peak": "2GiB"},
            start="20s",
        ),
    )
