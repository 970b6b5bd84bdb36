# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A captured step, apart from CUDA, says what it cannot: failures, wrong functions, threads, streams."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest

torch = pytest.importorskip("torch")

from recorded_steps import captured  # noqa: E402 - needs torch
from trained_net import batches, loss_of, make, train_eagerly  # noqa: E402

from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.pytorch import capture_graph  # noqa: E402
from xpuruntime.pytorch.capture import graph_recorder  # noqa: E402
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder  # noqa: E402


def test_a_failed_capture_runs_eagerly_and_says_why():
    theirs, their_optimizer = make()
    wanted = train_eagerly(theirs, their_optimizer, batches(4))
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own)
    recorder.fails = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    with pytest.warns(XpuRuntimeWarning, match="not permitted when stream is capturing") as caught:
        found = [step(*batch).item() for batch in batches(4)]
    assert len(caught) == 1, "one warning is enough"
    assert found == pytest.approx(wanted, rel=1e-5)
    assert len(step.reasons) == 1
    assert "float32[8, 6], float32[8, 1]; train cannot be captured: RuntimeError: CUDA error" in step.reasons[0]
    assert "more" not in step.reasons[0]
    assert step.report.eager_calls == 4
    assert not step.report.captured
    assert "because the step for" in str(step.report)
    recorder.fails = None
    step.reset()
    step(*batches(1)[0])
    assert (recorder.records, step.reasons) == (1, ())


def test_modules_are_a_list_or_one_module():
    net, own = make()
    batch = batches(1)[0]
    with pytest.warns(XpuRuntimeWarning, match="the CPU has no CUDA graphs"):
        step = capture_graph(loss_of(net), batch, optimizer=own, modules=net)
    step(*batch)
    with pytest.raises(InputError, match=r"modules is a int. Fix: pass a list, such as modules=\[model\]"):
        capture_graph(loss_of(net), batch, optimizer=own, modules=3)


def test_strict_raises_instead():
    net, own = make()
    before = copy.deepcopy(net.state_dict())
    step, recorder = captured(loss_of(net), optimizer=own, strict=True)
    recorder.fails = RuntimeError("no")
    with pytest.raises(UnsupportedOperationError, match="cannot be captured: RuntimeError: no"):
        step(*batches(1)[0])
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_error_of_the_function_is_the_one_that_is_seen():
    net, own = make()
    before = copy.deepcopy(net.state_dict())
    step, _ = captured(loss_of(net), optimizer=own)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step(torch.zeros(8, 5), torch.zeros(8, 1))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    step(*batches(1)[0])
    assert step.reasons == ()


def test_arguments_of_other_kinds():
    net, own = make()
    with pytest.raises(InputError, match="before_step is a int, not a function"):
        capture_graph(loss_of(net), optimizer=own, before_step=3)
    with pytest.raises(InputError, match="fn is a str"):
        capture_graph("loss", optimizer=own)
    with pytest.raises(InputError, match="LBFGS computes the loss several times in a step"):
        capture_graph(loss_of(net), optimizer=torch.optim.LBFGS(net.parameters()))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda net: lambda x, y: net(x) - y, r"this fn returned a tensor of shape \[8, 1\]"),
        (lambda net: lambda x, y: net(x).sum().item(), "this fn returned float"),
        (lambda net: lambda x, y: net(x).sum().detach(), "does not depend on any parameter"),
    ],
)
def test_functions_that_return_no_loss(fn, message):
    net, own = make()
    step, _ = captured(fn(net), optimizer=own)
    with pytest.raises(InputError, match=message):
        step(*batches(1)[0])


def test_a_function_that_runs_backward_itself_beside_an_optimizer():
    net, own = make()

    def whole_step(x, y):
        loss = loss_of(net)(x, y)
        loss.backward()
        return loss

    step, _ = captured(whole_step, optimizer=own)
    with pytest.raises(InputError, match=r"fn has run backward already.*leave optimizer= out"):
        step(*batches(1)[0])
    with pytest.warns(XpuRuntimeWarning, match="has no CUDA graphs"):
        eager = capture_graph(whole_step, optimizer=own)
    with pytest.raises(InputError, match="fn has run backward already"):
        eager(*batches(1)[0])


def test_one_thread_at_a_time():
    net, own = make()
    begun, go_on = threading.Event(), threading.Event()

    def fn(x, y):
        begun.set()
        assert go_on.wait(20)
        return loss_of(net)(x, y)

    step, _ = captured(fn, optimizer=own)
    thread = threading.Thread(target=step, args=batches(1)[0])
    thread.start()
    assert begun.wait(20)
    try:
        with pytest.raises(UnsupportedOperationError, match="one step for each thread"):
            step(*batches(1)[0])
    finally:
        go_on.set()
        thread.join()
    step(*batches(1)[0])


def test_threads_have_steps_of_their_own():
    wanted = train_eagerly(*make(), batches(4))
    found: dict[int, list[float]] = {}

    made = [make() for _ in range(4)]

    def train(number: int) -> None:
        net, own = made[number]
        step, _ = captured(loss_of(net), optimizer=own)
        found[number] = [step(*batch).item() for batch in batches(4)]

    threads = [threading.Thread(target=train, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert found[number] == pytest.approx(wanted, rel=1e-5)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_waits_for_the_warmup_also_where_it_fails(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graph_recorder, "take_stream", lambda index: Stream("warm-up", log))
    monkeypatch.setattr(graph_recorder, "release_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("caller", log))
    monkeypatch.setattr(graph_recorder, "make_workspaces", lambda stream: log.append(f"workspaces of {stream.name}"))
    recorder = CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext(), recorder.warming():
        log.append("work")
        if fails:
            raise ValueError("no")
    # Work before them would make workspaces in memory that does not stay.
    assert log == ["warm-up waits for caller", "workspaces of warm-up", "work", "caller waits for warm-up"]


class PyTorchStream(torch.Stream):
    """One of PyTorch's own, which says of itself neither that it is equal to None nor that it is other."""

    def wait_stream(self, other: torch.Stream) -> None:
        LOG.append((self.stream_id, other.stream_id))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


LOG: list[tuple[int, int]] = []


def test_a_replay_waits_for_the_last_one_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "take_stream", lambda index: None)
    monkeypatch.setattr(graph_recorder, "release_stream", lambda stream: None)
    recorder = CudaRecorder(torch.device("cuda", 0))
    LOG.clear()
    for number in (7, 7, 8, 8, 7):
        stream = PyTorchStream(stream_id=number, device_index=0, device_type=1)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        recorder.order()
    assert LOG == [(8, 7), (7, 8)]


def test_a_stream_is_given_back_wherever_the_collector_frees_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "_free", {})
    stream = PyTorchStream(stream_id=1, device_index=0, device_type=1)
    with graph_recorder._lock:  # as workspaces are made
        graph_recorder.release_stream(stream)
    assert graph_recorder.take_stream(0) is stream
