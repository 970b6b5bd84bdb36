# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines that raise, hang or run out of memory, random cancels, many requests: none lost, none answered twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, FaultyEngine, Gate, ask, eventually, rows_of, serve_gated, serve_hooked

from xpuruntime.errors import EngineFailed, OutOfMemoryError
from xpuruntime.serving.messages import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xpuruntime.serving.messages import InferResponse


Serve = "Callable[..., Models]"
X = rows_of(1)
BAD = rows_of(13)


def raising(error: BaseException, when: Callable[[np.ndarray], bool] = lambda x: True) -> Callable[[Any], None]:
    def before(feeds: dict[str, Any]) -> None:
        if when(feeds["x"]):
            raise error

    return before


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (EngineFailed("the engine is broken"), Status.INTERNAL, "model 'm': the engine is broken"),
        (OutOfMemoryError("no room"), Status.RESOURCE_EXHAUSTED, "no room. Fix: lower batching.max_batch_size"),
        (MemoryError(), Status.RESOURCE_EXHAUSTED, "MemoryError"),
        (ZeroDivisionError("by zero"), Status.INTERNAL, "by zero"),
        (KeyboardInterrupt(), Status.INTERNAL, "KeyboardInterrupt"),
        (SystemExit(3), Status.INTERNAL, "3"),
    ],
)
def test_what_an_engine_raises_fails_its_batch_alone(
    mlp: Path, serve: Serve, error: BaseException, status: Status, said: str
) -> None:
    engine = FaultyEngine(raising(error, lambda x: bool((x == 13).any())))
    service = serve({"m": {"source": str(mlp), "batching": {"max_batch_size": 4}}}, registry=engine.registry())
    with pytest.raises(ServingError) as caught:
        service.infer(ask("m", {"x": BAD})).result(WAIT)
    assert caught.value.code is status
    assert said in str(caught.value)
    assert service.infer(ask("m", {"x": X})).result(WAIT).outputs[0].shape == (1, 64)
    (stats,) = service.statistics("m")["model_stats"]
    assert stats["inference_stats"]["fail"]["count"] == 1


@pytest.mark.parametrize("stated", [{}, {"isolate_failures": False}], ids=["default", "off"])
def test_a_bad_request_and_its_neighbours(mlp: Path, serve: Serve, stated: dict[str, bool]) -> None:
    gate = Gate()

    def before(feeds: dict[str, Any]) -> None:
        gate(feeds)
        raising(EngineFailed("thirteen"), lambda x: bool((x == 13).any()))(feeds)

    batching = {"max_batch_size": 4, **stated}
    service, _ = serve_hooked(serve, {"m": {"source": str(mlp), "batching": batching}}, before)
    first = service.infer(ask("m", {"x": X}))
    assert gate.come.wait(WAIT)
    futures = [service.infer(ask("m", {"x": x})) for x in (X, BAD, X)]
    gate.open.set()
    first.result(WAIT)
    failed = []
    for future in futures:
        try:
            future.result(WAIT)
            failed.append(False)
        except ServingError:
            failed.append(True)
    assert failed == ([True, True, True] if stated else [False, True, False])
    reasons = service.evidence("m", "evidence")["dispatches"]
    assert reasons["retry"] == (0 if stated else 3)


def test_a_model_that_hangs_is_not_ready_and_says_why(mlp: Path, serve: Serve) -> None:
    service, gate = serve_gated(serve, {"m": {"source": str(mlp), "max_execution": "50ms"}})
    future = service.infer(ask("m", {"x": X}))
    assert gate.come.wait(WAIT)
    eventually(lambda: not service.ready()[0])
    assert "a batch has been running for" in service.ready()[1]
    assert not service.model_ready("m")[0]
    late = service.infer(ask("m", {"x": X}, deadline=time.monotonic() + 0.05))
    with pytest.raises(ServingError, match="the deadline passed"):
        late.result(WAIT)
    gate.open.set()
    assert future.result(WAIT)
    eventually(lambda: service.ready()[0])


def test_closing_beside_a_model_that_hangs_answers_and_ends(mlp: Path, serve: Serve, monkeypatch: Any) -> None:
    service, gate = serve_gated(serve, {"m": {"source": str(mlp)}})
    futures = [service.infer(ask("m", {"x": X})) for _ in range(3)]
    assert gate.come.wait(WAIT)
    batcher = service.slots["m"].version().batcher
    close = batcher.close
    monkeypatch.setattr(batcher, "close", lambda: close(timeout=0.05))
    service.close(drain=0.05)
    for future in futures:
        with pytest.raises(ServingError, match="being unloaded") as caught:
            future.result(WAIT)
        assert caught.value.code is Status.UNAVAILABLE
    gate.open.set()


