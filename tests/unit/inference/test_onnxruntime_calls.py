# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls as ONNX Runtime's own session takes them are refused with what says the same, and outputs can be chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError

ort = pytest.importorskip("onnxruntime")

FEEDS = {"image": np.zeros((1, 1, 8, 8), np.float32)}
ENGINES = ["onnxruntime", "openvino", "null"]


def opened(engine: str = "onnxruntime", model: str | Path | None = None) -> xrt.InferenceSession:
    if engine != "null":
        pytest.importorskip(engine)
    return xrt.InferenceSession(model or xrt.demo_model_path(), device="cpu", engine=engine)


@pytest.fixture(scope="module", params=ENGINES)
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with opened(request.param) as session:
        session.run(FEEDS)
        yield session


def fixed(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the fix that an error states."""
    _, found, fix = str(error.value).partition("Fix: ")
    assert found, error.value
    return fix


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"providers": ["CPUExecutionProvider"]}, 'InferenceSession(model, device="cpu", engine="onnxruntime")'),
        ({"providers": [("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]}, 'device="cuda:0"'),
        ({"providers": ["OpenVINOExecutionProvider"]}, 'engine="openvino"'),
        ({"providers": ["MoonExecutionProvider"]}, "device="),
        ({"providers": []}, "device="),
        ({"sess_options": ort.SessionOptions()}, "policy="),
        ({"provider_options": [{}]}, "policy="),
        ({"sess_options": None, "providers": None, "provider_options": None}, "policy="),
        ({"policy": ort.SessionOptions()}, "policy="),
    ],
)
def test_arguments_of_the_constructor(given: dict[str, Any], fix: str) -> None:
    with pytest.raises(InputError, match="of ONNX Runtime's session") as error:
        xrt.InferenceSession(xrt.demo_model_path(), **given)
    assert fix in fixed(error)


def test_arguments_of_its_session_in_their_order() -> None:
    with pytest.raises(InputError, match=r'providers= of ONNX Runtime.*device="cpu", engine="onnxruntime"'):
        xrt.InferenceSession(xrt.demo_model_path(), None, ["CPUExecutionProvider"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="provider_options=, providers="):
        xrt.InferenceSession(xrt.demo_model_path(), None, ["CPUExecutionProvider"], [{}])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({}, "give onnx.load(path), or the path itself."),
        ({"device": "cpu"}, "give onnx.load(path), or the path itself."),
        ({"path_or_bytes": "model.onnx"}, "InferenceSession(model)"),
        (
            {"path_or_bytes": b"", "providers": ["CPUExecutionProvider"]},
            'InferenceSession(model, device="cpu", engine="onnxruntime")',
        ),
    ],
)
def test_a_constructor_without_a_model(given: dict[str, Any], fix: str) -> None:
    with pytest.raises(xrt.XpuRuntimeError) as error:
        xrt.InferenceSession(**given)
    assert fixed(error) == fix


def test_an_argument_of_nobody_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="devise") as error:
        xrt.InferenceSession(xrt.demo_model_path(), devise="cpu")  # type: ignore[arg-type]
    assert fixed(error) == "InferenceSession(model, device=...)"


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda one: one.run(None, FEEDS), "session.run({name: array})"),
        (lambda one: one.run(["logits"], FEEDS), "session.run({name: array}, outputs=['logits'])"),
        (lambda one: one.run([], FEEDS), "session.run({name: array}"),
        (lambda one: one.run(None, FEEDS, None), "session.run({name: array})"),
        (lambda one: one.run(["logits"], FEEDS, ort.RunOptions()), "outputs=['logits']"),
        (lambda one: one.run(output_names=["logits"], input_feed=FEEDS), "outputs=['logits']"),
        (lambda one: one.run(None, input_feed=FEEDS), "session.run({name: array})"),
        (lambda one: one.run(), "session.run({name: array})"),
    ],
)
def test_the_order_of_its_run(session: Any, call: Callable[[Any], Any], fix: str) -> None:
    with pytest.raises(InputError) as error:
        call(session)
    assert fix in fixed(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.run_async(None, FEEDS),
        lambda one: one.run_async(["logits"], FEEDS, print, None),
        lambda one: one.run_async(FEEDS, print),
        lambda one: one.run_async(output_names=None, input_feed=FEEDS, callback=print, user_data=None),
        lambda one: one.run_async(FEEDS, callback=print),
        lambda one: one.run_async(),
    ],
)
def test_the_order_of_its_run_async(session: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="ONNX Runtime's own run_async has it") as error:
        call(session)
    assert re.match(
        r"future = session\.run_async\(\{name: array\}(, outputs=\['logits'\])?\), then future\.result\(\)",
        fixed(error),
    )


def test_a_misspelt_argument_of_run(session: Any) -> None:
    with pytest.raises(TypeError, match="output") as error:
        session.run(FEEDS, output=["logits"])
    assert fixed(error) == "outputs="
    with pytest.raises(TypeError, match="time_out") as error:
        session.run_async(FEEDS, time_out=1)
    assert fixed(error) == "timeout="
    with pytest.raises(TypeError, match="output") as error:
        session.run_async(FEEDS, output=["logits"])
    assert fixed(error) == "outputs="


@pytest.mark.parametrize("name", [name for name in dir(ort.InferenceSession) if not name.startswith("_")])
def test_its_methods_are_here_or_name_what_is(session: Any, name: str) -> None:
    if hasattr(type(session), name):
        return
    assert not hasattr(session, name)
    with pytest.raises(AttributeError, match=name) as error:
        getattr(session, name)
    if name in ("get_inputs", "get_outputs", "get_providers", "io_binding", "run_with_iobinding", "get_modelmeta"):
        for word in fixed(error).replace(",", " ").split():
            if word.startswith("session.") and "(" not in word:
                assert eval(word.rstrip(";."), {"session": session}) is not None


@pytest.mark.parametrize(
    "name", ["GraphOptimizationLevel", "ExecutionMode", "get_all_providers", "get_available_providers", "get_device"]
)
def test_names_of_its_package_say_what_works_here(name: str) -> None:
    assert hasattr(ort, name)
    with pytest.raises(AttributeError, match=f"module 'xpuruntime' has no attribute '{name}'") as error:
        getattr(xrt, name)
    code = fixed(error).removeprefix("use ").partition(", or ")[0]
    assert eval(code, {"xpuruntime": xrt})


def two_outputs(tmp_path: Path) -> Path:
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Add", ["x", "x"], ["sum"]),
            onnx.helper.make_node("Gather", ["x", "index"], ["row"]),
        ],
        "two",
        [value("x", onnx.TensorProto.FLOAT, [4]), value("index", onnx.TensorProto.INT64, [1])],
        [value("sum", onnx.TensorProto.FLOAT, [4]), value("row", onnx.TensorProto.FLOAT, [1])],
    )
    path = tmp_path / "two.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_a_choice_of_outputs(engine: str, tmp_path: Path) -> None:
    feeds = {"x": np.arange(4, dtype=np.float32), "index": np.array([2])}
    with opened(engine, two_outputs(tmp_path)) as session:
        everything = session.run(feeds)
        for chosen in (["row"], ["row", "sum"], ("sum",), ["sum", "sum"]):
            for _ in range(2):
                outputs = session.run(feeds, outputs=chosen)
                assert list(outputs) == list(dict.fromkeys(chosen))
                later = session.run_async(feeds, outputs=chosen).result()
                assert list(later) == list(outputs)
                for name, array in outputs.items():
                    np.testing.assert_array_equal(array, everything[name])
                    np.testing.assert_array_equal(later[name], everything[name])
        for wrong, text in ((["moon"], "no output 'moon'"), ("sum", "a list of names"), ([], "a list of names")):
            with pytest.raises(InputError, match=text):
                session.run(feeds, outputs=wrong)
            with pytest.raises(InputError, match=text):
                session.run_async(feeds, outputs=wrong)
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        session.run(feeds, outputs=["sum"])


def test_a_choice_of_outputs_of_a_module() -> None:
    torch = pytest.importorskip("torch")

    class Two(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> tuple[Any, Any]:
            return x + x, x * x

    x = torch.arange(4.0)
    with xrt.InferenceSession(Two().eval(), device="cpu", example_inputs=(x,)) as session:
        first, second = (output.name for output in session.outputs)
        name = session.inputs[0].name
        for _ in range(2):
            outputs = session.run({name: x}, outputs=[second])
            assert list(outputs) == [second]
            assert torch.equal(outputs[second], x * x)
        assert list(session.run({name: x})) == [first, second]
        with pytest.raises(InputError, match="ONNX Runtime's own run"):
            session.run(None, {name: x})  # type: ignore[arg-type]
