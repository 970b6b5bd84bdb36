# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The second chip of a process: a worker that the caller does not see, until it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from qnn_models import array, open_on

import xpuruntime as xrt
from xpuruntime.testing import models

pytest.importorskip("onnxruntime_qnn")

OTHER = "sm8350"


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.mlp(batch=4), tmp_path_factory.mktemp("qnn"))


@pytest.fixture
def first(mlp: Path) -> Iterator[xrt.InferenceSession]:
    """Hold this process to one chip, as another test may not have come first."""
    with open_on(mlp) as session:
        yield session


@pytest.fixture
def apart(mlp: Path, first: xrt.InferenceSession) -> Iterator[xrt.InferenceSession]:
    with open_on(mlp, OTHER) as session:
        yield session


def _pid(session: xrt.InferenceSession) -> int:
    worker = session._open().worker  # type: ignore[attr-defined]
    assert worker is not None
    return int(worker.pid)


def _forever(session: xrt.InferenceSession) -> None:
    while True:
        session.run({"x": array((4, 64))})


def _gone(pid: int) -> bool:
    """Whether a process is neither there nor a zombie."""
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_second_chip_has_the_numbers_of_a_process_of_its_own(
    mlp: Path, first: xrt.InferenceSession, apart: xrt.InferenceSession
) -> None:
    x = array((4, 64))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from qnn_models import array, open_on\n"
        "session = open_on(sys.argv[2], sys.argv[3])\n"
        "assert session._open().worker is None\n"
        "sys.stderr.write(session.run({'x': array((4, 64))})['y'].tobytes().hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(mlp), OTHER],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    before = first.run({"x": x})["y"]
    assert apart.run({"x": x})["y"].tobytes().hex() == done.stderr
    assert first._open().worker is None  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first.run({"x": x})["y"], before)
    assert not np.array_equal(before, apart.run({"x": x})["y"])


def test_the_caller_is_told_that_there_is_another_process(apart: xrt.InferenceSession) -> None:
    report = apart.explain(runs=1)
    assert any("process of its own" in conversion.what for conversion in report.conversions)
    observed = {observation.key: observation.observed for observation in report.observations}
    assert observed["execution.provider_options.qnn.soc"] == "soc_model=30, htp_arch=68"


def test_binding_over_there(apart: xrt.InferenceSession) -> None:
    x = array((4, 64))
    binding = apart.bind({"x": x})
    address = binding.outputs["y"].ctypes.data
    for seed in (1, 2):
        binding.inputs["x"][...] = array((4, 64), seed)
        binding.run()
        np.testing.assert_array_equal(binding.outputs["y"], apart.run({"x": array((4, 64), seed)})["y"])
    assert binding.outputs["y"].ctypes.data == address


@pytest.mark.parametrize("stated", ["rows", 4, None], ids=["open", "stated", "unknown rank"])
def test_binding_over_there_an_output_of_open_size(
    stated: str | int | None, tmp_path: Path, first: xrt.InferenceSession
) -> None:
    model = models.mlp(batch=4)
    shape = model.graph.output[0].type.tensor_type.shape
    if stated is None:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    elif isinstance(stated, str):
        shape.dim[0].dim_param = stated
    with open_on(models.save(model, tmp_path), OTHER) as session:
        assert _pid(session)
        binding = session.bind({"x": array((4, 64))})
        mine = np.zeros((4, 64), np.float32)
        own = session.bind({"x": array((4, 64))}, {"y": mine})
        for seed in (1, 2):
            x = array((4, 64), seed)
            want = session.run({"x": x})["y"]
            binding.inputs["x"][...] = own.inputs["x"][...] = x
            binding.run()
            own.run()
            np.testing.assert_array_equal(binding.outputs["y"], want)
            np.testing.assert_array_equal(mine, want)


def test_large_arrays_go_over_whole(tmp_path: Path, first: xrt.InferenceSession) -> None:
    """More than a pipe holds, in both directions."""
    path = models.save(models.identity("float32"), tmp_path)
    x = array((300_000, 3))
    with open_on(path, OTHER, shapes={"x": [300_000, 3]}) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], x)


