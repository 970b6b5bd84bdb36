# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A captured step, apart from CUDA: which calls share a graph, and what goes into it and comes out."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest

torch = pytest.importorskip("torch")

from recorded_steps import captured  # noqa: E402 - needs torch
from trained_net import (  # noqa: E402
    batches,
    loss_of,
    make,
    train_eagerly,
)

from xpuruntime.errors import (  # noqa: E402
    InputError,
    UnsupportedOperationError,
    XpuRuntimeWarning,
)
from xpuruntime.policies import KernelPolicy, Policy  # noqa: E402
from xpuruntime.pytorch import capture_graph  # noqa: E402
from xpuruntime.pytorch.capture import graph_recorder  # noqa: E402
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy  # noqa: E402


def test_shapes_have_graphs_of_their_own_and_the_oldest_goes():
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own, max_graphs=2)
    by_rows = {rows: batches(1, rows)[0] for rows in (4, 8, 16)}
    for rows in (4, 8, 4, 16, 4, 8):
        step(*by_rows[rows])
    assert recorder.records == 4, "8 was dropped for 16, and captured again"
    assert recorder.live == 2
    assert [graph.key for graph in step.graphs] == [
        "float32[4, 6], float32[4, 1]; train",
        "float32[8, 6], float32[8, 1]; train",
    ]
    assert [graph.hits for graph in step.graphs] == [3, 1]
    assert all(graph.bytes > 100 for graph in step.graphs)


def test_what_belongs_to_a_graph():
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own, max_graphs=100)
    x, y = batches(1)[0]
    seen = 0

    def new(*batch: torch.Tensor) -> bool:
        nonlocal seen
        before, seen = seen, recorder.records
        step(*batch)
        before, seen = seen, recorder.records
        return seen > before

    assert new(x, y)
    assert not new(x, y)
    assert new(x.t().contiguous().t(), y), "other strides"
    net.eval()
    assert new(x, y), "eval mode"
    net.layers[1].train()
    assert new(x, y), "train mode of one module"
    net.train()
    assert not new(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert new(x, y), "autocast"
    with torch.autocast("cpu", torch.float16):
        assert new(x, y), "type of autocast"
    assert new(x.requires_grad_(), y), "gradients of an input"
    x = x.detach()
    with thread_policy(CompiledPolicy(Policy(kernels=KernelPolicy(matmul="torch")))):
        assert new(x, y), "a policy"
    with thread_policy(CompiledPolicy(Policy(kernels=KernelPolicy(matmul="torch")))):
        assert not new(x, y), "an equal policy needs no other graph"
    with thread_policy(CompiledPolicy(Policy(kernels=KernelPolicy(matmul="cpu.reference")))):
        assert new(x, y), "another policy"
    own.param_groups[0]["weight_decay"] = 0.5
    assert new(x, y), "a number that the graph has frozen"
    own.param_groups[0]["lr"].fill_(0.5)
    assert not new(x, y), "the learning rate is read from the device"
    assert not new(x, y)
    torch.use_deterministic_algorithms(True)
    try:
        assert new(x, y), "deterministic algorithms"
    finally:
        torch.use_deterministic_algorithms(False)


def test_parameters_that_move_are_captured_again():
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own)
    step(*batches(1)[0])
    with torch.no_grad():
        net.layers[0].weight.data = net.layers[0].weight.data.clone()
    step(*batches(1)[0])
    assert recorder.records == 2
    assert recorder.live == 1
    assert any("moved to other memory" in note for note in step.report.notes)


def test_nested_and_named_inputs():
    net, own = make()

    def fn(batch, *, scale, names):
        (x, more), y = batch["x"], batch["y"]
        loss = ((net(x) - y).square() * scale).mean() + more.sum() * 0
        return loss, {"rows": x.shape[0], "names": names, "twice": more * 2}

    step, recorder = captured(fn, optimizer=own)
    x, y = batches(1)[0]
    for value in (1.0, 3.0):
        loss, rest = step({"x": [x, torch.full((2,), value)], "y": y}, scale=0.5, names="a")
        assert loss.shape == ()
        assert not loss.requires_grad
        assert rest["rows"] == 8
        assert rest["names"] == "a"
        assert rest["twice"].tolist() == [2 * value] * 2
    assert recorder.records == 1
    step({"x": [x, torch.zeros(2)], "y": y}, scale=0.25, names="a")
    assert recorder.records == 2, "a number is frozen into a graph"
    step({"y": y, "x": [x, torch.zeros(2)]}, scale=0.25, names="a")
    with pytest.raises(InputError, match="neither a tensor nor hashable"):
        step({"x": [x, torch.zeros(2)], "y": y}, scale=bytearray(b"x"), names="a")
    with pytest.raises(InputError, match="strided"):
        step({"x": [x, torch.zeros(2).to_sparse()], "y": y}, scale=0.25, names="a")


