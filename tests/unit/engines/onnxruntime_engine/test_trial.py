# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trial runs: every graph that is changed here goes through one, whose end decides, and is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import operator_patterns
import pytest

import xpuruntime as xrt
from xpuruntime.engines.onnxruntime import trial

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
#: Ways to change a graph: execution keys, kernel keys, whether a calibration is given.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fp16": ({"precision": "fp16"}, {}, False),
    "fp16 at level disable": (
        {"precision": "fp16", "provider_options": {"onnxruntime": {"graph_optimization_level": "disable"}}},
        {},
        False,
    ),
    "int8": ({"precision": "int8"}, {}, True),
    "kernels": ({}, {"matmul": "cpu.blas"}, False),
}
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the results of trials are kept; nothing was tried yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "_known", {})
    return tmp_path / "cache" / "xpuruntime" / "trials"


def open_changed(change: str, folder: Path) -> xrt.InferenceSession:
    execution, kernels, calibrated = CHANGES[change]
    name = "matmul_bias_relu"
    given = {"calibration": [operator_patterns.inputs_of(name, seed) for seed in range(3)]} if calibrated else {}
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu", **execution}, "kernels": kernels}
    return xrt.InferenceSession(operator_patterns.write(name, folder), policy=policy, **given)


def kept(trials: Path) -> list[str]:
    return [path.read_bytes()[:-32].decode() for path in trials.iterdir()] if trials.is_dir() else []


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_graph_is_tried_once(
    change: str, trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_changed(change, tmp_path).close()
    assert kept(trials) == [""]
    monkeypatch.setattr(trial, "_known", {})

    def again(asked: Any) -> str:
        raise AssertionError(asked)

    monkeypatch.setattr(trial, "_try", again)
    with open_changed(change, tmp_path) as session:
        session.explain(operator_patterns.inputs_of("matmul_bias_relu"), runs=1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_trial_that_is_killed_refuses_the_session(
    change: str, trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_WORK", KILLED)
    with pytest.raises(xrt.EngineError, match=r"ended by SIGSEGV.*Fix: "):
        open_changed(change, tmp_path)
    assert set(kept(trials)) == {"was ended by SIGSEGV"}


def test_a_level_that_kills_is_left_where_none_is_stated(
    trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_disabled = f'import json, sys\nif json.loads(sys.argv[1])["level"] != "ORT_DISABLE_ALL":\n {KILLED}'
    monkeypatch.setattr(trial, "_WORK", only_disabled.replace("\nos.kill", "\n os.kill"))
    with open_changed("int8", tmp_path) as session:
        report = session.explain(operator_patterns.inputs_of("matmul_bias_relu"), runs=1)
    assert any(conversion.what == "graph optimized at level disable" for conversion in report.conversions)
    assert "was ended by SIGSEGV" in kept(trials)


def test_a_run_that_is_killed_is_seen(trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = trial._WORK.replace("session.run(", "os.kill(os.getpid(), 11); session.run(")
    assert killed != trial._WORK
    monkeypatch.setattr(trial, "_WORK", killed)
    with pytest.raises(xrt.EngineError, match="ended by SIGSEGV"):
        open_changed("fp16", tmp_path)
    assert kept(trials)


def test_a_run_that_takes_long_is_given_up(trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_RUN_SECONDS", 0.1)
    monkeypatch.setattr(trial, "_WORK", trial._WORK.replace("session.run(", "threading.Event().wait(); session.run("))
    open_changed("fp16", tmp_path).close()
    assert kept(trials) == [""]


def test_a_graph_that_is_not_changed_is_not_tried(trials: Path, tmp_path: Path) -> None:
    path = operator_patterns.write("matmul", tmp_path)
    xrt.InferenceSession(path, engine="onnxruntime", device="cpu", precision="fp32").close()
    assert not kept(trials)