def test_no_answer_is_lost_or_doubled_over_20000_requests(mlp: Path, serve: Serve) -> None:
    """Three threads ask with deadlines, cancels and rows of their own, while a batch fails now and then."""
    runs = Counter[str]()

    def before(feeds: dict[str, Any]) -> None:
        runs["all"] += 1
        if runs["all"] % 97 == 0:
            runs["failed"] += 1
            raise EngineFailed("now and then")

    batching = {"max_batch_size": 16, "max_queue_size": 64, "isolate_failures": True}
    service, _ = serve_hooked(serve, {"m": {"source": str(mlp), "instances": 2, "batching": batching}}, before)
    weights = service.infer(ask("m", {"x": rows_of(1)})).result(WAIT).outputs[0].data[0]
    each = 6667
    outcomes: list[Counter[str]] = [Counter() for _ in range(3)]
    wrong: list[str] = []

    def work(index: int) -> None:
        draw = random.Random(index)
        told = outcomes[index]
        left = threading.Semaphore(40)

        def done(future: Any, value: int, rows: int) -> None:
            left.release()
            if future.cancelled():
                told["cancelled"] += 1
            elif future.exception() is not None:
                told[future.exception().code.name] += 1
            else:
                told["done"] += 1
                data = future.result().outputs[0].data
                if data.shape != (rows, 64) or not np.allclose(data, weights * value, rtol=1e-3, atol=1e-4):
                    wrong.append(f"{index}: {value}")

        for number in range(each):
            value, rows = draw.randrange(1, 100), draw.choice((1, 1, 1, 2, 3))
            deadline = time.monotonic() + 0.002 if draw.random() < 0.05 else None
            left.acquire()
            try:
                future = service.infer(ask("m", {"x": rows_of(value, rows)}, deadline=deadline))
            except ServingError as error:
                left.release()
                told[f"refused {error.code.name}"] += 1
                if error.retry_after:
                    time.sleep(min(error.retry_after, 0.01))
                continue
            future.add_done_callback(lambda future, value=value, rows=rows: done(future, value, rows))
            if number % 50 == 0:
                future.cancel()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT * 3)
    version = service.slots["m"].version()
    assert version.drain(WAIT)
    assert not wrong
    told = sum(outcomes, Counter())
    assert sum(told.values()) == 3 * each, told
    assert told["done"] > each
    counted = version.statistics.snapshot()
    assert counted.requests["success"].times == told["done"] + 1
    assert counted.failures["CANCELED"] == told["cancelled"]
    assert counted.executions < told["done"], "requests ran together"
    assert runs["failed"] > 0
    state = version.batcher.state()
    assert (state.waiting, state.running, version.batcher.unanswered) == (0, 0, 0)


def test_answers_that_were_held_for_their_order_are_given_at_the_end(mlp: Path, serve: Serve, monkeypatch: Any) -> None:
    """Two instances, of which the one with the first request hangs."""
    gate = Gate()

    def before(feeds: dict[str, Any]) -> None:
        if (feeds["x"] == 13).all():
            gate(feeds)

    engine = FaultyEngine(before)
    batching = {"max_batch_size": 1, "preserve_ordering": True}
    service = serve({"m": {"source": str(mlp), "instances": 2, "batching": batching}}, registry=engine.registry())
    first = service.infer(ask("m", {"x": BAD}))
    assert gate.come.wait(WAIT)
    later = [service.infer(ask("m", {"x": X})) for _ in range(3)]
    version = service.slots["m"].version()
    eventually(lambda: version.statistics.snapshot().executions == 3)
    assert not any(one.done() for one in later)
    assert not version.batcher.close(timeout=0.05)
    with pytest.raises(ServingError, match="being unloaded"):
        first.result(WAIT)
    assert [one.result(WAIT).outputs[0].shape for one in later] == [(1, 64)] * 3
    gate.open.set()


