# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading, reloading, unloading and evicting models, also under load, and versions on disk."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest
from serving_models import WAIT, FaultyEngine, Gate, ask, eventually, rows_of

from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.models.loading import find_versions
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.models.slot import Pending
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Serve = "Callable[..., Models]"
X = rows_of(1)


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """Return a folder with the versions 1, 2 and 10 of a model, which differ in their weights."""
    folder = tmp_path / "versions"
    for version in (1, 2, 10):
        (folder / str(version)).mkdir(parents=True)
        models.save(models.mlp(seed=version), folder / str(version))
    (folder / "notes").mkdir()
    return folder


def test_versions_of_a_folder(versions: Path, serve: Serve) -> None:
    service = serve(
        {
            "latest": {"source": str(versions)},
            "all": {"source": str(versions), "versions": "all"},
            "some": {"source": str(versions), "versions": [1, 2]},
            "missing": {"source": str(versions), "versions": [3]},
        }
    )
    (versions / "11").mkdir()  # which another program is still filling
    assert set(find_versions(str(versions), (1, 2))) == {1, 2}
    found = {name: slot.versions for name, slot in service.slots.items()}
    assert found == {"latest": (10,), "all": (1, 2, 10), "some": (1, 2), "missing": ()}
    answers = {v: service.infer(ask("all", {"x": X}, version=v)).result(WAIT) for v in ("", "1", "2", "10")}
    assert [answer.version for answer in answers.values()] == ["10", "1", "2", "10"]
    bits = {v: answer.outputs[0].data.tobytes() for v, answer in answers.items()}
    assert bits[""] == bits["10"]
    assert len(set(bits.values())) == 3
    (missing,) = (one for one in service.index() if one["name"] == "missing")
    assert "has no version 3; it has 1, 2, 10" in missing["reason"]
    assert [one["version"] for one in service.index() if one["name"] == "all"] == ["1", "2", "10"]
    assert len(service.statistics("all")["model_stats"]) == 3
    assert [stat["version"] for stat in service.statistics("all", "2")["model_stats"]] == ["2"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "there is no such file. Fix: check the name; the folder holds"),
        (lambda folder: folder.mkdir(), "neither a compiled artifact nor a folder of versions"),
        (lambda folder: (folder / "1").mkdir(parents=True), "must hold one model"),
        (lambda folder: folder.write_bytes(b"no model"), "m"),
    ],
)
def test_sources_that_hold_no_model(tmp_path: Path, serve: Serve, mlp: Path, make: Callable, said: str) -> None:
    make(tmp_path / "m")
    service = serve({"bad": {"source": str(tmp_path / "m")}, "good": {"source": str(mlp)}})
    good, reason = service.ready()
    assert not good
    assert said in reason
    assert service.index(ready_only=True) == [{"name": "good", "version": "1", "state": "READY", "reason": ""}]
    with pytest.raises(ServingError, match="is not served") as caught:
        service.infer(ask("bad", {"x": X}))
    assert caught.value.code is Status.UNAVAILABLE
    assert service.infer(ask("good", {"x": X})).result(WAIT)


class Load:
    """Threads that ask without end and note what they got."""

    def __init__(self, service: Models, threads: int = 3) -> None:
        self.service = service
        self.answers: list[bytes] = []
        self.errors: list[ServingError] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                response = self.service.infer(ask("m", {"x": X})).result(WAIT)
            except ServingError as error:
                self.errors.append(error)
                time.sleep(0.001)
            else:
                self.answers.append(response.outputs[0].data.tobytes())

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        eventually(lambda: len(self.answers) > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)


def test_a_reload_under_load_loses_no_request(tmp_path: Path, serve: Serve) -> None:
    path = models.save(models.mlp(seed=1), tmp_path, "m.onnx")
    service = serve({"m": {"source": str(path), "batching": {"max_batch_size": 8}}})
    with Load(service) as load:
        for seed in (2, 3):
            before = set(load.answers)
            models.save(models.mlp(seed=seed), tmp_path, "m.onnx")
            service.load("m", {})
            eventually(lambda before=before: set(load.answers) - before)
            assert service.ready() == (True, "")
    assert load.errors == []
    assert len(set(load.answers)) == 3


def test_a_reload_that_fails_leaves_what_is_served(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp)}})
    data = mlp.read_bytes()
    mlp.write_bytes(data[:100])
    with pytest.raises(ServingError, match="the version that was loaded before is served on") as caught:
        service.load("m", {})
    assert caught.value.code is Status.INVALID_ARGUMENT
    assert service.infer(ask("m", {"x": X})).result(WAIT)
    assert service.ready() == (True, "")


