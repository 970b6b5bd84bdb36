# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a plain training step of a model spends outside of a policy's reach: named, and no operation among it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.coverage.model_operations import kind_of_rest  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_policy_is_left"), pytest.mark.torch]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def trained(model: torch.nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def made(family: str, **more: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**_SIZES, **more))
    return model


@pytest.mark.parametrize(
    ("model", "operations"),
    [
        (lambda: made("Llama", intermediate_size=64, num_key_value_heads=2),
         {"matmul", "attention", "rms_norm", "rope", "swiglu", "cross_entropy"}),
        (lambda: made("Gemma", intermediate_size=64, num_key_value_heads=1, head_dim=8),
         {"matmul", "attention", "rms_norm", "rope", "geglu", "cross_entropy"}),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
         {"matmul", "attention", "layer_norm", "cross_entropy"}),
    ],
    ids=["llama", "gemma", "gpt2"],
)  # fmt: skip
def test_each_operation_of_a_plain_step_is_named_forward_and_backward(model, operations):
    network, ids = model(), torch.randint(1, 64, (2, 8))
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    trained(network, ids, optimizer)
    with xt.explain() as found:
        trained(network, ids, optimizer)
    for phase in ("train", "backward"):
        seen = {row.op for row in found.rows if row.status == "default" and row.phase == phase}
        assert seen >= operations, phase
    assert {row.status for row in found.rows} == {"default", "other"}
    others = [row for row in found.rows if row.status == "other"]
    assert not [row.operator for row in others if not row.kind]
    assert {"optimizer", "gradient accumulation", "copy", "embedding"} <= {row.kind for row in others}
    assert not {row.operator for row in others} & {"aten::rsqrt", "aten::silu", "aten::neg", "aten::_log_softmax"}


def test_scores_and_masks_of_eager_attention_are_no_rotation():
    calls = {}
    for kind in ("sdpa", "eager"):
        network = made("Llama", intermediate_size=64, num_key_value_heads=2, attn_implementation=kind)
        with xt.explain() as found:
            network(torch.randint(1, 64, (2, 8)), use_cache=False).logits.sum().backward()
        rows = [row for row in found.rows if row.op == "rope"]
        calls[kind] = {phase: sum(row.count for row in rows if row.phase == phase) for phase in ("train", "backward")}
    assert calls["eager"] == calls["sdpa"]
    assert min(calls["eager"].values()) > 0


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_what_an_adapted_class_computes_around_a_kernel_is_no_bypass():
    network, ids = made("Llama", intermediate_size=64, num_key_value_heads=2), torch.randint(1, 64, (2, 8))
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    with xt.kernel_policy(rms_norm="cpu.vectorised"), xt.explain() as found:
        trained(network, ids, optimizer)
    norms = [row for row in found.rows if row.op == "rms_norm"]
    assert {row.status for row in norms} == {"honoured"}
    assert sum(row.count for row in norms if row.phase == "train") == 5
    refused = xt.kernel_policy(rope="triton:no.such.rope", swiglu="liger.swiglu", cross_entropy="liger.cross_entropy")
    with refused, xt.explain() as found:
        trained(network, ids, optimizer)
    rows = {(row.op, row.status, row.phase) for row in found.rows if row.op in ("rope", "swiglu", "cross_entropy")}
    assert rows == {
        (op, "substituted", phase) for op in ("rope", "swiglu", "cross_entropy") for phase in ("train", "backward")
    }


def test_a_norm_that_is_not_known_has_bypassed_the_policy_that_names_it():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * 3.0 + x.abs()

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Norm())
    with xt.explain() as found:
        model(torch.ones(2, 8)).sum().backward()
    assert {row.module for row in found.rows if row.operator == "nn::Norm"} == {"1"}
    assert {row.status for row in found.rows if row.op == "rms_norm"} == {"default"}


@pytest.mark.parametrize(
    ("name", "around", "kind"),
    [
        # of a step of Llama on an H200, the longest first
        ("aten::mul", (), "elementwise"),
        ("aten::copy_", ("aten::to", "aten::_to_copy"), "copy"),
        ("aten::_fused_adamw_", ("Optimizer.step#AdamW.step",), "optimizer"),
        ("aten::add_", ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
         "gradient accumulation"),
        ("aten::_log_softmax", (), "loss"),
        ("aten::sum", (), "reduction"),
        ("aten::fill_", (), "fill"),
        ("aten::embedding_dense_backward", (), "embedding"),
        ("aten::gather", (), "indexing"),
        ("Memcpy DtoD (Device -> Device)", (), "copy"),
        ("aten::native_dropout", (), "random"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", (), "communication"),
        ("triton_poi_fused_add_mul_0", (), "elementwise"),
        ("aten::transpose", (), "view"),
        ("MmBackward0", (), "dispatch"),
        ("unknown_kernel", (), ""),
    ],
)  # fmt: skip
def test_the_rest_is_named_by_what_it_does(name, around, kind):
    assert kind_of_rest(name, around) == kind
