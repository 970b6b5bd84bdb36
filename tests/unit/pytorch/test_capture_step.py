# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A captured step, apart from CUDA: it trains as eager code does, keeps graphs by key, and says what it cannot."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from recorded_steps import captured  # noqa: E402 - needs torch

from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.policies import KernelPolicy, Policy  # noqa: E402
from xpuruntime.pytorch.held import Held, holding  # noqa: E402


def lr(value: float = 0.05) -> torch.Tensor:
    return torch.tensor(value)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=lr(0.01), fused=True, capturable=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=lr(0.01), fused=True, capturable=True, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, weight_decay=0.1, fused=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, nesterov=True, fused=True),
    "sgd dampened": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, dampening=0.5, fused=True),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=lr(), fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), torch.nn.Dropout(dropout),
            torch.nn.Linear(12, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make(optimizer: str = "adamw", dropout: float = 0.0):
    torch.manual_seed(0)
    net = Net(dropout)
    return net, OPTIMIZERS[optimizer](net.parameters())


def batches(count: int, rows: int = 8):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(rows, n, generator=generator) for n in (6, 1)) for _ in range(count)]


def loss_of(net):
    return lambda x, y: (net(x) - y).square().mean()


def train_eagerly(net, optimizer, data, scheduler=None):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same_weights(one, other) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_eager_code_does(optimizer):
    theirs, their_optimizer = make(optimizer)
    wanted = train_eagerly(theirs, their_optimizer, batches(6))
    net, own = make(optimizer)
    before = copy.deepcopy(net.state_dict())
    step, recorder = captured(loss_of(net), optimizer=own)
    ready = step.prepare(*batches(1)[0])
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), f"capturing changed {name}"
    assert [step(*batch).item() for batch in batches(6)] == pytest.approx(wanted, rel=1e-5)
    same_weights(net, theirs)
    assert recorder.records == 1
    assert ready == (optimizer != "sgd dampened"), "what dampened momentum begins with is its first gradient"
    assert step.report.eager_calls == (optimizer == "sgd dampened")
    assert step.reasons == ()
    assert step.report.optimizer == "in the graph"


def test_an_optimizer_with_state_goes_on_from_it():
    theirs, their_optimizer = make()
    wanted = train_eagerly(theirs, their_optimizer, batches(8))
    net, own = make()
    train_eagerly(net, own, batches(8)[:3])
    state = copy.deepcopy(own.state_dict())
    step, _ = captured(loss_of(net), optimizer=own)
    assert step.prepare(*batches(1)[0])
    for key, entry in own.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, state["state"][key][name]), f"capturing changed {name} of parameter {key}"
    assert [step(*batch).item() for batch in batches(8)[3:]] == pytest.approx(wanted[3:], rel=1e-5)


