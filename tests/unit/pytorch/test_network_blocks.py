# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Blocks of networks under a strict policy, plain and checkpointed: the same losses, and evidence that is true."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from network_blocks import BLOCKS, trained  # noqa: E402 - it needs PyTorch
from torch import nn  # noqa: E402 - it needs PyTorch
from torch.nn.utils import parametrizations  # noqa: E402 - it needs PyTorch
from torch.optim import swa_utils  # noqa: E402 - it needs PyTorch
from torch.utils.checkpoint import checkpoint  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]
STRICT = xrt.Policy(
    mode="strict",
    kernels={
        "matmul": "cpu.blas",
        "attention": ["cpu.reference", "torch"],
        "layer_norm": "cpu.vectorised",
        "conv": ["cpu.gemm_conv", "torch"],
    },
)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
WAYS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "plain": lambda net: net,
    "checkpointed": lambda net: lambda x: checkpoint(net, x, use_reentrant=False),
    "checkpointed, reentrant": lambda net: lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=True),
}


def _check(train: Callable[[], Any]) -> None:
    """Train with and without a policy, and look at the rows and at what is left."""
    want = train()
    with xt.kernel_policy(STRICT), xt.explain() as found:
        got = train()
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
    products = [row for row in found.rows if row.op == "matmul"]
    assert {(row.resolved, row.status) for row in products} == {("cpu.blas", "honoured")}
    assert {row.status for row in found.rows if row.op != "softmax"} <= {"honoured", "other"}  # of windows by swin
    assert not [row for row in found.rows if row.status == "other" and row.operator in _PRODUCTS]
    assert "xpuruntime" not in torch._C._dispatch_dump("aten::mm")
    assert train() == want


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "plain") for name in BLOCKS), *(("swin", way) for way in WAYS if way != "plain")]
)
def test_two_steps(name: str, way: str) -> None:
    _check(lambda: trained(name, WAYS[way]))


def test_a_product_at_which_a_checkpoint_ends_its_second_forward_is_no_row() -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        loss = checkpoint(net, torch.randn(4, 8), use_reentrant=False).square().sum()
        loss.backward()
        return [float(loss.detach()), float(net[0].weight.grad.sum())]

    _check(train)


class _Adapted(nn.Module):
    """A linear layer with an update of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + (x @ self.a.T) @ self.b.T
        return result


def _steps(change: Callable[[nn.Sequential, int], Callable[[torch.Tensor], Any]]) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    losses = []
    for turn in range(3):
        called = change(net, turn)
        optimizer = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)
        loss = called(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _swapped(net: nn.Sequential, turn: int) -> nn.Module:
    if turn == 1:
        net[0] = _Adapted(net[0])  # type: ignore[arg-type]
    return net


def _copied(net: nn.Sequential, turn: int) -> nn.Module:
    return copy.deepcopy(net) if turn == 1 else net


def _averaged(net: nn.Sequential, turn: int) -> nn.Module:
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(net)
    return average if turn == 2 else net


def _weight_norm(net: nn.Sequential, turn: int) -> nn.Module:
    if not turn:
        parametrizations.weight_norm(net[0])
    return net


def _wrapped(net: nn.Sequential, _: int) -> nn.Module:
    inner = net.forward

    def forward(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            return inner(x)

    net.forward = forward  # type: ignore[method-assign]
    return net


def _functional(net: nn.Sequential, _: int) -> Callable[[torch.Tensor], Any]:
    return lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,))


@pytest.mark.parametrize("change", [_swapped, _copied, _averaged, _weight_norm, _wrapped, _functional])
def test_modules_that_are_changed_in_the_middle(change: Any) -> None:
    _check(lambda: _steps(change))
