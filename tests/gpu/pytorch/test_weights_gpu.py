# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Quantized weights on a CUDA device: storage, arithmetic, and layers that take less time than bf16 would."""

from __future__ import annotations

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch

pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
pytestmark = [
    pytest.mark.usefixtures("cuda_is_usable_afterwards"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def observe(count: int = 3, width: int = 16384, rows: int = 16, **weights):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    model = model.to("cuda", torch.bfloat16).eval()
    policy = xrt.Policy(mode="strict", execution={"weights": weights})
    xrt_torch.quantize(model, policy)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), xrt_torch.kernel_policy(policy, root=model):
        model(x)
        with xrt_torch.explain(root=model) as found:
            for _ in range(3):
                model(x)
    return found


@pytest.mark.parametrize(("storage", "compute"), [("fp8", "fp8"), ("int4", "float")])
def test_less_is_read_than_of_bf16(storage, compute):
    found = observe(storage=storage, compute=compute)
    assert found.weight_deviations == (), found
    assert {weight.storage for weight in found.weights} == {storage}
    traffic = found.weight_traffic  # int4 needs less time than reading in bf16 on some cards alone
    assert traffic.verdict == ("proved" if traffic.layers_us < traffic.floor_us else "inconclusive"), traffic


def test_weights_that_are_turned_into_floats_prove_nothing():
    found = observe(storage="int8", compute="float")
    assert found.weight_traffic.verdict == "inconclusive", found.weight_traffic
    assert found.weight_traffic.layers_us >= found.weight_traffic.floor_us > 0


@pytest.mark.parametrize("sizes", [{"width": 256}, {"rows": 512}])
def test_what_tells_nothing_of_memory_is_not_judged(sizes):
    found = observe(storage="int8", compute="float", **sizes)
    assert found.weight_traffic.verdict == "unobservable", found.weight_traffic
