# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captured training steps on a CUDA device: the losses of eager training, shapes, policies, failures, and the seeds."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

import xpuruntime.pytorch as xrt_torch
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning

DEVICE = torch.device("cuda", 0)
STEPS = 12


@pytest.fixture(autouse=True)
def _no_policy_and_usable_afterwards():
    xrt_torch.clear_kernel_policy()
    yield
    xrt_torch.clear_kernel_policy()
    assert_usable()


def assert_usable() -> None:
    """Fail where a capture has left CUDA, the allocator or the random numbers in a state of its own."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "another stream is current"
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    torch.nn.functional.dropout(x, 0.5).sum().backward()
    assert set(x.grad.tolist()) == {0.0, 2.0}
    torch.cuda.synchronize()


class Net(torch.nn.Module):
    """A convolution, a batch norm, dropout and products: small, and with every kind of state."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(
            3, 8, 3, padding=1, bias=False
        )  # before a batch norm it would have noise for a gradient
        self.norm = torch.nn.BatchNorm2d(8)
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def make_net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout).to(DEVICE)


def batches(count: int = STEPS, rows: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, 8, 8, generator=generator).to(DEVICE),
            torch.randint(10, (rows,), generator=generator).to(DEVICE),
        )
        for _ in range(count)
    ]


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def adamw(parameters, fused: bool = True):
    return torch.optim.AdamW(parameters, lr=rate(1e-3), fused=fused, capturable=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=rate(0.05), momentum=0.9, weight_decay=1e-4, fused=True)


def loss_of(net, autocast=None):
    def fn(x, y):
        if autocast is None:
            return torch.nn.functional.cross_entropy(net(x), y)
        with xrt_torch.autocast(autocast):
            return torch.nn.functional.cross_entropy(net(x), y)

    return fn


def train(step, data, scheduler=None) -> list[float]:
    losses = []
    for batch in data:
        losses.append(step(*batch).clone())
        if scheduler is not None:
            scheduler.step()
    return [loss.item() for loss in losses]


def eagerly(fn, optimizer, scaler=None):
    optimizer._warned_capturable_if_run_uncaptured = True  # it is made for both, to compare them

    def step(*batch):
        optimizer.zero_grad()
        loss = fn(*batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def assert_same_state(one: torch.nn.Module, other: torch.nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


CASES = {
    "adamw fused": (adamw, None),
    "adamw foreach": (lambda p: adamw(p, fused=False), None),
    "adamw bf16": (adamw, "bf16"),
    "sgd momentum": (sgd, None),
    "sgd fp16 autocast": (sgd, "fp16"),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=rate(1e-3), capturable=True), None),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=rate(1e-3), momentum=0.5, capturable=True), None),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_eager_training(case):
    make_optimizer, autocast = CASES[case]
    theirs = make_net()
    wanted = train(eagerly(loss_of(theirs, autocast), make_optimizer(theirs.parameters())), batches())
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    optimizer = make_optimizer(net.parameters())
    step = xrt_torch.capture_graph(loss_of(net, autocast), batches(1)[0], optimizer=optimizer, strict=True)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), f"capturing changed {name}"
    found = train(step, batches())
    assert found == pytest.approx(wanted, rel=2e-2 if autocast else 5e-3, abs=2e-3)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5 if autocast is None else 1e-3)
    assert_same_state(net, theirs, rtol=5e-2, atol=5e-3)
    report = step.report
    assert report.whole_step
    assert (report.captures, report.replays, report.eager_calls, report.reasons) == (1, STEPS, 0, ())
    assert report.graphs[0].bytes > 0


