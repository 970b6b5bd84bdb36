# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captured training steps on a CUDA device train as eager code does: optimizers, scalers, schedulers, seeds."""

from __future__ import annotations

import copy

import pytest
import torch
from captured_training import (
    DEVICE,
    STEPS,
    adamw,
    assert_same_state,
    batches,
    eagerly,
    loss_of,
    make_net,
    rate,
    sgd,
    train,
)

import xpuruntime.pytorch as xrt_torch
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")


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


def test_a_captured_step_needs_little_more_memory_than_its_eager_one():
    """Its parameters are most of what it needs, with gradients and state that are each as large."""

    def made():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4))).to(DEVICE)
        return net, adamw(net.parameters())

    def peak_of(step_of):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        net, optimizer = made()
        data = [(torch.randn(64, 4096, device=DEVICE), torch.randn(64, 4096, device=DEVICE)) for _ in range(3)]
        losses = train(step_of(lambda x, y: (net(x) - y).square().mean(), optimizer, data[0]), data)
        return torch.cuda.max_memory_allocated(DEVICE) - before, losses

    eager, wanted = peak_of(lambda loss, optimizer, _: eagerly(loss, optimizer))
    captured, found = peak_of(
        lambda loss, optimizer, batch: xrt_torch.capture_graph(loss, batch, optimizer=optimizer, strict=True)
    )
    assert found == pytest.approx(wanted, rel=1e-3)
    assert captured <= 1.1 * eager
