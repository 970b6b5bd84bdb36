# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The ONNX package's own node tests of what is rewritten: whatever the policy asks for, the results stay right."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
import sampled
from rewriting_models import ALL

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("matmul_", "gemm", "conv_", "basic_conv", "layer_norm", "rms_norm", "attention", "gelu", "swish", "softmax")
#: Cases that must be rewritten, so that the others are not right for want of rewriting.
REWRITTEN = (
    "test_matmul_2d",
    "test_matmul_4d",
    "test_gemm_default_no_bias",
    "test_basic_conv_with_padding",
    "test_conv_with_strides_padding",
    "test_rms_normalization_2d_axis1",
    "test_attention_4d",
    "test_attention_4d_causal",
    "test_attention_4d_attn_mask",
    "test_attention_3d_gqa",
)
#: One in so many of the others.
SHARE = 1 if sampled.ALL else 8


@functools.cache
def cases() -> dict[str, Any]:
    """Return the cases that are about what is rewritten, with the expansions of functions into their nodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        everything = collect_testcases(None)
    about = {one.name: one for one in everything if any(one.name.startswith(f"test_{word}") for word in WORDS)}
    return {name: about[name] for name in sorted({*REWRITTEN, *list(about)[::SHARE]})}


def run_raw(path: Path, inputs: list[Any]) -> list[Any]:
    raw = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results: list[Any] = raw.run(
        None, {value.name: array for value, array in zip(raw.get_inputs(), inputs, strict=False)}
    )
    return results


def run(path: Path, inputs: list[Any], kernels: dict[str, Any]) -> tuple[list[Any], Any]:
    policy = {"mode": "prefer", "kernels": kernels}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
        session = xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy)
    with session:
        names = [value.name for value in session.inputs]
        results = session.run(dict(zip(names, inputs, strict=False)))
        return [results[value.name] for value in session.outputs], session.plan.settings["rewrites"]


def alike(got: Any, want: Any, tolerance: float) -> bool:
    return np.allclose(np.float64(got), np.float64(want), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow
def test_no_case_that_onnxruntime_passes_fails_with_rewrites(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    kernels = {**ALL, "matmul": "cpu", "conv": "cpu"}
    wrong, rewritten, passed = [], set(), 0
    for name, case in cases().items():
        path.write_bytes(case.model.SerializeToString())
        for inputs, outputs in case.data_sets:
            try:
                plain = run_raw(path, inputs)
                exact = all(alike(a, b, 2e-2) for a, b in zip(plain, outputs, strict=True))
            except Exception:
                continue  # ONNX Runtime itself does not run it, or its arrays are of types that NumPy has not
            if not exact:
                continue
            passed += 1
            try:
                ours, rewrites = run(path, inputs, kernels)
            except xrt.XpuRuntimeError as error:
                wrong.append(f"{name}: {error}")
                continue
            if rewrites:
                rewritten.add(name)
            tolerance = 2e-2 if any(getattr(o, "dtype", None) == np.float16 for o in outputs) else 1e-3
            if not all(alike(a, b, tolerance) and a.dtype == b.dtype for a, b in zip(ours, plain, strict=True)):
                wrong.append(f"{name}: other numbers")
    assert not wrong, f"{len(wrong)} of {passed}:\n" + "\n".join(wrong)
    assert passed > 200 // SHARE
    assert set(REWRITTEN) <= rewritten, sorted(set(REWRITTEN) - rewritten)
    assert len(rewritten) > 80 // SHARE