def test_bit_equal_with_deterministic_kernels():
    """A model of products alone, whose kernels are the same in both and deterministic."""

    def made():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).to(DEVICE)
        return net, adamw(net.parameters())

    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(32, n, generator=generator).to(DEVICE) for n in (64, 8)) for _ in range(STEPS)]

    def loss(net):
        return lambda x, y: (net(x) - y).square().mean()

    theirs, their_optimizer = made()
    wanted = train(eagerly(loss(theirs), their_optimizer), data)
    net, optimizer = made()
    found = train(xrt_torch.capture_graph(loss(net), data[0], optimizer=optimizer, strict=True), data)
    assert found == wanted
    for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_scaler_with_a_fused_optimizer_is_captured():
    def made():
        net = make_net()
        return net, sgd(net.parameters()), torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)

    theirs, their_optimizer, their_scaler = made()
    wanted = train(eagerly(loss_of(theirs, "fp16"), their_optimizer, their_scaler), batches())
    net, optimizer, scaler = made()
    step = xrt_torch.capture_graph(
        loss_of(net, "fp16"), batches(1)[0], optimizer=optimizer, scaler=scaler, strict=True,
        before_step=lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6),
    )  # fmt: skip
    assert scaler.get_scale() == 2.0**10
    assert train(step, batches()) == pytest.approx(wanted, rel=2e-2, abs=1e-3)
    assert scaler.get_scale() == their_scaler.get_scale() == 2.0**13
    assert step.report.scaler == "in the graph"
    before = copy.deepcopy(net.state_dict())
    x, y = batches(1)[0]
    step(x * float("inf"), y)
    assert scaler.get_scale() == 2.0**12
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]), "a step with infinite gradients was done"


def test_a_scaler_with_another_optimizer_steps_after_each_replay():
    def made():
        net = make_net()
        return net, adamw(net.parameters(), fused=False), torch.amp.GradScaler("cuda", init_scale=2.0**10)

    theirs, their_optimizer, their_scaler = made()
    wanted = train(eagerly(loss_of(theirs, "fp16"), their_optimizer, their_scaler), batches())
    net, optimizer, scaler = made()
    with pytest.warns(XpuRuntimeWarning, match="GradScaler.step waits for the device"):
        step = xrt_torch.capture_graph(loss_of(net, "fp16"), optimizer=optimizer, scaler=scaler)
    assert train(step, batches()) == pytest.approx(wanted, rel=2e-2, abs=1e-3)
    report = step.report
    assert (report.captures, report.eager_calls, report.optimizer) == (1, 0, "after each replay")
    assert not report.whole_step
    with pytest.raises(UnsupportedOperationError, match="fused=True"):
        xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, scaler=scaler, strict=True)


def test_an_optimizer_that_is_not_capturable():
    theirs = make_net()
    wanted = train(eagerly(loss_of(theirs), torch.optim.AdamW(theirs.parameters(), lr=1e-3)), batches())
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with pytest.raises(InputError, match=r"construct it with capturable=True, lr=torch\.tensor\(0\.001"):
        xrt_torch.capture_graph(loss_of(net), optimizer=optimizer)
    step = xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, capture_optimizer=False)
    half = STEPS // 2
    found = train(step, batches()[:half])
    assert step.report.optimizer == "after each replay"
    step = xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, make_capturable=True, strict=True)
    found += train(step, batches()[half:])
    assert step.report.whole_step
    assert found == pytest.approx(wanted, rel=1e-2, abs=1e-3)


def test_dropout_goes_on_between_replays_and_follows_the_seed():
    net = make_net(dropout=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate(0.0), fused=True)
    net.norm.eval()
    step = xrt_torch.capture_graph(loss_of(net), batches(1)[0], optimizer=optimizer, strict=True)
    torch.manual_seed(7)
    first = train(step, batches(1) * 4)
    assert len(set(first)) == 4, "each replay drops the same"
    torch.manual_seed(7)
    assert train(step, batches(1) * 4) == first
    theirs = make_net(dropout=0.5)
    theirs.norm.eval()
    torch.manual_seed(7)
    eager = train(eagerly(loss_of(theirs), torch.optim.SGD(theirs.parameters(), lr=0.0)), batches(1) * 4)
    assert first == pytest.approx(eager, rel=1e-4), "eager training drops others"


def test_a_scheduler_reaches_the_graph():
    def made():
        net = make_net()
        optimizer = sgd(net.parameters())
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    theirs, their_optimizer, their_scheduler = made()
    wanted = train(eagerly(loss_of(theirs), their_optimizer), batches(), their_scheduler)
    net, optimizer, scheduler = made()
    step = xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, strict=True)
    assert train(step, batches(), scheduler) == pytest.approx(wanted, rel=5e-3, abs=2e-3)
    assert step.report.captures == 1
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.0, abs=1e-6)


