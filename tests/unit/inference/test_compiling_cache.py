# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The artifact cache: what makes another entry, damage, two builders at once, builders that are killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compile_tools import SlowEngine, edit_manifest, open_cached, policy_of

import xpuruntime as xrt
from xpuruntime.artifacts.store import artifact_cache, cache_key
from xpuruntime.engines.base import Recipe
from xpuruntime.inference.plan_request import plan_session
from xpuruntime.inference.session_arguments import SessionArguments
from xpuruntime.testing import models

MODEL = xrt.demo_model_path()
X = {"image": np.zeros((1, 1, 8, 8), np.float32)}
TOOL = Path(__file__).with_name("compile_tools.py")


@pytest.fixture
def engine(tmp_path: Path) -> SlowEngine:
    return SlowEngine(tmp_path / "log")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_the_first_session_compiles_and_later_ones_load(engine: SlowEngine, cache: Path) -> None:
    for _ in range(3):
        with open_cached(engine, MODEL, cache) as session:
            assert session.run(X)["logits"].shape == (1, 10)
    # Once to check what was made, then once for each session.
    assert engine.lines() == ["compile", "load artifact", *["load artifact"] * 3]
    (name,) = entries(cache)
    assert sorted(path.name for path in (cache / name).iterdir()) == ["manifest.json", "model.bin"]


def test_the_default_cache_is_that_of_the_user(
    engine: SlowEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path))
    policy = xrt.Policy.coerce(policy_of(Path("default")))
    assert policy.execution.artifacts.cache == "default"
    assert artifact_cache(policy) == tmp_path / "xpuruntime" / "artifacts"
    with xrt.InferenceSession(MODEL, policy=policy, registry=engine.registry()) as session:
        assert str(tmp_path / "xpuruntime" / "artifacts") in session.plan.notes[-1]


def test_without_the_key_nothing_is_kept(engine: SlowEngine, cache: Path) -> None:
    with xrt.InferenceSession(MODEL, engine="slow", device="cpu", registry=engine.registry()):
        pass
    assert engine.lines() == ["load model"]
    assert not cache.exists()


def test_an_engine_that_does_not_compile_says_so(cache: Path) -> None:
    policy: Any = {"execution": {"engine": "null", "device": "cpu", "artifacts": {"cache": str(cache)}}}
    with pytest.warns(xrt.XpuRuntimeWarning, match="null makes no compiled artifact"):
        session = xrt.InferenceSession(MODEL, policy=policy)
    session.close()
    assert not cache.exists()
    with pytest.raises(xrt.UnsupportedOperationError, match=r"execution\.artifacts\.cache"):
        xrt.plan(MODEL, policy={**policy, "mode": "strict"})


def key_of(engine: SlowEngine, model: Path, **execution: Any) -> str:
    policy = xrt.Policy.coerce(policy_of(Path("/cache"), **execution))
    session = plan_session(model, SessionArguments(policy=policy), engine.registry(), None)
    return cache_key(
        Recipe(engine, session.request.on(session.plan.device, policy), session.judgement, session.machine)
    )


