# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the tests of the command line share: a model, and a call that returns code, stdout and stderr."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from xpuruntime.cli.entry import run
from xpuruntime.demo import demo_model_path

if TYPE_CHECKING:
    from collections.abc import Callable


class Result(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Parse stdout, which must be one JSON value and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def xrt(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process; file descriptors are captured, so that libraries that print are seen too."""

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Result(int(code), out, err)

    return call


@pytest.fixture(scope="session")
def digits() -> str:
    return str(demo_model_path())


@pytest.fixture(scope="session")
def two_inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with two inputs, a symbolic size and two outputs: sum = a + b, count = a cast to int64."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [
            helper.make_node("Add", ["a", "b"], ["sum"], "add"),
            helper.make_node("Cast", ["a"], ["count"], "cast", to=TensorProto.INT64),
        ],
        "two",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 3]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, ["N", 3]),
        ],
        [
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["N", 3]),
            helper.make_tensor_value_info("count", TensorProto.INT64, ["N", 3]),
        ],
    )
    path = tmp_path_factory.mktemp("models") / "two.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)
