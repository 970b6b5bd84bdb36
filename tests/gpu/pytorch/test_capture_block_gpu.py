# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Blocks captured on a CUDA device with `with capture_graph()`."""

from __future__ import annotations

import copy

import pytest
import torch
from captured_training import (
    DEVICE,
    assert_usable,
    batches,
    eagerly,
    loss_of,
    make_net,
)

import xpuruntime.pytorch as xrt_torch
from xpuruntime.errors import InputError, UnsupportedOperationError

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")


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
    with xrt_torch.capture_graph() as graph:
        a = x * 2
    with xrt_torch.capture_graph(pool=graph.pool()) as two:
        b = x * 3
    graph.replay()
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