def test_an_unload_under_load_answers_what_was_accepted(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {"max_batch_size": 4}}})
    with Load(service) as load:
        service.unload("m", {})
        eventually(lambda: load.errors)
    assert {error.code for error in load.errors} == {Status.UNAVAILABLE}
    assert all("was unloaded" in str(error) or "being unloaded" in str(error) for error in load.errors)
    assert service.index() == [{"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "it was unloaded"}]
    assert service.ready() == (True, "")  # nobody waits for a model that was unloaded on purpose
    assert service.model_ready("m") == (False, "model 'm': it was unloaded")
    service.load("m", {})
    assert service.infer(ask("m", {"x": X})).result(WAIT)


def test_requests_that_were_accepted_are_answered_by_the_version_that_accepted_them(
    tmp_path: Path, serve: Serve
) -> None:
    path = models.save(models.mlp(seed=1), tmp_path, "m.onnx")
    gate = Gate()
    engine = FaultyEngine(gate)
    engine.armed = False
    service = serve({"m": {"source": str(path)}}, registry=engine.registry())
    old = service.infer(ask("m", {"x": X})).result(WAIT).outputs[0].data.tobytes()
    engine.armed = True
    accepted = [service.infer(ask("m", {"x": X})) for _ in range(3)]
    assert gate.come.wait(WAIT)
    engine.armed = False
    models.save(models.mlp(seed=2), tmp_path, "m.onnx")
    loading = threading.Thread(target=service.load, args=("m", {}))
    loading.start()
    new = eventually(
        lambda: (
            found if (found := service.infer(ask("m", {"x": X}, deadline=time.monotonic() + 0.2))) and _in(found) else 0
        )
    )
    assert not accepted[0].done()
    gate.open.set()
    loading.join(WAIT)
    assert {one.result(WAIT).outputs[0].data.tobytes() for one in accepted} == {old}
    assert new.result(WAIT).outputs[0].data.tobytes() != old


def _in(future: object) -> bool:
    try:
        future.result(WAIT)  # type: ignore[attr-defined]
    except ServingError:
        return False
    return True


def test_a_model_that_is_loaded_with_the_first_request(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "load": "on_demand"}})
    assert service.index()[0]["state"] == "UNAVAILABLE"
    assert service.ready() == (True, "")
    futures = [service.infer(ask("m", {"x": X})) for _ in range(5)]
    bits = {future.result(WAIT).outputs[0].data.tobytes() for future in futures}
    assert len(bits) == 1
    assert service.index()[0]["state"] == "READY"


def test_what_is_refused_after_it_loaded_a_model_is_logged_as_others_are(mlp: Path, serve: Serve) -> None:
    logged: list[tuple[str, Status]] = []
    service = serve(
        {"m": {"source": str(mlp), "load": "on_demand"}},
        log=lambda request, result, _: logged.append((request.version, result.code)),
    )
    future = service.infer(ask("m", {"x": X}, version="7"))
    with pytest.raises(ServingError, match="no version '7'; it has 1") as caught:
        future.result(WAIT)
    assert caught.value.code is Status.NOT_FOUND
    with pytest.raises(ServingError, match="no version '8'"):
        service.infer(ask("m", {"x": X}, version="8"))
    assert logged == [("7", Status.NOT_FOUND), ("8", Status.NOT_FOUND)]


def test_deadlines_and_cancels_while_a_model_is_loaded(mlp: Path, serve: Serve) -> None:
    release, began = threading.Event(), threading.Event()
    engine = FaultyEngine()
    load = engine.load

    def slow(*given: object) -> object:
        began.set()
        assert release.wait(WAIT)
        return load(*given)  # type: ignore[arg-type]

    engine.load = slow  # type: ignore[method-assign,assignment]
    service = serve({"m": {"source": str(mlp), "load": "on_demand"}}, registry=engine.registry())
    other = np.full_like(X, 2.0)  # requests are told apart by identity, not by their arrays
    late = service.infer(ask("m", {"x": other}, deadline=time.monotonic() + 0.1))
    given_up = service.infer(ask("m", {"x": X}))
    kept = service.infer(ask("m", {"x": X}))
    assert began.wait(WAIT)
    assert given_up.cancel()
    with pytest.raises(ServingError, match="while it was being loaded") as caught:
        late.result(WAIT)
    assert caught.value.code is Status.DEADLINE_EXCEEDED
    with pytest.raises(ServingError) as caught:
        service.model_metadata("m")
    assert caught.value.retry_after is not None
    release.set()
    assert kept.result(WAIT).outputs[0].shape == (1, 64)


def test_a_request_that_comes_while_the_server_stops_is_refused_and_never_waits() -> None:
    """It may have looked whether the server stops before that began."""
    pending = Pending("m", 0, lambda: None, lambda request: Future())
    pending.close()
    with pytest.raises(ServingError, match="is being stopped") as caught:
        pending.add(ask("m", {"x": X}))
    assert caught.value.code is Status.UNAVAILABLE


def test_a_model_that_does_not_load_on_demand_says_why(tmp_path: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(tmp_path / "none.onnx"), "load": "on_demand"}})
    with pytest.raises(ServingError, match=r"none\.onnx") as caught:
        service.infer(ask("m", {"x": X})).result(WAIT)
    assert caught.value.code is Status.UNAVAILABLE
    good, reason = service.ready()
    assert not good
    assert "none.onnx" in reason
    with pytest.raises(ServingError, match=r"none\.onnx"):
        service.infer(ask("m", {"x": X}))