def test_an_optimizer_whose_first_state_is_not_known():
    class Own(torch.optim.Optimizer):
        """Keeps the mean of all gradients, beginning with the first."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": lr(), "capturable": True})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "mean" in state:
                        state["mean"].lerp_(p.grad, 0.5)
                    else:
                        state["mean"] = p.grad.clone()
                    p.sub_(state["mean"] * group["lr"])

    def made():
        torch.manual_seed(0)
        net = Net()
        return net, Own(net.parameters())

    theirs, their_optimizer = made()
    wanted = train_eagerly(theirs, their_optimizer, batches(5))
    net, own = made()
    step, recorder = captured(loss_of(net), optimizer=own)
    assert [step(*batch).item() for batch in batches(5)] == pytest.approx(wanted, rel=1e-5)
    assert (step.report.eager_calls, step.report.replays, recorder.records) == (1, 4, 1)
    assert any("Own makes state in its first step" in note for note in step.report.notes)


def test_an_optimizer_that_is_new_at_each_step_is_never_captured():
    class Renewing(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": lr(), "capturable": True})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["last"] = p.grad.clone()
                p.sub_(p.grad * self.param_groups[0]["lr"])

    net, _ = make()
    step, recorder = captured(loss_of(net), optimizer=Renewing(net.parameters()))
    for batch in batches(2):
        step(*batch)
    with pytest.warns(XpuRuntimeWarning, match="puts new tensors into its state"):
        step(*batches(1)[0])
    step(*batches(1)[0])
    assert recorder.records == 0
    assert step.report.eager_calls == 4
    assert not step.report.captured


def test_the_learning_rate_follows_a_scheduler():
    def scheduled(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)

    theirs, their_optimizer = make("sgd momentum")
    wanted = train_eagerly(theirs, their_optimizer, batches(6), scheduled(their_optimizer))
    net, own = make("sgd momentum")
    scheduler = scheduled(own)
    place = own.param_groups[0]["lr"].data_ptr()
    step, recorder = captured(loss_of(net), optimizer=own)
    found = []
    for batch in batches(6):
        found.append(step(*batch).item())
        scheduler.step()
    assert own.param_groups[0]["lr"].data_ptr() == place, "the scheduler put another tensor in"
    assert found == pytest.approx(wanted, rel=1e-5)
    assert recorder.records == 1


def test_random_numbers_are_where_they_were():
    import random

    import numpy as np

    net, own = make(dropout=0.5)
    step, _ = captured(loss_of(net), optimizer=own)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    wanted = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert step.prepare(*batches(1)[0])
    assert torch.equal(torch.rand(3), wanted[0])
    assert (random.random(), np.random.rand()) == wanted[1:]


def test_dropout_trains_as_eager_code_does():
    theirs, their_optimizer = make(dropout=0.5)
    torch.manual_seed(3)
    wanted = train_eagerly(theirs, their_optimizer, batches(4))
    net, own = make(dropout=0.5)
    step, _ = captured(loss_of(net), optimizer=own)
    torch.manual_seed(3)
    assert [step(*batch).item() for batch in batches(4)] == pytest.approx(wanted, rel=1e-5)


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
    with holding(Held(Policy(kernels=KernelPolicy(matmul="torch")))):
        assert new(x, y), "a policy"
    with holding(Held(Policy(kernels=KernelPolicy(matmul="torch")))):
        assert not new(x, y), "an equal policy needs no other graph"
    with holding(Held(Policy(kernels=KernelPolicy(matmul="cpu.reference")))):
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


def test_a_scaler_inside_of_the_graph():
    def made():
        net, optimizer = make("sgd momentum")
        return net, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    theirs, their_optimizer, their_scaler = made()
    wanted, scales = [], []
    for x, y in batches(7):
        their_optimizer.zero_grad()
        loss = loss_of(theirs)(x, y)
        their_scaler.scale(loss).backward()
        their_scaler.step(their_optimizer)
        their_scaler.update()
        wanted.append(loss.item())
        scales.append(their_scaler.get_scale())
    net, own, scaler = made()
    step, recorder = captured(loss_of(net), optimizer=own, scaler=scaler)
    assert step.prepare(*batches(1)[0])
    assert scaler.get_scale() == 1024.0
    found = []
    for batch, scale in zip(batches(7), scales, strict=True):
        found.append(step(*batch).item())
        assert scaler.get_scale() == scale
    assert found == pytest.approx(wanted, rel=1e-5)
    assert recorder.records == 1
    assert step.report.scaler == "in the graph"


def test_a_gradient_that_is_infinite_skips_the_step_and_lowers_the_scale():
    net, own = make("sgd momentum")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step, _ = captured(loss_of(net), optimizer=own, scaler=scaler)
    x, y = batches(1)[0]
    step(x, y)
    before = [p.clone() for p in net.parameters()]
    step(x, y * float("inf"))
    assert scaler.get_scale() == 512.0
    for p, wanted in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, wanted)


def test_gradients_are_clipped_before_the_step():
    def clip(net):
        return lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)

    theirs, their_optimizer = make("sgd plain")
    for x, y in batches(3):
        their_optimizer.zero_grad()
        loss_of(theirs)(x, y).backward()
        clip(theirs)()
        their_optimizer.step()
    for scaler in (None, torch.amp.GradScaler("cpu")):
        net, own = make("sgd plain")
        step, _ = captured(loss_of(net), optimizer=own, scaler=scaler, before_step=clip(net))
        for batch in batches(3):
            step(*batch)
        same_weights(net, theirs)


def test_an_optimizer_that_steps_after_each_replay():
    theirs = Net()
    net = copy.deepcopy(theirs)
    wanted = train_eagerly(theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.1), batches(5))
    step, recorder = captured(loss_of(net), optimizer=torch.optim.Adagrad(net.parameters(), lr=0.1), inside=False)
    assert [step(*batch).item() for batch in batches(5)] == pytest.approx(wanted, rel=1e-5)
    assert recorder.records == 1
    assert step.report.optimizer == "after each replay"
    assert not step.report.whole_step


def test_a_function_that_does_the_whole_step_itself():
    theirs, their_optimizer = make()
    net, own = make()

    def accumulate(net, optimizer):
        def fn(xs, ys):
            optimizer.zero_grad()
            total = torch.zeros(())
            for x, y in zip(xs, ys, strict=True):
                loss = (net(x) - y).square().mean() / len(xs)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return fn

    step, recorder = captured(accumulate(net, own))
    eager = accumulate(theirs, their_optimizer)
    for _ in range(4):
        xs, ys = zip(*batches(3), strict=True)
        assert step(xs, ys).item() == pytest.approx(eager(xs, ys).item(), rel=1e-5)
    same_weights(net, theirs)
    assert recorder.records == 1
    assert step.report.optimizer == "in fn"


def test_a_function_without_modules_or_gradients():
    step, recorder = captured(lambda x: {"twice": x * 2})
    with torch.no_grad():
        for value in (1.0, 2.0):
            assert step(torch.full((3,), value))["twice"].tolist() == [2 * value] * 3
    assert recorder.records == 1
    assert step.graphs[0].key == "float32[3]; no_grad"


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


def test_no_warning_is_left_to_the_user():
    net, own = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, _ = captured(loss_of(net), optimizer=own)
        scheduler = torch.optim.lr_scheduler.StepLR(own, 2)
        for batch in batches(3):
            step(*batch)
            scheduler.step()