def test_outputs_are_overwritten_unless_they_are_copied():
    net, own = make("sgd plain")
    step, _ = captured(loss_of(net), optimizer=own)
    first, second = (step(*batch) for batch in batches(2))
    assert first is second
    step, _ = captured(loss_of(net), optimizer=own, clone_outputs=True)
    first, second = (step(*batch) for batch in batches(2))
    assert first.item() != second.item()


def test_static_inputs_need_no_copy():
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own)
    assert step.static_inputs is None
    x, y = batches(1)[0]
    step(x, y)
    (inside_x, inside_y), named = step.static_inputs
    assert named == {}
    assert torch.equal(inside_x, x)
    assert inside_x is not x
    copies = inside_x._version
    inside_x.fill_(2.0)
    step(inside_x, inside_y)
    assert inside_x._version == copies + 1, "a buffer was copied onto itself"
    assert recorder.records == 1


def test_gradients_are_there_after_each_call_and_not_added_up():
    theirs, _ = make("sgd plain")
    net, own = make("sgd plain")
    step, _ = captured(loss_of(net), optimizer=own, inside=True)
    own.param_groups[0]["lr"].fill_(0.0)
    for batch in [*batches(2), *batches(2, 5), *batches(2)]:
        theirs.zero_grad()
        loss_of(theirs)(*batch).backward()
        step(*batch)
        for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        own.zero_grad()


def test_a_step_without_gradients_leaves_those_alone_that_are_there():
    net, _ = make()
    loss_of(net)(*batches(1)[0]).backward()
    wanted = [p.grad for p in net.parameters()]
    step, _ = captured(lambda x: net(x))
    with torch.no_grad():
        step(batches(1)[0][0])
        step(batches(1)[0][0])
    assert all(p.grad is gradient for p, gradient in zip(net.parameters(), wanted, strict=True))


def test_a_function_without_modules_or_gradients():
    step, recorder = captured(lambda x: {"twice": x * 2})
    with torch.no_grad():
        for value in (1.0, 2.0):
            assert step(torch.full((3,), value))["twice"].tolist() == [2 * value] * 3
    assert recorder.records == 1
    assert step.graphs[0].key == "float32[3]; no_grad"


def test_capturing_at_each_call_is_warned_of():
    net, own = make()
    step, _ = captured(loss_of(net), optimizer=own, max_graphs=2, warmup=1)
    for rows in range(2, 7):
        step(*batches(1, rows)[0])
    with pytest.warns(XpuRuntimeWarning, match="these change: inputs"):
        step(*batches(1, 7)[0])
    step(*batches(1, 8)[0])


def test_reset_gives_everything_back():
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own)
    for rows in (4, 8):
        step(*batches(1, rows)[0])
    step.reset()
    assert recorder.live == 0
    assert step.graphs == ()
    assert step.static_inputs is None
    net.layers[4] = torch.nn.Linear(12, 1)
    own.param_groups[0]["params"] = list(net.parameters())
    step.reset()
    before = net.layers[4].weight.clone()
    step(*batches(1)[0])
    assert not torch.equal(before, net.layers[4].weight), "the new layer is not trained"


def test_what_is_tuned_is_tuned_for_replays_in_the_warmup_and_the_capture_alone():
    net, own = make()
    seen = []

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(CONTEXT.replays)
        return (net(x) - y).square().mean()

    step, recorder = captured(loss, optimizer=own, warmup=2)
    assert step.prepare(*batches(1)[0])
    assert recorder.records == 1
    assert seen == [1, 1, 1]
    assert CONTEXT.replays == 0
    recorder.fails = RuntimeError("no")
    with pytest.warns(XpuRuntimeWarning, match="no"):
        step(*batches(1, 4)[0])
    assert CONTEXT.replays == 0


def test_all_that_a_call_does_comes_after_the_last_replay_on_another_stream(monkeypatch):
    net, own = make()
    step, recorder = captured(loss_of(net), optimizer=own)
    log: list[str] = []
    monkeypatch.setattr(recorder, "order", lambda: log.append("order"))
    for name in ("warming", "released"):
        real = getattr(recorder, name)
        monkeypatch.setattr(recorder, name, lambda *args, name=name, real=real: log.append(name) or real(*args))
    first, second = batches(2)
    step(*first)
    step(*second)
    step.prepare(*(x[:2] for x in first))
    step.reset()
    assert log == ["order", "warming", "order", "order", "warming", "order", "released", "released"]


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