def test_what_makes_another_entry(engine: SlowEngine, tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    key = key_of(engine, model)
    same = [
        key_of(engine, model, threads=1),
        key_of(engine, model, fallback=["slow@cpu"]),
        key_of(engine, model, artifacts={"stale": "rebuild"}),
        key_of(engine, model, provider_options={"openvino": {"NUM_STREAMS": 1}}),
        key_of(engine, models.save(models.mlp(), tmp_path, "copy.onnx")),
    ]
    assert set(same) == {key}
    others = [
        key_of(engine, MODEL),
        key_of(engine, models.save(models.mlp(seed=1), tmp_path, "other.onnx")),
        key_of(engine, model, shapes={"x": [4, 64]}),
        key_of(SlowEngine(tmp_path / "log", version="2"), model),
    ]
    assert len({key, *others}) == 5


DAMAGE = {
    "truncated": lambda f: (f / "model.bin").write_bytes(b"first half"),
    "manifest cut off": lambda f: (f / "manifest.json").write_bytes(b'{"schema": "xpur'),
    "another model": lambda f: edit_manifest(f, model_sha256="0" * 64),
    "another target": lambda f: edit_manifest(f, target={"slow": "0"}),
    "another engine": lambda f: edit_manifest(f, engine="fast"),
    "newer": lambda f: edit_manifest(f, schema="xpuruntime.artifact/9"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_entry_that_does_not_fit_is_refused_or_made_again_as_asked(
    engine: SlowEngine, cache: Path, name: str
) -> None:
    open_cached(engine, MODEL, cache).close()
    (folder,) = (cache / entry for entry in entries(cache))
    DAMAGE[name](folder)
    for _ in range(2):
        with pytest.raises(xrt.XpuRuntimeError, match=r"Or state execution\.artifacts\.stale: rebuild") as told:
            open_cached(engine, MODEL, cache)
        assert isinstance(told.value, (xrt.ModelError, xrt.EngineError))
        assert str(folder) in str(told.value)
    assert engine.lines().count("compile") == 1
    with open_cached(engine, MODEL, cache, artifacts={"stale": "rebuild"}) as session:
        assert session.plan.notes[-1].endswith("which was compiled now")
    assert engine.lines().count("compile") == 2
    open_cached(engine, MODEL, cache).close()
    assert engine.lines().count("compile") == 2
    assert entries(cache) == [folder.name]


def test_an_artifact_that_is_named_is_never_made_again(engine: SlowEngine, tmp_path: Path) -> None:
    folder = tmp_path / "m.xrt"
    xrt.compile_model(MODEL, folder, engine="slow", registry=engine.registry())
    edit_manifest(folder, target={"slow": "0"})
    policy = policy_of(tmp_path / "cache", artifacts={"stale": "rebuild"})
    with pytest.raises(xrt.EngineError, match="compiled for slow 0 and here is 1"):
        xrt.InferenceSession(folder, policy=policy, registry=engine.registry())
    assert engine.lines().count("compile") == 1


def start(cache: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), str(MODEL), str(cache), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(log: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and line in log.read_text().splitlines()):
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.01)


def test_two_processes_compile_once(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    both = [start(cache, log, 1.5) for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert log.read_text().splitlines().count("compile") == 1
    assert sorted(end[0].split()[-1] for end in ends) == ["cache", "now"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_builder_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    process = start(cache, log, 60)
    wait_for(log, "compile")
    process.kill()
    process.communicate()
    (left,) = entries(cache)
    assert left.endswith(".new")  # never under the name of the artifact
    with open_cached(SlowEngine(log), MODEL, cache) as session:
        assert session.plan.notes[-1].endswith("which was compiled now")
    (entry,) = entries(cache)
    assert entry.endswith(".xrt")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to whole groups")
def test_ctrl_c_while_compiling_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    process = start(cache, log, 60)
    wait_for(log, "compile")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert entries(cache) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to whole groups")
def test_ctrl_c_while_waiting_for_another_builder(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    first = start(cache, log, 60)
    wait_for(log, "compile")
    second = start(cache, log, 60)
    assert second.stdout is not None
    second.stdout.readline()
    time.sleep(1.0)
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert first.poll() is None
    first.kill()
    first.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("room", [200, 20_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, room: int) -> None:
    """A limit on the size of files stands for the disk: what a vendor writes and what we write both hit it."""
    code = (
        "import resource, sys, xpuruntime as xrt\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
        "try:\n"
        "    xrt.compile_model(xrt.demo_model_path(), sys.argv[1], device='cpu', engine='onnxruntime')\n"
        "except xrt.XpuRuntimeError as error:\n"
        "    print(error)\n"
    )
    folder = tmp_path / "m.xrt"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == []


def test_an_error_of_the_disk_names_the_folder(
    engine: SlowEngine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(engine, "compile", full)
    with pytest.raises(xrt.XpuRuntimeError, match=r"could not be written: No space left on device\. Fix: free"):
        open_cached(engine, MODEL, cache)
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    engine: SlowEngine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cached(engine, MODEL, cache).close()

    def read_only(path: Path, *_: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("xpuruntime.artifacts.store.locked", read_only)
    open_cached(engine, MODEL, cache).close()
    with pytest.raises(xrt.XpuRuntimeError, match=r"Read-only file system.*execution\.artifacts\.cache: off"):
        open_cached(engine, MODEL, cache, shapes={"image": [4, 1, 8, 8]})
    assert engine.lines().count("compile") == 1


def test_a_compilation_that_fails_leaves_nothing(
    engine: SlowEngine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = engine.compile

    def fail(*arguments: Any) -> Any:
        compile_(*arguments)
        raise xrt.EngineError("the chip caught fire", engine="slow")

    monkeypatch.setattr(engine, "compile", fail)
    with pytest.raises(xrt.EngineError, match="caught fire"):
        open_cached(engine, MODEL, cache)
    assert entries(cache) == []
