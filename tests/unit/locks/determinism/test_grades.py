# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Determinism grades on the real engines: each planted violation is caught at its grade and at its node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError
from xpuruntime.locks.determinism import session_determinism
from xpuruntime.testing import models

torch = pytest.importorskip("torch")

import planted  # noqa: E402 - it needs PyTorch

if TYPE_CHECKING:
    from xpuruntime.evidence.determinism import DeterminismTests

ROOT = Path(__file__).resolve().parents[4]
GRADES = ("run_to_run", "concurrency", "restart", "batch_position", "batch_invariant")
TRIALS = 6


def graded(path: Any, engine: str, grade: str | None = None, **more: Any) -> DeterminismTests:
    device = "npu" if engine == "qnn" else "cpu"
    return xrt.determinism(path, grade, engine=engine, device=device, trials=TRIALS, **{"processes": 1, **more})


def saved(folder: Path, model: onnx.ModelProto) -> str:
    onnx.save(model, folder / "model.onnx")
    return str(folder / "model.onnx")


def program(folder: Path, module: torch.nn.Module) -> str:
    torch.export.save(planted.exported(module), folder / "model.pt2")
    return str(folder / "model.pt2")


def verdicts(found: DeterminismTests) -> dict[str, str]:
    """Return grade to verdict."""
    return {test.grade: test.verdict for test in found.tests}


def check_failed(found: DeterminismTests, grade: str, unit: str) -> None:
    """The grade fails at the unit, all below it pass, and none above it is tested."""
    index = GRADES.index(grade)
    told = verdicts(found)
    assert [told[grade] for grade in GRADES[:index]] == ["passed"] * index, str(found)
    assert told[grade] == "failed", str(found)
    assert {verdict for one, verdict in told.items() if GRADES.index(one) > index} <= {"not_tested"}
    first = found.tests[index].first_difference
    assert first is not None
    assert first.unit == unit, str(found)
    assert found.observed == ("none" if index == 0 else GRADES[index - 1])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_noise_fails_run_to_run_at_its_node(engine: str, tmp_path: Path) -> None:
    found = graded(saved(tmp_path, planted.noisy()), engine)
    check_failed(found, "run_to_run", "noise")
    assert found.requested == "none"
    assert found.reached


def test_a_kernel_that_changes_a_bit_now_and_then(tmp_path: Path) -> None:
    found = graded(program(tmp_path, planted.Planted("run_counter")), "torch", trust=True)
    check_failed(found, "run_to_run", "run_counter")
    first = found.tests[0].first_difference
    assert first is not None
    assert first.ulp_max == 1


def test_a_kernel_that_shares_its_scratch_memory_fails_concurrency(tmp_path: Path) -> None:
    found = graded(program(tmp_path, planted.Planted("in_flight")), "torch", trust=True)
    check_failed(found, "concurrency", "in_flight")


@pytest.mark.usefixtures("planted_everywhere")
def test_a_kernel_that_depends_on_the_process_fails_restart(tmp_path: Path) -> None:
    found = graded(program(tmp_path, planted.Planted("hash_seed")), "torch", "restart", trust=True)
    check_failed(found, "restart", "hash_seed")
    assert not found.reached


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_mean_over_the_batch_fails_batch_position(engine: str, tmp_path: Path) -> None:
    found = graded(saved(tmp_path, planted.centred()), engine)
    check_failed(found, "batch_position", "mean")
    first = found.tests[3].first_difference
    assert first is not None
    assert (first.tensor, "centre (Sub)" in first.note) == ("y", True)


@pytest.mark.usefixtures("planted_everywhere")
def test_a_kernel_that_treats_the_first_row_otherwise(tmp_path: Path) -> None:
    found = graded(program(tmp_path, planted.Planted("first_row")), "torch", trust=True)
    check_failed(found, "batch_position", "first_row")


def test_what_depends_on_the_size_of_the_batch_fails_batch_invariant_alone(tmp_path: Path) -> None:
    found = graded(saved(tmp_path, planted.by_size()), "onnxruntime")
    check_failed(found, "batch_invariant", "size")


