# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Quantized weights on a CUDA device: storage, arithmetic, and layers that take less time than bf16 would."""

from __future__ import annotations

import sys

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch

pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
pytestmark = [
    pytest.mark.usefixtures("cuda_is_usable_afterwards"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:int8 weights that compute in floats are slower:xpuruntime.XpuRuntimeWarning"),
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
    with pytest.warns(xrt.XpuRuntimeWarning, match="slower than bf16 here: a captured step took 9.7 times"):
        found = observe(storage="int8", compute="float")
    traffic = found.weight_traffic
    assert traffic.verdict == "inconclusive", traffic
    assert traffic.layers_us >= traffic.floor_us > 0
    assert traffic.layers_us > traffic.bf16_us > 0
    assert traffic.reason.startswith("slower than bf16 here: linear layers took"), traffic


@pytest.fixture
def decoder():
    sys.modules.setdefault("torchvision", None)
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=4096, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=128, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).bfloat16().eval().cuda()


def generated(model, compiled=False, **weights):
    policy = xrt.Policy(mode="strict", execution={"weights": {"exclude": ["lm_head"], **weights}})
    xrt_torch.quantize(model, policy)
    captured = xrt_torch.capture_decode(model, max_length=64, kv_ranges=[64], fuse=False, compile=compiled, strict=True)
    ids = torch.ones(1, 4, dtype=torch.long, device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20}
    with torch.no_grad(), xrt_torch.kernel_policy(policy, root=model):
        captured.generate(ids, **options)
        with xrt_torch.explain(root=model) as found:
            captured.generate(ids, **options)
    return found.weight_traffic


@pytest.mark.parametrize("weights", [{"storage": "int4"}, {"storage": "fp8", "compute": "fp8"}, {"storage": "int8"}])
def test_captured_steps_are_judged_whole(decoder, weights):
    traffic = generated(decoder, **weights)
    assert "a captured step took" in traffic.reason, traffic
    assert traffic.verdict == ("proved" if traffic.layers_us < traffic.floor_us else "inconclusive"), traffic
    print(weights, traffic)


def test_captured_steps_of_too_few_rows_are_refused(decoder):
    with pytest.raises(xrt.UnsupportedOperationError, match="need 17 rows or more on CUDA devices; fp8 that"):
        generated(decoder, compiled=True, storage="int8", compute="int8")


@pytest.mark.parametrize("sizes", [{"width": 256}, {"rows": 512}])
def test_what_tells_nothing_of_memory_is_not_judged(sizes):
    found = observe(storage="int8", compute="float", **sizes)
    assert found.weight_traffic.verdict == "unobservable", found.weight_traffic
