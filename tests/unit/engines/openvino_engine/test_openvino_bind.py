# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions on OpenVINO: bound buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from openvino_sessions import VALUE, model, open_, x_of

import xpuruntime as xrt
from xpuruntime.testing import models

pytest.importorskip("openvino")


class TestBinding:
    def test_own_buffers_of_a_fixed_model(self, tmp_path: Path) -> None:
        path = models.save(models.mlp(batch=4), tmp_path)
        x, y = x_of(0, 4, 64), np.zeros((4, 64), np.float32)
        with open_(path) as session:
            binding = session.bind({"x": x}, {"y": y})
            assert binding.outputs["y"] is y
            binding.run()
            np.testing.assert_array_equal(y, session.run({"x": x})["y"])
            x *= 3
            binding.run()
            np.testing.assert_array_equal(y, session.run({"x": x})["y"])

    @pytest.mark.parametrize("rows", [4, 700])
    def test_own_buffers_of_a_dynamic_model(self, mlp: Path, rows: int) -> None:
        x, y = x_of(0, rows, 64), np.zeros((rows, 64), np.float32)
        with open_(mlp) as session:
            binding = session.bind({"x": x}, {"y": y})
            binding.run()
            np.testing.assert_array_equal(y, session.run({"x": x})["y"])
            other = session.bind({"x": x})
            address = other.outputs["y"].ctypes.data
            other.run()
            other.run()
            np.testing.assert_array_equal(other.outputs["y"], y)
            assert other.outputs["y"].ctypes.data == address

    def test_an_output_whose_shape_depends_on_values(self, tmp_path: Path) -> None:
        """OpenVINO would write past the end of a buffer that is too small; so it is never given one."""
        node = helper.make_node("NonZero", ["x"], ["y"], name="n")
        path = models.save(
            model([node], [VALUE("x", TensorProto.FLOAT, [2, 300])], [VALUE("y", TensorProto.INT64, [2, "K"])]),
            tmp_path,
        )
        with open_(path) as session:
            for count in (0, 5, 600, 2):
                x = np.zeros((2, 300), np.float32)
                x.flat[:count] = 1
                np.testing.assert_array_equal(session.run({"x": x})["y"], np.stack(np.nonzero(x)))
            binding = session.bind()
            with pytest.raises(xrt.InputError, match=r"the engine makes output 'y' in each run"):
                binding.outputs["y"]
            kept = []
            for count in (5, 600, 0, 2):
                x.flat[:] = 0
                x.flat[:count] = 1
                binding.inputs["x"][...] = x
                binding.run()
                kept.append((binding.outputs["y"], np.stack(np.nonzero(x))))
                for got, want in kept:
                    np.testing.assert_array_equal(got, want)
            given = session.bind({"x": x}, {"y": np.zeros((2, 2), np.int64)})
            given.run()
            given.inputs["x"][...] = 1
            with pytest.raises(xrt.InputError, match=r"output 'y' changed its shape from \[2, 2\] to \[2, 600\]"):
                given.run()

    @pytest.mark.parametrize(
        ("outputs", "message"),
        [
            ({"y": np.zeros((4, 63), np.float32)}, r"got float32 \[4, 63\]"),
            ({"y": np.zeros((4, 64), np.float64)}, "got float64"),
            ({"y": np.zeros((64, 4), np.float32).T}, "C-contiguous"),
            ({"y": [1.0]}, "given as a list"),
        ],
    )
    def test_wrong_buffers(self, mlp: Path, outputs: dict[str, Any], message: str) -> None:
        with open_(mlp) as session, pytest.raises(xrt.InputError, match=message):
            session.bind({"x": x_of(0, 4, 64)}, outputs)

    def test_a_stream_is_refused(self, mlp: Path) -> None:
        with open_(mlp) as session:
            for call in (lambda: session.run({"x": x_of(0, 1, 64)}, stream=1), lambda: session.bind(stream=1)):
                with pytest.raises(xrt.InputError, match="stream= is for CUDA"):
                    call()