def test_killed_between_runs(mlp: Path, first: xrt.InferenceSession) -> None:
    session = open_on(mlp, OTHER)
    pid = _pid(session)
    os.kill(pid, signal.SIGKILL)
    x = array((4, 64))
    with pytest.raises(xrt.EngineError, match=rf"worker process {pid} .*by SIGKILL.*open a new one"):
        session.run({"x": x})
    with pytest.raises(xrt.EngineError, match="runs no more"):
        session.run({"x": x})
    assert _gone(pid)
    session.close()
    session.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        session.run({"x": x})
    first.run({"x": x})


def test_close_ends_the_process(mlp: Path, first: xrt.InferenceSession) -> None:
    session = open_on(mlp, OTHER)
    pid = _pid(session)
    assert Path(f"/proc/{pid}").exists()
    session.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_end_of_the_program_ends_the_process(mlp: Path, tmp_path: Path) -> None:
    """Also when the program is killed: the worker's input ends."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from qnn_models import open_on\n"
        "one, two = open_on(sys.argv[2]), open_on(sys.argv[2], 'sm8350')\n"
        "sys.stderr.write(str(two._open().worker.pid) + '\\n'); sys.stderr.flush()\n"
        "time.sleep(60 if sys.argv[3] == 'killed' else 0)\n"
    )
    for how in ("ends", "killed"):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(mlp), how],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            pid = int(process.stderr.readline())
            if how == "killed":
                process.kill()
            process.wait(60)
        assert _gone(pid), how


def test_ctrl_c_ends_the_process_with_a_clear_error(mlp: Path, first: xrt.InferenceSession) -> None:
    session, x = open_on(mlp, OTHER), array((4, 64))
    before = session.run({"x": x})["y"]
    pid = _pid(session)
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        _forever(session)
    timer.join()
    if not Path(f"/proc/{pid}").exists():  # it came within a call
        with pytest.raises(xrt.EngineError, match=r"was interrupted\. This session runs no more; open a new one"):
            session.run({"x": x})
        session.close()
        session = open_on(mlp, OTHER)
    np.testing.assert_array_equal(session.run({"x": x})["y"], before)
    session.close()


def test_ctrl_c_of_a_terminal_does_not_reach_it(apart: xrt.InferenceSession) -> None:
    """A terminal signals its foreground process group, and the worker is in another session."""
    assert os.getsid(_pid(apart)) != os.getsid(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_hang(apart: xrt.InferenceSession) -> None:
    x = array((4, 64))
    apart.run({"x": x})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            apart.run({"x": x})
        except xrt.EngineError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    apart.run({"x": x})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("what", ["run", "run_async", "bound", "explain", "opened there"])
def test_a_forked_child_of_the_process_that_holds_qnn(what: str, mlp: Path, first: xrt.InferenceSession) -> None:
    """QNN's threads are in the parent: what the child inherited is refused, and what it opens is in a worker."""
    x = array((4, 64))
    expected = first.run({"x": x})["y"]
    binding = first.bind({"x": x})

    def opened() -> None:
        with open_on(mlp) as session:
            assert np.array_equal(session.run({"x": x})["y"], expected)

    calls = {
        "run": lambda: first.run({"x": x}),
        "run_async": lambda: first.run_async({"x": x}).result(),
        "bound": lambda: binding.run(),
        "explain": lambda: first.explain({"x": x}, runs=1),
        "opened there": opened,
    }
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 1
        try:
            calls[what]()
            code = 3
        except xrt.EngineError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (3 if what == "opened there" else 0)
    assert np.array_equal(first.run({"x": x})["y"], expected)


def test_a_python_that_does_not_start(mlp: Path, first: xrt.InferenceSession, monkeypatch: pytest.MonkeyPatch) -> None:
    for python, reason in (("/bin/false", "exit status 1"), ("/nowhere/python", "not an executable"), ("", "its own")):
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(xrt.EngineError, match=reason):
            open_on(mlp, OTHER)
