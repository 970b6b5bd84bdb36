# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Steps that cannot be captured on a CUDA device are told, and leave CUDA and other graphs working."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from captured_training import (
    STEPS,
    assert_usable,
    batches,
    eagerly,
    loss_of,
    make_net,
    rate,
    sgd,
    train,
)

import xpuruntime.pytorch as xrt_torch
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")


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
