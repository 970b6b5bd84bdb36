# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decode steps captured on a CUDA device: the tokens of plain ``generate``, few graphs, constant memory."""

from __future__ import annotations

import sys

import pytest
import torch

sys.modules.setdefault("torchvision", None)
hf = pytest.importorskip("transformers")

import xpuruntime.pytorch as xrt_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where every test is skipped
PROMPT = torch.tensor([[0, 0, 2, 7, 11], [3, 8, 6, 4, 1]], device=DEVICE)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=DEVICE)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval().cuda()


_SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FUSED = {"Llama": {}, "Qwen3": {"head_dim": 32}}
OTHERS = {
    "Gemma3": {"head_dim": 32, "layer_types": ["full_attention"] * 2},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "GPT2": {"n_positions": 512},
}


@pytest.fixture
def exact():
    """Products in the type of the weights."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def model_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    changes = {**FUSED, **OTHERS}[kind]
    config = getattr(hf, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(**_SIZES, **changes)
    return getattr(hf, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config).eval().to("cuda", dtype)


@pytest.mark.parametrize("kind", [*FUSED, *OTHERS])
def test_families_have_the_tokens_of_plain_generate(exact, kind):
    model = model_of(kind)
    captured = capture(model, compile=False, strict=True)
    for rows in (1, 2):
        options = {"attention_mask": MASK[:rows], "max_new_tokens": 60, "do_sample": False}
        assert torch.equal(captured.generate(PROMPT[:rows], **options), model.generate(PROMPT[:rows], **options))
        assert (f"layers by five kernels each, {rows} rows: in 2 layers" in captured.report.notes) == (kind in FUSED)
    assert captured.report.reasons == {}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("rows", [1, 8])
def test_bfloat16_is_fused_and_close(kind, rows):
    model = model_of(kind, torch.bfloat16)
    captured = capture(model, batch=rows, compile=False, strict=True)
    ids = torch.randint(2, 64, (rows, 9), device="cuda")
    made = captured.generate(ids, max_new_tokens=100, do_sample=False, attention_mask=torch.ones_like(ids))
    assert f"layers by five kernels each, {rows} rows: in 2 layers" in captured.report.notes
    assert all("not by" not in note for note in captured.report.notes), captured.report
    with torch.no_grad():
        logits = model(made).logits[:, 8:-1].float()
    chosen = logits.gather(-1, made[:, 9:, None])[..., 0]
    assert float((logits.amax(-1) - chosen).max()) <= 2**-4 * float(logits.abs().max())


def capture(model, **options):
    return xrt_torch.capture_decode(model, **{"max_length": 256, "batch": (1, 2), "kv_ranges": (32, 64), **options})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens(model, compiled, penalty):
    captured = capture(model, compile=compiled, strict=True)
    mask = MASK if penalty == 1.0 else torch.ones_like(MASK)  # transformers 5.17 counts padding as text
    options = {"attention_mask": mask, "max_new_tokens": 80, "do_sample": False, "repetition_penalty": penalty}
    want = model.generate(PROMPT, **options)
    for ends in (None, int(want[1, 40])):
        plain = model.generate(PROMPT, **options, eos_token_id=ends)
        for _ in range(2):
            assert torch.equal(captured.generate(PROMPT, **options, eos_token_id=ends), plain)
    assert captured.report.captures == 6, "three ranges, with an end and without"
    assert captured.report.reasons == {}
    assert "layers by five kernels each, 2 rows: in 2 layers" in captured.report.notes


def test_a_seed_repeats_and_the_next_call_goes_on(model):
    captured = capture(model)
    options = {"max_new_tokens": 40, "do_sample": True, "top_k": 20, "eos_token_id": 63}
    captured.warm(do_sample=True, top_k=20, eos_token_id=63)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append([captured.generate(PROMPT, **options) for _ in range(3)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_memory_and_policies(model):
    captured = capture(model, compile=False)
    options = {"max_new_tokens": 100, "do_sample": False}
    with captured.attached():
        model.generate(PROMPT, **options)
        torch.cuda.synchronize()
        held, captures = torch.cuda.memory_allocated(), captured.report.captures
        for _ in range(20):
            model.generate(PROMPT + 1, **options)
        assert torch.cuda.memory_allocated() == held
        assert captured.report.captures == captures
        with xrt_torch.kernel_policy(matmul="cublasLt"):
            model.generate(PROMPT, **options)
        assert captured.report.captures == 2 * captures
    captured.reset()
    assert captured.report.graphs == ()


def test_replays_have_the_rows_of_their_capture(model):
    captured = capture(model, compile=False, strict=True)
    with xrt_torch.kernel_policy(matmul="cublas.cublasLt"):
        captured.generate(PROMPT, max_new_tokens=10, do_sample=False)
        with xrt_torch.explain(root=model) as found:
            captured.generate(PROMPT, max_new_tokens=10, do_sample=False)
    rows = [row for row in found.rows if row.module == "lm_head" and row.phase == "decode"]
    assert [(row.status, row.count) for row in rows] == [("honoured", 9)], found
    assert any(row.status == "opaque" and row.time_us > 0 for row in found.rows)
