# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The engine suite on the HTP simulator, as one chip and with sizes stated: QNN takes neither otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.testing import EngineSuite

pytest.importorskip("onnxruntime_qnn")

_FIXED = "sizes are fixed when a graph is compiled: "


class TestQnn(EngineSuite):
    engine = "qnn"
    device = "npu"
    # HTP takes int8 and uint8 as quantized numbers only.
    dtypes = ("float32", "float16", "int32", "int64", "bool")
    # fp16 arithmetic, ten bits after the point.
    rtol = 1e-2
    atol = 5e-3
    unsupported: ClassVar[dict[str, str]] = {
        "shapes_and_types": f"{_FIXED}one session has one batch",
        "two_inputs_share_a_symbol": f"{_FIXED}no dimension is a symbol any more",
        "bind": f"{_FIXED}bind() needs no shapes; tests/unit/engines/qnn_engine binds",
    }

    def open(self, path: Path, **options: Any) -> xrt.InferenceSession:
        given = dict(options.pop("policy", {}))
        execution = {"provider_options": {"qnn": {"soc": "sm8650"}}, "shapes": _shapes(path)}
        policy = {**given, "execution": {**execution, **given.get("execution", {})}}
        if options.get("precision") != "fp32":
            return super().open(path, policy=policy, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*HTP has no fp32", xrt.XpuRuntimeWarning)
            return super().open(path, policy=policy, **options)

    def test_probe_and_plan(self, mlp: Path) -> None:
        facts = self.registry().get(self.engine).probe()
        assert facts.version is not None
        assert facts.loadable
        policy = {"execution": {"provider_options": {"qnn": {"soc": "sm8650"}}, "shapes": _shapes(mlp)}}
        plan = xrt.plan(mlp, device=self.device, engine=self.engine, policy=policy)
        assert (plan.engine, plan.device) == (self.engine, self.device)
        assert plan.accepted.reason

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({"xx": np.ones((4, 64), np.float32)}, r"no input 'xx'; did you mean 'x'\?"),
            ({}, r"input 'x' is missing"),
            ({"x": np.ones((4, 64))}, r"dtype float64, the model expects float32"),
            ({"x": np.ones((4, 64), ">f4")}, r"float32"),
            ({"x": np.ones(64, np.float32)}, r"rank 1 \(shape \[64\]\), the model expects rank 2"),
            ({"x": np.ones((4, 63), np.float32)}, r"shape \[4, 63\], the model expects \[4, 64\]"),
            ({"x": np.ones((1, 64), np.float32)}, r"execution\.shapes states that axis 0 is 4, got 1"),
            ({"x": [[1.0] * 64]}, r"is a list, not an array"),
            ({"x": None}, r"is a NoneType, not an array"),
        ],
    )
    def test_bad_inputs_are_refused(self, mlp: Path, feeds: dict[str, Any], message: str) -> None:
        """As in the suite, with the sizes of the policy."""
        super().test_bad_inputs_are_refused(mlp, feeds, message)


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return sizes for the open dimensions of the suite's models, as its checks use them."""
    shapes = {}
    for tensor in inspect_model(path).inputs:
        if tensor.shape is not None and not all(isinstance(size, int) for size in tensor.shape):
            rows = 4 if tensor.shape[-1] == 64 else 2
            shapes[tensor.name] = [size if isinstance(size, int) else rows for size in tensor.shape]
    return shapes
