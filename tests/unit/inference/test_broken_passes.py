# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The instrumented pass breaks for real: full disks, folders that cannot be written, processes and models that die."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from exported_models import exported

import xpuruntime as xrt
from xpuruntime.engines.null import NullEngine, NullModel
from xpuruntime.engines.registry import EngineRegistry

QNN = {
    "engine": "qnn",
    "device": "npu",
    "precision": "fp16",
    "shapes": {"image": [1, 3, 32, 32]},
    "provider_options": {"qnn": {"soc": "sm8650"}},
}
#: Open a session, take away room for files, and print the report: pipes are no files.
SCRIPT = """
import resource, sys, warnings
import xpuruntime as xrt
from xpuruntime.policies import Policy
model, policy, limit = sys.argv[1:]
warnings.simplefilter("ignore")
with xrt.InferenceSession(model, policy=Policy.loads(policy)) as session:
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.stdout.write(session.explain(runs=3).to_json())
"""


def needs(engine: str) -> None:
    module = {"openvino": "openvino", "qnn": "onnxruntime_qnn"}.get(engine)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"the engine {engine} is not installed")


def policy(engine: str) -> dict[str, Any]:
    return {"execution": QNN if engine == "qnn" else {"engine": engine, "device": "cpu"}}


def explained(folder: Path, engine: str, limit: int, *before: str) -> dict[str, Any]:
    """Return the report of a process whose files may have so many bytes; nothing is left in its temporary folder."""
    needs(engine)
    given = [*before, sys.executable, "-c", SCRIPT, str(exported("convnet")), json.dumps(policy(engine)), str(limit)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(given, capture_output=True, text=True, check=False, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not any(path.name.startswith("xpuruntime-") for path in folder.iterdir())
    report: dict[str, Any] = json.loads(done.stdout)
    with xrt.InferenceSession(exported("convnet"), device="cpu", engine="null") as session:
        names = Counter(node.name for node in session.model.nodes)
    if report["units"]:
        assert Counter(name for unit in report["units"] for name in unit["source_nodes"]) == names
    return report


@pytest.mark.parametrize("limit", [50, 10_000])
def test_onnx_runtime_without_room_for_its_files(tmp_path: Path, limit: int) -> None:
    report = explained(tmp_path, "onnxruntime", limit)
    assert report["partial"]
    assert report["headline"] in ("nothing observed", "policy honoured as far as observed")
    notes = "\n".join(report["notes"])
    assert "the optimized graph could not be written" in notes or "the optimized graph was written empty" in notes
    if limit < 10_000:
        assert "the profile is cut off" in notes
    assert report["latency"]["median_us"] > 0


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A file system of 16 KiB in a mount namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("needs the mount namespaces of Linux")
    mount = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=16k none "$TMPDIR" && exec "$0" "$@"')
    probe = subprocess.run(
        [*mount, "true"], check=False, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True
    )
    if probe.returncode:
        pytest.skip("this system does not allow mount namespaces")
    report = explained(tmp_path, "onnxruntime", 0, *mount)
    assert report["partial"]
    assert "optimized graph" in "\n".join(report["notes"])


def test_openvino_needs_no_room(tmp_path: Path) -> None:
    report = explained(tmp_path, "openvino", 50)
    assert (report["partial"], report["headline"]) == (False, "policy honoured")


@pytest.mark.slow
def test_qnn_without_room_for_its_records(tmp_path: Path) -> None:
    """Operations whose cycles are there ran on the chip, though no record joins them; nothing is compared with it."""
    report = explained(tmp_path, "qnn", 2000)
    assert report["partial"]
    assert [o["key"] for o in report["observations"] if o["status"] in ("substituted", "unsupported")] == []
    assert "missing or damaged" in "\n".join(report["notes"])
    timed = [unit for unit in report["units"] if unit["time"] is not None]
    assert {unit["device"] for unit in timed} == {"npu"}
    assert any(unit["source_nodes"] for unit in timed)


@pytest.mark.skipif(sys.platform != "linux", reason="/sys takes no folders, even of root")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "qnn", "null"])
def test_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    needs(engine)
    with xrt.InferenceSession(exported("convnet"), policy=policy(engine)) as session:
        monkeypatch.setattr(tempfile, "tempdir", "/sys")
        report = session.explain(runs=1)
    written = engine in ("onnxruntime", "qnn")
    assert report.partial is written
    assert report.deviations == ()
    assert any("Set TMPDIR to" in note and "/sys/xpuruntime-" in note for note in report.notes) is written
    if engine == "onnxruntime":
        assert {u.device for u in report.units} == {"cpu"}


@pytest.mark.torch
def test_a_model_that_dies_in_an_instrumented_run() -> None:
    torch = pytest.importorskip("torch")

    class Mortal(torch.nn.Module):
        left = 1_000

        def forward(self, x: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("the device fell off the bus")
            return torch.relu(x) + 1

    net = Mortal().eval()
    with xrt.InferenceSession(net, device="cpu", engine="torch", example_inputs=(torch.zeros(2, 3),)) as session:
        net.left = 3 + 4 + 1 + 2  # warming up, timed runs, the cold instrumented one, and two that are counted
        report = session.explain({"x": torch.zeros(2, 3)}, runs=4)
    assert report.partial
    assert any("instrumented run 3 of 4 failed: RuntimeError: the device fell off the bus" in n for n in report.notes)
    assert {u.time.runs for u in report.units if u.time} == {2}
    assert report.headline == "policy honoured as far as observed"


def test_a_qnn_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("qnn")
    from xpuruntime.engines.qnn.observing import records

    class Killed(records.SessionWorker):
        def run(self, *given: Any) -> Any:
            os.kill(self.pid, signal.SIGKILL)
            return super().run(*given)

    with xrt.InferenceSession(exported("convnet"), policy=policy("qnn")) as session:
        monkeypatch.setattr(records, "SessionWorker", Killed)
        report = session.explain(runs=1)
    assert (report.partial, report.headline, report.units) == (True, "nothing observed", ())
    assert report.notes[0].startswith("nothing was observed: ")
    assert report.latency is not None


class Breaking(NullModel):
    """Cannot be observed."""

    error: Exception = MemoryError("no room for the profile")

    def observe(self, feeds: Any, runs: int) -> Any:
        raise self.error


class BreakingEngine(NullEngine):
    def load(self, request: Any, judgement: Any, machine: Any) -> Any:
        return Breaking(request.model, strict=False)


def breaking() -> EngineRegistry:
    registry = EngineRegistry()
    registry.register(BreakingEngine())
    return registry


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("what\nis this"), xrt.CudaError("lost")])
def test_an_engine_that_raises_while_it_is_observed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Breaking, "error", error)
    registry = breaking()
    with xrt.InferenceSession(xrt.demo_model_path(), engine="null", registry=registry) as session:
        report = session.explain(runs=1)
    assert (report.partial, report.headline, report.honoured) == (True, "nothing observed", False)
    text = " ".join(str(error).split())
    assert report.notes[0] == f"the instrumented pass broke off: {type(error).__name__}: {text}"
    assert report.latency is not None


def test_wrong_inputs_and_interruptions_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = breaking()
    for error in (xrt.InputError("a second profiler"), KeyboardInterrupt()):
        monkeypatch.setattr(Breaking, "error", error)
        with (
            xrt.InferenceSession(xrt.demo_model_path(), engine="null", registry=registry) as session,
            pytest.raises(type(error)),
        ):
            session.explain(runs=1)
