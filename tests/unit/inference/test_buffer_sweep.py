# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory of callers: no engine writes into inputs, and no result changes later, whatever shares memory in the model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from buffer_cases import CASES, LARGE, SMALL, BufferCase, save
from buffer_checks import check_bound, check_runs, layouts
from sampled import part

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

HOST = ("onnxruntime", "openvino")
NAMES = [case.name for case in CASES]
#: Of rising and falling sizes, empty ones among them.
ROWS = (SMALL, LARGE, LARGE, 0, 5, LARGE, SMALL)
#: Those that OpenVINO has one tensor for, or writes in place, and one of each other kind.
TELLING = ("input_is_output", "dropout", "sum_of_one", "views_of_views", "written_in_place", "two_inputs", "constants")
#: What an engine computes wrongly over nothing, and refuses therefore.
REFUSED_EMPTY = {("openvino", "flatten")}


def case_of(name: str) -> BufferCase:
    return next(case for case in CASES if case.name == name)


def opened(engine: str, model: Any, **options: Any) -> xrt.InferenceSession:
    if engine == "openvino":
        pytest.importorskip("openvino")
    return xrt.InferenceSession(model, engine=engine, device="cpu", **options)


@pytest.mark.parametrize("engine", HOST)
@pytest.mark.parametrize("name", sorted({*TELLING, *part(NAMES, 4)}))
def test_open_sizes(engine: str, name: str, tmp_path: Path) -> None:
    case = case_of(name)
    empty = (engine, name) not in REFUSED_EMPTY
    with opened(engine, save(case, tmp_path)) as session:
        results = check_runs(session.run, case, [rows for rows in ROWS if rows or empty])
        results += check_runs(lambda feeds: session.run_async(feeds).result(), case, (LARGE, SMALL, LARGE))
        if case.bindable:
            check_bound(session, case, LARGE)
            with nullcontext() if empty else pytest.raises(xrt.InputError, match="has no elements"):
                check_bound(session, case, 0)
    for got, want in results:
        for output, array in want.items():
            np.testing.assert_allclose(got[output], array, rtol=1e-5, atol=1e-6, err_msg=f"{output} after close")


@pytest.mark.parametrize("engine", HOST)
@pytest.mark.parametrize("name", part(TELLING, 3))
def test_fixed_sizes(engine: str, name: str, tmp_path: Path) -> None:
    case = case_of(name)
    for rows in (SMALL, LARGE):
        with opened(engine, save(case, tmp_path, rows)) as session:
            check_runs(session.run, case, (rows,) * 3)
            if case.bindable:
                check_bound(session, case, rows)


@pytest.mark.parametrize("engine", [*HOST, "null"])
@pytest.mark.parametrize("name", ["input_is_output", "two_inputs"])
@pytest.mark.parametrize("layout", layouts)
def test_layouts(engine: str, name: str, layout: str, tmp_path: Path) -> None:
    case = case_of(name)
    with opened(engine, save(case, tmp_path)) as session:
        check_runs(session.run, case, (SMALL, LARGE, LARGE), layout=layouts[layout], zeros=engine == "null")