def test_shapes_share_a_pool_and_the_oldest_graph_goes():
    theirs, net = make_net(), make_net()
    data = [batches(1, rows)[0] for rows in (4, 8, 16, 4, 8, 32, 8, 4, 16)]
    wanted = train(eagerly(loss_of(theirs), sgd(theirs.parameters())), data)
    step = xrt_torch.capture_graph(loss_of(net), optimizer=sgd(net.parameters()), max_graphs=3, strict=True)
    assert train(step, data) == pytest.approx(wanted, rel=5e-3, abs=2e-3)
    assert len(step.graphs) == 3
    assert step.report.captures == 5, "16 is dropped for 32, and 32 for 16 again"
    assert_same_state(net, theirs, rtol=1e-2, atol=1e-3)


def test_one_graph_at_a_time_gives_its_pool_back():
    net = make_net()
    step = xrt_torch.capture_graph(loss_of(net), optimizer=sgd(net.parameters()), max_graphs=1, strict=True)
    with pytest.warns(XpuRuntimeWarning, match="no more than max_graphs=1 are kept"):
        train(step, [batches(1, rows)[0] for rows in (4, 8, 4, 8)])
    step.reset()
    step(*batches(1)[0])
    assert (step.report.captures, len(step.graphs)) == (5, 1)