def test_answers_come_in_the_order_of_arrival_where_asked(mlp: Path, serve: Serve) -> None:
    def before(feeds: dict[str, Any]) -> None:
        time.sleep(float(feeds["x"][0, 0]) / 1000)

    engine = FaultyEngine(before)
    batching = {"max_batch_size": 1, "preserve_ordering": True}
    service = serve({"m": {"source": str(mlp), "instances": 3, "batching": batching}}, registry=engine.registry())
    order: list[int] = []
    futures = []
    for i in range(30):
        futures.append(service.infer(ask("m", {"x": rows_of(5 if i % 3 == 0 else 0)})))
        futures[-1].add_done_callback(lambda _, i=i: order.append(i))
    for future in futures:
        future.result(WAIT)
    assert order == list(range(30))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_batcher_itself_is_told_and_answered(mlp: Path, serve: Serve, monkeypatch: Any) -> None:
    service, gate = serve_gated(serve, {"m": {"source": str(mlp)}})
    futures = [service.infer(ask("m", {"x": X})) for _ in range(3)]
    assert gate.come.wait(WAIT)
    version = service.slots["m"].version()
    monkeypatch.setattr(version.statistics, "executed", lambda execution: 1 / 0)
    gate.open.set()
    for future in futures:
        with pytest.raises(ServingError, match="its batcher has ended: ZeroDivisionError"):
            future.result(WAIT)
    assert service.ready()[1] == "model 'm': its batcher has ended: ZeroDivisionError: division by zero"
    with pytest.raises(ServingError):
        service.infer(ask("m", {"x": X}))
    service.load("m", {})
    assert service.infer(ask("m", {"x": X})).result(WAIT)


def test_a_deadline_beyond_what_a_lock_can_wait_hides_no_other(mlp: Path, serve: Serve) -> None:
    service, gate = serve_gated(serve, {"m": {"source": str(mlp), "batching": {"max_batch_size": 1}}})
    first = service.infer(ask("m", {"x": X}))
    assert gate.come.wait(WAIT)
    far = service.infer(ask("m", {"x": X}, deadline=time.monotonic() + 2**64 / 1e6))
    near = service.infer(ask("m", {"x": X}, deadline=time.monotonic() + 0.05))
    with pytest.raises(ServingError, match="the deadline passed"):
        near.result(WAIT)
    gate.open.set()
    assert first.result(WAIT)
    assert far.result(WAIT)


def test_a_model_all_of_whose_runs_fail_is_not_ready_until_one_is_good(mlp: Path, serve: Serve) -> None:
    def fail(feeds: dict[str, Any]) -> None:
        raise EngineFailed("as a test. Fix: none")

    service, engine = serve_hooked(serve, {"m": {"source": str(mlp)}}, fail)
    for _ in range(20):
        assert isinstance(service.infer(ask("m", {"x": rows_of(1)})).exception(WAIT), ServingError)
    eventually(lambda: not service.ready()[0])
    assert "executions failed" in service.ready()[1]
    engine.armed = False
    service.infer(ask("m", {"x": rows_of(1)})).result(WAIT)
    eventually(lambda: service.ready()[0])


def test_inputs_that_a_model_fails_on_do_not_make_it_unready(mlp: Path, serve: Serve) -> None:
    probed = threading.Event()

    def fail(feeds: dict[str, Any]) -> None:
        if feeds["x"].flat[0] == 7:
            raise EngineFailed("for these inputs. Fix: none")
        probed.set()

    service, _ = serve_hooked(serve, {"m": {"source": str(mlp)}}, fail)
    for _ in range(20):
        assert isinstance(service.infer(ask("m", {"x": rows_of(7)})).exception(WAIT), ServingError)
    assert probed.is_set()
    assert service.ready() == (True, "")


def test_errors_and_pages_for_clients_name_no_folder(mlp: Path, serve: Serve, tmp_path: Path) -> None:
    def fail(feeds: dict[str, Any]) -> None:
        raise EngineFailed(f"{mlp}: node '/layer/MatMul' failed. Fix: none")

    service, _ = serve_hooked(serve, {"m": {"source": str(mlp)}}, fail)
    text = str(service.infer(ask("m", {"x": rows_of(1)})).exception(WAIT))
    assert "mlp.onnx: node '/layer/MatMul' failed" in text
    pages = [service.evidence("m", kind) for kind in ("plan", "evidence")]
    assert str(tmp_path) not in text + str(pages)


def test_a_response_that_cannot_be_written_is_no_success(mlp: Path, serve: Serve) -> None:
    def refuse(response: InferResponse) -> None:
        raise ServingError(Status.INVALID_ARGUMENT, "NaN has no form in JSON. Fix: ask for binary")

    service = serve({"m": {"source": str(mlp)}})
    failed = service.infer(ask("m", {"x": rows_of(1)}, write=refuse)).exception(WAIT)
    assert isinstance(failed, ServingError)
    assert failed.code is Status.INVALID_ARGUMENT
    (stats,) = service.statistics("m")["model_stats"]
    assert (stats["inference_stats"]["success"]["count"], stats["inference_stats"]["fail"]["count"]) == (0, 1)
