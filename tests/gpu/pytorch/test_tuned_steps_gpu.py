# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Eager steps under a tuned policy: the way to a kernel is calibrated on this machine, and no step becomes slower."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.measuring.rounds import measure, timed
from xpuruntime.measuring.statistics import Margin, RatioVerdict
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.step_cost import route_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left", "nothing_is_tuned")]

CUDA = torch.device("cuda", 0)
BEST = xrt.KernelPolicy(
    matmul="auto", layer_norm="auto", conv="auto", attention="auto", auto_strategy="best_performance"
)


@pytest.mark.parametrize("op", ["matmul", "layer_norm", "rms_norm", "conv", "attention"])
def test_the_way_to_a_kernel_costs_microseconds(op: str) -> None:
    with xt.kernel_policy(xrt.KernelPolicy(**{op: "auto"}, auto_strategy="best_performance")):
        active = active_policy()
        assert active is not None
        cost = route_cost(active, op, CUDA, {"torch": "this one"})
        routes = dict(active.routes)
    print(f"{op}: {cost * 1e6:.1f} us on the way to a kernel, by {CONTEXT.fast_path}")
    assert 0 <= cost < 200e-6 or cost == math.inf
    assert not routes


def encoder(width: int, batch: int, length: int) -> Callable[[], None]:
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, device=CUDA)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(batch, length, width, device=CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@pytest.mark.parametrize("shape", [(64, 2, 16), (256, 4, 64), (1024, 8, 512)], ids=["tiny", "small", "device-bound"])
def test_an_eager_step_is_not_slower_under_a_tuned_policy(shape: tuple[int, int, int]) -> None:
    step = encoder(*shape)

    def under(policy: Any) -> Callable[[int, int], Sequence[float]]:
        inner = timed(step, torch.cuda.synchronize)
        entered = contextlib.nullcontext() if policy is None else xt.kernel_policy(policy)

        def sample(calls: int, samples: int) -> Sequence[float]:
            with entered:
                step()
                torch.cuda.synchronize()
                return inner(calls, samples)

        return sample

    with xt.kernel_policy(BEST):
        for _ in range(3):
            step()
    measurement = measure(
        {"none": under(None), "tuned": under(BEST)}, control="none", margin=Margin(0.02, 0.0), rounds=(11, 121),
        budget=60.0, block=0.1,
    )  # fmt: skip
    ratio = measurement.comparisons["tuned"]
    chosen = {key: one.chosen.kernel for (_, key, _), one in CONTEXT.times.items()}
    print(f"{shape}: tuned takes {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of none; {chosen}")
    assert ratio.verdict is not RatioVerdict.SLOWER, (ratio, chosen)