def test_reset_gives_memory_back():
    net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(DEVICE)
    optimizer = sgd(net.parameters())

    def fn(x):
        return net(x).square().mean()

    x = torch.randn(4096, 2048, device=DEVICE)
    fn(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    step = xrt_torch.capture_graph(fn, (x,), optimizer=optimizer, strict=True)
    step(x)
    torch.cuda.synchronize()
    taken = step.graphs[0].bytes
    assert taken > 100 << 20
    step.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < taken / 2


def test_policies_have_graphs_of_their_own():
    theirs, net = make_net(), make_net()
    wanted = train(eagerly(loss_of(theirs), sgd(theirs.parameters())), batches())
    step = xrt_torch.capture_graph(loss_of(net), optimizer=sgd(net.parameters()), strict=True)
    found = train(step, batches()[:4])
    with xrt_torch.kernel_policy(matmul="cublasLt"):
        found += train(step, batches()[4:8])
        assert step.report.captures == 2
    found += train(step, batches()[8:10])
    assert step.report.captures == 2, "without a policy the first graph serves again"
    with xrt_torch.kernel_policy(matmul="cublasLt"):
        found += train(step, batches()[10:])
    assert step.report.captures == 2, "an equal policy needs no other graph"
    assert found == pytest.approx(wanted, rel=5e-3, abs=2e-3)


def test_eval_mode_has_a_graph_of_its_own():
    net = make_net(dropout=0.5)
    step = xrt_torch.capture_graph(lambda x: net(x), modules=[net], strict=True)
    x = batches(1)[0][0]
    with torch.no_grad():
        step(x)
        net.eval()
        mean = net.norm.running_mean.clone()
        torch.testing.assert_close(step(x), net(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(step(x + 1), net(x + 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(net.norm.running_mean, mean)
    assert [graph.key.split("; ")[1] for graph in step.graphs] == ["train", "eval"]


def test_inputs_from_the_host_and_nested():
    net = make_net()
    optimizer = sgd(net.parameters())

    def fn(batch, *, weight):
        return torch.nn.functional.cross_entropy(net(batch["x"]), batch["y"]) * weight, {
            "rows": batch["x"].sum((1, 2, 3))
        }

    step = xrt_torch.capture_graph(fn, optimizer=optimizer, strict=True)
    for x, y in batches(3):
        for where in (lambda t: t, lambda t: t.cpu(), lambda t: t.cpu().pin_memory()):
            given = {"x": where(x), "y": where(y)}
            loss, rest = step(given, weight=1.0)
            assert loss.device == DEVICE
            torch.testing.assert_close(rest["rows"], x.sum((1, 2, 3)), rtol=1e-4, atol=1e-4)
    assert step.report.captures == 1


def test_static_inputs_are_read_without_a_copy():
    net = make_net()
    net.eval()
    step = xrt_torch.capture_graph(lambda x: net(x), strict=True)
    with torch.no_grad():
        x = batches(1)[0][0]
        step(x)
        (inside,), _ = step.static_inputs
        inside.copy_(x * 2)
        torch.testing.assert_close(step(inside), net(x * 2), rtol=1e-4, atol=1e-4)


def test_replays_on_two_streams_keep_their_order():
    net = make_net()
    theirs = make_net()
    wanted = train(eagerly(loss_of(theirs), sgd(theirs.parameters())), batches())
    step = xrt_torch.capture_graph(loss_of(net), batches(1)[0], optimizer=sgd(net.parameters()), strict=True)
    streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
    data = batches()
    torch.cuda.synchronize()
    losses = []
    for number, batch in enumerate(data):
        with torch.cuda.stream(streams[number % 2]):
            torch.cuda._sleep(2_000_000)
            losses.append(step(*batch).clone())
    torch.cuda.synchronize()
    assert [loss.item() for loss in losses] == pytest.approx(wanted, rel=5e-3, abs=2e-3)


def test_what_waits_for_the_device_runs_eagerly_and_cuda_stays_usable():
    theirs, net = make_net(dropout=0.3), make_net(dropout=0.3)

    def waits(net):
        def fn(x, y):
            loss = loss_of(net)(x, y)
            return loss * (1.0 if loss.item() < 100 else 0.5)

        return fn

    torch.manual_seed(3)
    wanted = train(eagerly(waits(theirs), sgd(theirs.parameters())), batches())
    optimizer = sgd(net.parameters())
    with pytest.warns(XpuRuntimeWarning, match="cannot be captured"):
        step = xrt_torch.capture_graph(waits(net), batches(1)[0], optimizer=optimizer)
    assert_usable()
    torch.manual_seed(3)
    assert train(step, batches()) == pytest.approx(wanted, rel=5e-3, abs=2e-3)
    assert step.report.eager_calls == STEPS
    assert len(step.reasons) == 1
    other = make_net()
    good = xrt_torch.capture_graph(loss_of(other), batches(1)[0], optimizer=sgd(other.parameters()), strict=True)
    train(good, batches(3))
    assert good.report.replays == 3
    with pytest.raises(UnsupportedOperationError, match="cannot be captured"):
        xrt_torch.capture_graph(waits(net), batches(1)[0], optimizer=optimizer, strict=True)


def test_a_failed_capture_leaves_the_graphs_of_the_step_working():
    net = make_net(dropout=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate(0.0), fused=True)

    def fn(x, y):
        loss = loss_of(net)(x, y)
        if x.shape[0] == 8:
            loss.item()
        return loss

    step = xrt_torch.capture_graph(fn, optimizer=optimizer)
    step(*batches(1, 16)[0])
    with pytest.warns(XpuRuntimeWarning, match="cannot be captured"):
        step(*batches(1, 8)[0])
    torch.manual_seed(5)
    first = train(step, batches(1, 16) * 3)
    torch.manual_seed(5)
    assert train(step, batches(1, 16) * 3) == first, "random numbers do not follow the seed any more"
    assert len(set(first)) == 3


def test_an_error_in_the_middle_of_a_capture():
    net = make_net()
    before = copy.deepcopy(net.state_dict())

    def fn(x, y):
        if torch.cuda.is_current_stream_capturing():
            net(x)
            raise ValueError("not here")
        return loss_of(net)(x, y)

    with pytest.warns(XpuRuntimeWarning, match="ValueError: not here"):
        xrt_torch.capture_graph(fn, batches(1)[0], optimizer=sgd(net.parameters()))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_earlier_loss_that_is_still_alive_does_not_spoil_a_capture():
    net = make_net()
    alive = loss_of(net)(*batches(1)[0])
    step = xrt_torch.capture_graph(loss_of(net), batches(1)[0], optimizer=sgd(net.parameters()), strict=True)
    train(step, batches(2))
    assert step.report.replays == 2
    assert alive.requires_grad


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says of TF32 and the like
def test_around_a_compiled_model():
    theirs, net = make_net(), make_net()
    wanted = train(eagerly(loss_of(theirs), sgd(theirs.parameters())), batches(6))
    compiled = torch.compile(net)
    step = xrt_torch.capture_graph(loss_of(compiled), batches(1)[0], optimizer=sgd(net.parameters()), strict=True)
    assert train(step, batches(6)) == pytest.approx(wanted, rel=1e-2, abs=1e-3)
    assert step.report.whole_step


def test_accumulating_in_the_function():
    theirs, net = make_net(), make_net()

    def whole(net, optimizer):
        def fn(xs, ys):
            optimizer.zero_grad()
            total = torch.zeros((), device=DEVICE)
            for x, y in zip(xs, ys, strict=True):
                loss = loss_of(net)(x, y) / len(xs)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return fn

    data = [tuple(zip(*batches(2), strict=True)) for _ in range(4)]
    wanted = train(whole(theirs, sgd(theirs.parameters())), data)
    step = xrt_torch.capture_graph(whole(net, sgd(net.parameters())), data[0], strict=True)
    assert train(step, data) == pytest.approx(wanted, rel=5e-3, abs=2e-3)
    assert step.report.optimizer == "in fn"


def test_another_thread_is_refused_and_may_have_its_own():
    net = make_net()
    step = xrt_torch.capture_graph(loss_of(net), batches(1)[0], optimizer=sgd(net.parameters()), strict=True)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for batch in batches(20):
                step(*batch)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(problem, UnsupportedOperationError) for problem in problems), problems
    train(step, batches(2))


def test_a_parameter_on_another_device_is_said():
    net = make_net()
    net.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.warns(XpuRuntimeWarning, match="parameters and buffers are on cpu and cuda:0"):
        step = xrt_torch.capture_graph(loss_of(net), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    step(*batches(1)[0])
    assert not step.report.captured


def test_the_host_needs_little_time_for_a_replay():
    """Host work of one call, without waiting for the device, of a model with 300 modules and 200 parameters."""
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(100)))
    net.to(DEVICE)
    step = xrt_torch.capture_graph(
        lambda x: net(x).mean(), (torch.ones(4, 8, device=DEVICE),), optimizer=sgd(net.parameters()), strict=True
    )
    graph = next(iter(step._graphs.values())).recording.graph
    x = torch.ones(4, 8, device=DEVICE)

    def best(run, *inputs) -> float:
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(*inputs)
            times.append(time.perf_counter() - start)
        return min(times)

    extra = best(step, x) - best(graph.replay)
    assert extra < 200e-6, f"a call costs {extra * 1e6:.0f} us over the replay alone"


def test_a_block_is_captured_and_replayed():
    net, theirs = make_net(), make_net()
    optimizer, their_optimizer = (torch.optim.Adam(n.parameters(), lr=1e-3) for n in (net, theirs))
    static_x, static_y = (t.clone() for t in batches(1)[0])
    fn, their_fn = loss_of(net), loss_of(theirs)
    before = copy.deepcopy(net.state_dict())
    for _ in range(3):
        y = net(static_x)
        loss = torch.nn.functional.cross_entropy(y, static_y)
        loss.backward()
    net.load_state_dict(before)
    optimizer.zero_grad()
    with xrt_torch.capture_graph() as g:
        loss = fn(static_x, static_y)
        loss.backward()
    assert g.bytes > 0
    found, wanted = [], []
    for x, y in batches():
        static_x.copy_(x)
        static_y.copy_(y)
        g.replay()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(eagerly(their_fn, their_optimizer)(x, y).item())
    assert found == pytest.approx(wanted, rel=5e-3, abs=2e-3), "zero_grad has taken the gradients away for good"
    g.reset()
    with pytest.raises(InputError, match="nothing was captured"):
        g.replay()


def test_two_blocks_share_a_pool():
    x = torch.ones(1 << 20, device=DEVICE)
    with xrt_torch.capture_graph() as one:
        a = x * 2
    with xrt_torch.capture_graph(pool=one.pool()) as two:
        b = x * 3
    one.replay()
    two.replay()
    assert (a.sum().item(), b.sum().item()) == (2.0 * (1 << 20), 3.0 * (1 << 20))


@pytest.mark.parametrize("way", ["item", "raise"])
def test_a_block_that_cannot_be_captured(way):
    x = torch.ones(4, device=DEVICE)
    block = xrt_torch.capture_graph()
    expected = (UnsupportedOperationError, "the block cannot be captured") if way == "item" else (KeyError, "mine")

    def run() -> None:
        with block:
            y = x * 2
            if way == "item":
                y.sum().item()
            raise KeyError("mine")

    with pytest.raises(expected[0], match=expected[1]):
        run()
    assert_usable()
    with pytest.raises(InputError, match="nothing was captured"):
        block.replay()


SEED_8_1 = """
import torch
import xpuruntime.pytorch as xrt_torch

# 모델 정의
model = MyModel().cuda()
optimizer = torch.optim.Adam(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

# xpuruntime 커널 정책 설정
xrt_torch.set_kernel_policy(
    matmul="cublasLt",
    attention="flash_v2",
)

# 학습 루프
for epoch in range(num_epochs):
    for batch, target in dataloader:
        batch, target = batch.cuda(), target.cuda()

        with xrt_torch.autocast(dtype=torch.float16):
            output = model(batch)
            loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

SEED_8_2 = """
import torch
import xpuruntime.pytorch as xrt_torch

model = MyModel().cuda()
optimizer = torch.optim.Adam(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

# 정적 입출력 버퍼
static_input = torch.randn(32, 3, 224, 224, device='cuda')
static_target = torch.randint(0, 1000, (32,), device='cuda')

# Warmup
xrt_torch.set_kernel_policy(matmul="cublasLt")
for _ in range(3):
    output = model(static_input)
    loss = criterion(output, static_target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

# Graph capture
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    output = model(static_input)
    loss = criterion(output, static_target)
    loss.backward()

# 학습 (Graph replay)
for batch, target in dataloader:
    static_input.copy_(batch)
    static_target.copy_(target)
    g.replay()
    optimizer.step()
    optimizer.zero_grad()
"""


class Picture(torch.nn.Module):
    """Patches, a layer of attention and a head: of the sizes in the seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 32, stride=32)
        self.norm = torch.nn.LayerNorm(64)
        self.qkv = torch.nn.Linear(64, 192)
        self.head = torch.nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(tokens).chunk(3, dim=-1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head((tokens + mixed.transpose(1, 2).flatten(2)).mean(1))


def pictures(count: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 3, 224, 224, generator=generator).to(device),
            torch.randint(0, 1000, (32,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def test_the_seeds_training_loop():
    torch.manual_seed(0)
    names = {"MyModel": Picture, "num_epochs": 8, "dataloader": pictures(2, "cpu")}
    exec(SEED_8_1, names)
    torch.manual_seed(0)
    xrt_torch.clear_kernel_policy()
    plain = {"MyModel": Picture, "num_epochs": 8, "dataloader": pictures(2, "cpu")}
    without = SEED_8_1.replace('matmul="cublasLt",', "").replace('attention="flash_v2",', "")
    exec(without, plain)
    assert names["loss"].item() == pytest.approx(plain["loss"].item(), rel=2e-2)


def test_the_seeds_graph_loop():
    torch.manual_seed(0)
    names = {"MyModel": Picture, "dataloader": pictures(3, "cuda")}
    exec(SEED_8_2, names)
    batch, target = names["dataloader"][-1]
    torch.cuda.synchronize()
    assert torch.isfinite(names["loss"]).item()
    assert torch.equal(names["static_input"], batch)
    model, criterion = names["model"], names["criterion"]
    fresh = criterion(model(batch), target).item()
    assert names["loss"].item() == pytest.approx(fresh, rel=0.2), "the replay did not compute the loss of this model"
