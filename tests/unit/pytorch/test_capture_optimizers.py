# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A captured step, apart from CUDA, trains as eager code does: optimizers, schedulers, scalers, random numbers."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from recorded_steps import captured  # noqa: E402 - needs torch
from trained_net import OPTIMIZERS, Net, batches, loss_of, lr, make, same_weights, train_eagerly  # noqa: E402

from xpuruntime.errors import XpuRuntimeWarning  # noqa: E402


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