@pytest.mark.parametrize("name", ["input_is_output", "only_identity", "scalars"])
def test_the_null_engine(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    with opened("null", save(case, tmp_path)) as session:
        check_runs(session.run, case, ROWS, zeros=True)
        check_bound(session, case, SMALL, zeros=True)


@pytest.mark.parametrize("engine", HOST)
@pytest.mark.parametrize("name", TELLING)
def test_tensors_of_torch(engine: str, name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = case_of(name)
    with opened(engine, save(case, tmp_path)) as session:

        def call(feeds: dict[str, Any]) -> dict[str, Any]:
            results = session.run({key: torch.from_numpy(array) for key, array in feeds.items()})
            assert all(isinstance(value, torch.Tensor) for value in results.values())
            return {key: value.numpy() for key, value in results.items()}

        check_runs(call, case, (SMALL, LARGE, LARGE))


@pytest.mark.parametrize("name", TELLING)
def test_a_compiled_artifact(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    case = case_of(name)
    folder = tmp_path / "model.xrt"
    xrt.compile_model(save(case, tmp_path), folder, engine="openvino", device="cpu")
    with xrt.InferenceSession(folder) as session:
        check_runs(session.run, case, (LARGE, SMALL, LARGE))
        check_bound(session, case, LARGE)


@pytest.mark.parametrize("name", ["input_is_output", "only_identity", "constants", "two_inputs", "branches"])
def test_qnn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_qnn")
    case = case_of(name)
    policy = {"execution": {"provider_options": {"qnn": {"soc": "sm8650"}}}}
    monkeypatch.setattr("buffer_checks.TOLERANCE", 1e-2)  # it computes in fp16
    with xrt.InferenceSession(save(case, tmp_path, SMALL), engine="qnn", device="npu", policy=policy) as session:
        check_runs(session.run, case, (SMALL, SMALL))
        check_bound(session, case, SMALL)


class TestOneArrayInTwoPlaces:
    @pytest.mark.parametrize("engine", HOST)
    @pytest.mark.parametrize("rows", [SMALL, LARGE])
    def test_in_two_inputs(self, engine: str, rows: int, tmp_path: Path) -> None:
        case = case_of("two_inputs")
        array = case.feeds(0, rows)["a"]
        kept = array.copy()
        with opened(engine, save(case, tmp_path)) as session:
            for _ in range(3):
                got = session.run({"a": array, "b": array})
                np.testing.assert_array_equal(got["y"], kept + kept)
                np.testing.assert_array_equal(got["z"], kept)
                np.testing.assert_array_equal(array, kept)
            binding = session.bind({"a": array, "b": array})
            binding.run()
            np.testing.assert_array_equal(binding.outputs["y"], kept + kept)
            np.testing.assert_array_equal(array, kept)

    @pytest.mark.parametrize("engine", HOST)
    @pytest.mark.parametrize("rows", [None, LARGE])
    @pytest.mark.parametrize("name", ["two_inputs", "written_in_place", "dropout", "inputs_swapped"])
    def test_in_an_input_and_an_output(self, engine: str, rows: int | None, name: str, tmp_path: Path) -> None:
        case = case_of(name)
        first = next(iter(case.inputs))
        arrays = case.feeds(0, LARGE)
        with opened(engine, save(case, tmp_path, rows)) as session:
            binding = session.bind(arrays, {"z": arrays[first]})
            for _ in range(2):
                want = {key: np.array(array) for key, array in case.compute(arrays).items()}
                binding.run()
                for key, array in want.items():
                    np.testing.assert_allclose(binding.outputs[key], array, rtol=1e-5, atol=1e-6, err_msg=key)
            assert any("copied after each bound run" in conversion.what for conversion in session._open().conversions())

    @pytest.mark.parametrize("engine", HOST)
    def test_under_a_strict_policy_the_buffer_is_refused(self, engine: str, tmp_path: Path) -> None:
        case = case_of("two_inputs")
        arrays = case.feeds(0, SMALL)
        with (
            opened(engine, save(case, tmp_path), policy={"mode": "strict"}) as session,
            pytest.raises(xrt.InputError, match="'z' shares memory with input 'a'"),
        ):
            session.bind(arrays, {"z": arrays["a"]})

    @pytest.mark.parametrize("engine", HOST)
    def test_in_two_outputs_is_refused(self, engine: str, tmp_path: Path) -> None:
        case = case_of("two_inputs")
        arrays = case.feeds(0, SMALL)
        with opened(engine, save(case, tmp_path)) as session:
            room = np.zeros_like(arrays["a"])
            with pytest.raises(xrt.InputError, match=r"share memory\. Fix: give each its own"):
                session.bind(arrays, {"y": room, "z": room})
            half = np.zeros((2 * SMALL, *room.shape[1:]), np.float32)
            binding = session.bind(arrays, {"y": half[:SMALL], "z": half[SMALL:]})
            binding.run()
            np.testing.assert_array_equal(half[SMALL:], arrays["a"])