def test_an_output_without_rows_is_never_passed(tmp_path: Path) -> None:
    found = graded(saved(tmp_path, planted.summed()), "onnxruntime", "batch_position", processes=3)
    assert verdicts(found)["batch_position"] == "not_applicable"
    assert "output total" in found.tests[3].reason
    assert (found.observed, found.reached) == ("restart", False)


def test_a_model_without_a_batch_dimension(tmp_path: Path) -> None:
    found = graded(saved(tmp_path, planted.model([], outputs=("h",), batch=1)), "onnxruntime")
    told = verdicts(found)
    assert (told["batch_position"], told["batch_invariant"]) == ("not_applicable", "not_applicable")
    assert "no batch dimension" in found.tests[3].reason
    assert found.observed == "restart"


def test_the_simulator_of_qnn(tmp_path: Path) -> None:
    policy = {"execution": {"provider_options": {"qnn": {"soc": "sm8650"}}, "precision": "fp16"}}
    found = graded(saved(tmp_path, planted.model([], outputs=("h",), batch=4)), "qnn", policy=policy)
    told = verdicts(found)
    assert [told[grade] for grade in GRADES[:4]] == ["passed"] * 4, str(found)
    assert told["batch_invariant"] == "not_applicable"
    assert "fixed at 4" in found.tests[4].reason


def test_a_module_cannot_be_restarted_and_the_grades_above_are_tested() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval()
    with xrt.InferenceSession(module, device="cpu", engine="torch", example_inputs=(torch.randn(4, 16),)) as session:
        found = session_determinism(session, trials=TRIALS)
    assert verdicts(found)["restart"] == "not_tested"
    assert "export it to a file" in found.tests[2].reason
    assert found.observed == "concurrency"


def rows_alone(run: Any, rows: np.ndarray[Any, Any], sizes: tuple[int, ...]) -> bool:
    """Whether an engine, called without this package, gives rows of batches the bits of the rows alone."""
    alone = np.concatenate([run(rows[i : i + 1]) for i in range(len(rows))])
    return all(run(rows[:size]).tobytes() == alone[:size].tobytes() for size in sizes)


@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_batch_invariance_is_what_onnxruntime_itself_shows(name: str, tmp_path: Path) -> None:
    path = str(models.save(models.mlp(96), tmp_path)) if name == "mlp" else str(ROOT / "tests/models/encoder.onnx")
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 96)).astype(np.float32) if name == "mlp" else rng.integers(0, 256, (8, 16))
    raw = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = raw.get_inputs()[0].name
    same = all(
        rows_alone(lambda x, name=output.name: raw.run([name], {feed: x})[0], rows, (2, 3, 8))
        for output in raw.get_outputs()
    )
    found = graded(path, "onnxruntime", inputs={feed: rows}, batch_sizes=(2, 3, 8))
    assert found.batch_sizes == (2, 3, 8)
    assert found.tests[3].verdict == "passed"
    assert (found.tests[4].verdict == "passed") is same, str(found)


def test_a_range_of_the_policy_bounds_the_sizes(tmp_path: Path) -> None:
    policy = {"execution": {"shapes": {"x": ["1..6", 64]}}}
    path = models.save(models.mlp(64), tmp_path)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime", policy=policy) as session:
        found = session_determinism(session, "run_to_run", trials=1)
        assert found.batch_sizes == (2, 3, 4, 6)
        with pytest.raises(InputError, match="batch size 8: the policy allows 1 to 6 for the dimension"):
            session_determinism(session, batch_sizes=(2, 8))
        with pytest.raises(InputError, match="no open dimension 'M'"):
            session_determinism(session, batch_dimension="M")
        with pytest.raises(InputError, match="'bitwise' is not a grade of determinism; the grades are run_to_run"):
            session_determinism(session, "bitwise")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="trials must be at least 1"):
            session_determinism(session, trials=0)


def test_the_grade_of_the_policy_is_asked_for(tmp_path: Path) -> None:
    policy = {"execution": {"determinism": "concurrency"}}
    with pytest.warns(xrt.XpuRuntimeWarning, match="concurrency is not promised"):
        found = graded(models.save(models.mlp(), tmp_path), "onnxruntime", policy=policy)
    assert (found.requested, list(verdicts(found))) == ("concurrency", ["run_to_run", "concurrency"])
    assert found.reached
