# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps tuned on a CUDA device: captured and compiled variants keep the losses, and the winner trains."""

from __future__ import annotations

import copy

import pytest
import torch
from captured_training import adamw, batches, eagerly, loss_of, make_net, train

import xpuruntime.pytorch as xrt_torch

pytestmark = [
    pytest.mark.usefixtures("cuda_is_usable_afterwards"),
    # PyTorch's own, while it compiles and captures
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


def test_the_winner_trains_as_the_eager_step():
    theirs = make_net()
    wanted = train(eagerly(loss_of(theirs, None), adamw(theirs.parameters())), batches())
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    tuned = xrt_torch.tune(loss_of(net, None), batches(1)[0], optimizer=adamw(net.parameters()), budget=20.0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    rows = {row.name: row for row in tuned.candidates}
    for name in ("compile", "compile:reduce-overhead", "capture", "capture:compile"):
        assert rows[name].seconds is not None, rows[name].reason
        assert rows[name].memory
    assert rows["capture:compile"].ratio is not None
    with tuned:
        got = train(tuned, batches())
    assert got == pytest.approx(wanted, rel=1e-2)


def test_captures_that_share_an_optimizer_keep_their_memory():
    net = make_net()
    optimizer = adamw(net.parameters())
    tuned = xrt_torch.tune(
        loss_of(net, None), batches(1)[0], optimizer=optimizer, launches=["capture", "capture:compile"], budget=20.0
    )
    rows = {row.name: row for row in tuned.candidates}
    assert all(rows[name].ratio is not None for name in ("capture", "capture:compile", "capture+auto"))
    assert all(rows[name].loss_difference <= tuned.tolerance for name in ("capture", "capture:compile"))


def test_compiled_steps_are_not_compiled_anew_in_the_race():
    net = make_net()
    tuned = xrt_torch.tune(
        loss_of(net, None), batches(1)[0], optimizer=adamw(net.parameters()), launches=["compile"], budget=20.0
    )
    rows = {row.name: row for row in tuned.candidates}
    assert max(rows["compile"].seconds, rows["compile+auto"].seconds) < 10 * rows["eager"].seconds


def test_a_captured_step_of_a_compiled_function_is_one_graph():
    net = make_net()
    optimizer = adamw(net.parameters())
    step = xrt_torch.capture_graph(loss_of(net, None), batches(1)[0], optimizer=optimizer, compile=True, strict=True)
    assert step.report.whole_step
    theirs = make_net()
    wanted = train(eagerly(loss_of(theirs, None), adamw(theirs.parameters())), batches())
    assert train(step, batches()) == pytest.approx(wanted, rel=1e-2)
