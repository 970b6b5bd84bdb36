# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Generation: its phases, rules by phase and length, rows and locks that do not grow with its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812 - it needs PyTorch

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = {"matmul": "cpu.blas", "attention": "torch.math"}


class Decoder(torch.nn.Module):
    """One layer of a decoder that is not fused: products with the keys and values, whose number grows."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past: int) -> torch.Tensor:
        kv = torch.ones(1, 2, past + x.shape[1], 4)
        q = self.query(x).reshape(1, -1, 2, 4).transpose(1, 2)
        if self.fused:
            return F.scaled_dot_product_attention(q, kv, kv)
        return (q @ kv.transpose(2, 3)).softmax(-1) @ kv


def decoded(model: torch.nn.Module, tokens: int, policy: Any) -> Any:
    with torch.no_grad(), xt.kernel_policy(policy), xt.explain(root=model) as report:
        for past in range(16, 16 + tokens):
            model(torch.ones(1, 1, 8), past)
    return report


@pytest.fixture(scope="module")
def llama() -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


def generated(model: Any, tokens: int, prompt: int = 16, **policy: Any) -> Any:
    with torch.no_grad(), xt.kernel_policy(**policy), xt.explain(root=model) as report:
        model.generate(
            torch.arange(1, 1 + prompt)[None], max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return report


@pytest.mark.parametrize("fused", [True, False])
def test_rows_are_by_ranges_of_lengths(fused: bool) -> None:
    model = Decoder(fused=fused)
    rules = {"kernels": {"matmul": "cpu.blas", "attention": "torch.math"}}
    few, many = ([row for row in decoded(model, tokens, rules).rows if row.op] for tokens in (8, 112))
    assert sum(row.count for row in many) == 14 * sum(row.count for row in few)
    assert len(many) <= 3 * len(few)
    if fused:
        rows = [row for row in many if row.op == "attention"]
        assert {(row.kv, row.phase, row.count) for row in rows} == {
            ("17..32", "decode", 16), ("33..64", "decode", 32), ("65..128", "decode", 64)
        }  # fmt: skip


def test_rules_by_length_and_phase_of_a_plain_decoder() -> None:
    rules = [
        {"match": {"op": "attention", "phase": "decode", "kv": "<=32"}, "use": "torch.math"},
        {"match": {"op": "attention", "phase": "infer"}, "use": "torch.flash"},
    ]
    policy = xrt.Policy(mode="strict", kernels={"rules": rules})
    rows = [row for row in decoded(Decoder(fused=True), 32, policy).rows if row.op == "attention"]
    assert {(row.kv, row.resolved, row.status) for row in rows} == {
        ("17..32", "torch.math", "honoured"), ("33..64", "torch.flash", "honoured")
    }  # fmt: skip


def test_tables_and_messages_name_the_range() -> None:
    found = decoded(Decoder(fused=True), 8, {"kernels": {"attention": "torch.math"}})
    assert "17..32" in str(found)
    assert next(row for row in found.rows if row.kv).title.endswith("decode kv 17..32")
    assert {row["kv"] for row in found.to_dict()["rows"] if row["op"] == "attention"} == {"17..32"}


@pytest.mark.parametrize(("phase", "meant"), [("decoding", "decode"), ("prefil", "prefill")])
def test_unknown_phases_are_refused(phase: str, meant: str) -> None:
    with pytest.raises(xrt.PolicyError, match=f"did you mean '{meant}'"):
        xrt.KernelPolicy(rules=[{"match": {"op": "attention", "phase": phase}, "use": "torch.math"}])


def test_in_training_lengths_are_exact_and_nothing_decodes() -> None:
    q, kv = torch.ones(1, 2, 1, 4, requires_grad=True), torch.ones(1, 2, 5, 4)
    with xt.explain() as report:
        F.scaled_dot_product_attention(q, kv, kv).sum().backward()
    rows = [row for row in report.rows if row.op == "attention"]
    assert rows
    assert {(row.phase, row.kv) for row in rows} <= {("train", ""), ("backward", "")}


def test_phases_of_a_generation(llama: Any) -> None:
    rules = [{"match": {"op": "matmul", "phase": "decode"}, "use": "cpu.reference"}]
    found = generated(llama, 8, policy=xrt.KernelPolicy(matmul="cpu.blas", attention="torch.math", rules=rules))
    rows = [row for row in found.rows if row.op and row.source != "default"]
    assert {row.phase for row in rows} == {"prefill", "decode"}
    assert {(row.phase, row.resolved) for row in rows if row.module == "lm_head"} == {
        ("prefill", "cpu.blas"), ("decode", "cpu.reference")
    }  # fmt: skip
    assert all(row.count % 7 == 0 for row in rows if row.phase == "decode")


def test_a_prompt_of_one_token_is_prefilled(llama: Any) -> None:
    found = generated(llama, 2, prompt=1, policy=xrt.KernelPolicy(**KERNELS))
    heads = [row for row in found.rows if row.module == "lm_head" and row.op]
    assert {(row.phase, row.count) for row in heads} == {("prefill", 1), ("decode", 1)}


def test_a_loop_by_hand_has_the_phases_too(llama: Any) -> None:
    with torch.no_grad(), xt.explain(root=llama) as report:
        llama(torch.arange(4)[None])
        out = llama(torch.arange(4)[None], use_cache=True)
        cache = getattr(out, "cache", None)
        name = "past_key_values" if cache is None else "cache"
        llama(torch.arange(1)[None], **{name: getattr(out, name)})
    heads = [row for row in report.rows if row.module == "lm_head" and row.op]
    assert {(row.phase, row.count) for row in heads} == {("infer", 1), ("prefill", 1), ("decode", 1)}


def test_nothing_is_left_in_transformers(llama: Any) -> None:
    generated(llama, 1, policy=xrt.KernelPolicy(**KERNELS))
    assert not any("__call__" in vars(cls) for cls in type(llama).__mro__ if cls.__module__.startswith("transformers"))


def test_evidence_of_many_tokens_is_bounded(llama: Any) -> None:
    rows = {tokens: len(generated(llama, tokens, policy=xrt.KernelPolicy(**KERNELS)).rows) for tokens in (16, 48)}
    # one more range for each doubling: of the attention of a layer, and of the products that it is made of
    assert rows[48] - rows[16] <= 1 * 2 * 3
    assert rows[48] <= 150 - 5 * 2 * 3  # 2,000 tokens have five ranges more


CALLS = {
    "matmul": lambda rows: F.linear(torch.ones(rows, 8), torch.ones(4, 8)),
    "layer_norm": lambda rows: F.layer_norm(torch.ones(rows, 8), (8,)),
    "conv": lambda rows: F.conv1d(torch.ones(1, 2, rows), torch.ones(2, 2, 3)),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_rows_of_many_sizes_are_bounded(op: str, grad: bool) -> None:
    """As of a prompt that is read anew for each token: a few sizes are told as they are, further ones by range."""

    def rows(sizes: range) -> list[Any]:
        with torch.set_grad_enabled(grad), xt.kernel_policy(**{op: "cpu.reference"}), xt.explain() as report:
            for size in sizes:
                CALLS[op](size)
        return [row for row in report.rows if row.op == op and row.status == "honoured"]

    assert {row.shapes[0] for row in rows(range(5, 9))} == {
        (1, 2, size) if op == "conv" else (size, 8) for size in range(5, 9)
    }
    few, many = rows(range(5, 17)), rows(range(5, 129))
    assert len(few) <= 12
    assert len(many) <= 12
    assert sum(row.count for row in many) == 124


def test_a_lock_counts_no_tokens(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "generate.lock"
    first = xt.lock(generated(llama, 8, **KERNELS), path)
    for tokens, prompt in ((24, 16), (8, 41)):
        assert xt.lock(generated(llama, tokens, prompt, lock=path), path).digest == first.digest
    with pytest.raises(xrt.LockError):
        xt.lock(generated(llama, 8, matmul="cpu.reference", attention="torch.math"), path)


def test_a_lock_has_ranges_where_kernels_differ_by_length(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "generate.lock"
    rules = [{"match": {"op": "attention", "kv": "<=32"}, "use": "torch.math"}]
    policy = xrt.KernelPolicy(attention="torch.flash", rules=rules)
    lock = xt.lock(generated(llama, 40, policy=policy), path)
    decode = {(call.facts["kv"], call.kernel) for call in lock.identity.calls if call.phase == "decode"}
    assert decode == {("17..32", "torch.math"), ("33..64", "torch.flash")}
    assert xt.lock(generated(llama, 30, lock=path), path).digest == lock.digest