@pytest.fixture
def large(tmp_path: Path) -> list[str]:
    """Return three models of 2 MiB each."""
    return [str(models.save(models.mlp(width=512, seed=i), tmp_path, f"{i}.onnx")) for i in range(3)]


def test_the_least_recently_used_model_goes_and_comes_back(large: list[str], serve: Serve, monkeypatch) -> None:
    monkeypatch.setattr("xpuruntime.serving.models.version.process_memory", lambda: type("M", (), {"resident": None})())
    given = {name: {"source": path, "load": "on_demand"} for name, path in zip("abc", large, strict=True)}
    service = serve(given, memory={"budget": {"cpu": "5MiB"}})
    x = np.ones((1, 512), np.float32)

    def up() -> str:
        return "".join(name for name, slot in service.slots.items() if slot.loaded)

    for name, served in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("a", "ab")):
        response = service.infer(ask(name, {"x": x})).result(WAIT)
        assert response.outputs[0].shape == (1, 512)
        assert up() == served
    assert service.budget.evictions == 3
    assert service.budget.used()["cpu"] <= 5 << 20
    assert service.ready() == (True, "")
    assert [slot.version().memory["source"] for slot in service.slots.values() if slot.loaded] == ["file", "file"]


def test_models_that_are_kept_or_in_use_stay(large: list[str], serve: Serve, monkeypatch) -> None:
    monkeypatch.setattr("xpuruntime.serving.models.version.process_memory", lambda: type("M", (), {"resident": None})())
    gate = Gate()
    engine = FaultyEngine(gate)
    engine.armed = False
    given = {name: {"source": path, "load": "on_demand"} for name, path in zip("abc", large, strict=True)}
    service = serve(given, memory={"budget": {"cpu": "5MiB"}, "keep": ["a"]}, registry=engine.registry())
    x = np.ones((1, 512), np.float32)
    service.infer(ask("a", {"x": x})).result(WAIT)
    service.infer(ask("b", {"x": x})).result(WAIT)
    engine.armed = True
    used = service.infer(ask("b", {"x": x}))
    assert gate.come.wait(WAIT)
    with pytest.raises(ServingError, match=r"no other model can go now: .*a .*\(kept\)"):
        service.infer(ask("c", {"x": x})).result(WAIT)
    gate.open.set()
    assert used.result(WAIT)
    service.load("c", {})
    assert [bool(slot.loaded) for slot in service.slots.values()] == [True, False, True]


def test_a_reload_that_fails_or_succeeds_leaves_the_memory_of_one(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp)}}, memory={"budget": {"cpu": "8GiB"}})

    def held() -> bool:
        return service.budget.used() == {"cpu": service.slots["m"].version().memory["bytes"]}

    assert held()
    service.load("m", {})
    assert held()
    mlp.write_bytes(b"no model")
    with pytest.raises(ServingError):
        service.load("m", {})
    assert held()
    service.unload("m", {})
    assert service.budget.used() == {"cpu": 0}
    with pytest.raises(ServingError):
        service.load("m", {})
    assert service.budget.used() == {"cpu": 0}


def test_closing_answers_what_was_accepted(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {"max_batch_size": 4, "max_queue_delay_us": 10**6}}})
    futures = [service.infer(ask("m", {"x": X})) for _ in range(3)]
    service.close(drain=WAIT)
    assert all(future.result(0).outputs[0].shape == (1, 64) for future in futures)
    with pytest.raises(ServingError, match="loads no model any more"):
        service.load("m", {})
    assert not any(thread.name.startswith("xpuruntime-serve") for thread in threading.enumerate())


def test_a_compiled_artifact(tmp_path: Path, mlp: Path, serve: Serve) -> None:
    pytest.importorskip("openvino")
    import xpuruntime as xrt

    folder = tmp_path / "v" / "1" / "mlp.xrt"
    folder.parent.mkdir(parents=True)
    xrt.compile_model(mlp, folder, engine="openvino", device="cpu")
    service = serve({"whole": {"source": str(folder)}, "versions": {"source": str(tmp_path / "v")}})
    assert service.ready() == (True, "")
    for name in ("whole", "versions"):
        assert service.infer(ask(name, {"x": X})).result(WAIT).outputs[0].shape == (1, 64)
        assert service.model_metadata(name)["platform"] == "xpuruntime_openvino"
    shutil.rmtree(tmp_path / "v")


@pytest.mark.parametrize("freeze", [False, True])
def test_what_is_loaded_is_kept_out_of_garbage_collections(mlp: Path, freeze: bool) -> None:
    gc.unfreeze()  # what other tests of this process have frozen
    before = gc.get_freeze_count()
    settings = ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"m": {"source": str(mlp)}}})
    with Models(settings, gc_freeze=freeze) as service:
        assert (gc.get_freeze_count() > before) is freeze
        for _ in range(2):
            old = weakref.ref(service.slots["m"].version())
            service.load("m", {})
            if not freeze:
                gc.collect()
            assert old() is None  # it is freed all the same
            assert service.infer(ask("m", {"x": X})).result(WAIT).outputs[0].data.shape == (1, 64)
    assert gc.get_freeze_count() == (0 if freeze else before)
