# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fused layers of decode steps: which models have them by their probe, and the tokens of plain ``generate``."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
hf = pytest.importorskip("transformers")

import decode_formulas  # noqa: E402 - it needs PyTorch
from recorded_steps import AgainRecorder  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.capture.captured_state import CapturedState  # noqa: E402
from xpuruntime.pytorch.dispatch import step_cost  # noqa: E402
from xpuruntime.pytorch.generation import captured_decode, fused_decoder  # noqa: E402

pytestmark = pytest.mark.torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
PROMPT = torch.tensor([[0, 0, 2, 7, 11], [3, 8, 6, 4, 1]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
USED = "layers by five kernels each, 2 rows: in 2 layers"


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute what Triton's kernels would, on the CPU."""
    monkeypatch.setattr(captured_decode, "kernels_for", lambda device: decode_formulas)


def test_kernels_have_what_the_formulas_stand_for() -> None:
    source = Path(fused_decoder.__file__).with_name("decode_kernels.py").read_text(encoding="utf-8")
    stand_in = {name for name, made in vars(decode_formulas).items() if inspect.getmodule(made) is decode_formulas}
    there = set(re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE))
    assert {name for name in stand_in if not name.startswith("_")} <= there


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**{**_SIZES, **changes})).eval()


def capture(model: Any, **options: Any) -> Any:
    settings = {
        "max_length": 48, "batches": (2,), "extents": (8, 48), "check_every": 4, "max_graphs": 32, "fuse": True,
        "tolerance": None, "compile": False, "strict": None, "why_eager": "", **options,
    }  # fmt: skip
    recorder = AgainRecorder(CapturedState())
    return captured_decode.CapturedDecode(model, torch.device("cpu"), recorder, **settings)


def same_tokens(model: Any, captured: Any, **more: Any) -> bool:
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, **more}
    return torch.equal(captured.generate(PROMPT, **options), model.generate(PROMPT, **options))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3", {"head_dim": 32}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}),
    ],
)
def test_fused(kind: str, changes: dict[str, Any]) -> None:
    model = model_of(kind, **changes)
    captured = capture(model)
    for more in ({}, {"eos_token_id": 7}, {"repetition_penalty": 1.3}):
        assert same_tokens(model, captured, **more)
    assert USED in captured.report.notes
    assert captured.report.reasons == {}


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Llama", {"hidden_act": "gelu"}, "the result of layer 0 differ"),
        ("Granite", {"residual_multiplier": 0.97}, "the result of layer 0 differ"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "layer 1 differ"),
        ("Granite", {"embedding_multiplier": 2.0}, "do not begin as the rows of the embedding"),
        ("Granite", {"logits_scaling": 1.05}, "logits differ"),
        ("Mistral", {"sliding_window": 8}, "sliding window"),
        ("Olmo2", {}, "built otherwise than Llama"),
        ("Llama", {"head_dim": 8}, "heads of size 8"),
    ],
)
def test_not_fused(kind: str, changes: dict[str, Any], why: str) -> None:
    model = model_of(kind, **changes)
    captured = capture(model)
    assert same_tokens(model, captured)
    assert USED not in captured.report.notes
    assert any(why in note for note in captured.report.notes), captured.report


def test_a_small_fault_of_a_layer_is_seen() -> None:
    model = model_of("Llama")
    captured = capture(model)
    model.model.layers[1].post_attention_layernorm.variance_epsilon *= 100
    formulas = vars(decode_formulas)
    plain = formulas["product"]

    def other(*args: Any, norm: Any = None, **more: Any) -> None:
        plain(*args, norm=None if norm is None else (norm[0], 1e-6), **more)

    formulas["product"] = other
    try:
        assert same_tokens(model, captured)
    finally:
        formulas["product"] = plain
    assert any("the result of layer 1 differ" in note for note in captured.report.notes), captured.report


def test_a_wrong_beginning_of_the_norm_that_follows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode_formulas.product

    def by(x: Any, weight: Any, out: Any, **more: Any) -> Any:
        result = plain(x, weight, out, **more)
        if x.shape[1] == _SIZES["intermediate_size"]:
            result = result._replace(squares=result.squares * torch.linspace(1, 1.2, len(out)))
        return result

    monkeypatch.setattr(decode_formulas, "product", by)
    model = model_of("Llama")
    captured = capture(model)
    assert same_tokens(model, captured)
    assert any("the norm of layer 0 differ" in note for note in captured.report.notes), captured.report


@pytest.mark.parametrize("wrong", [8, 16, 48, None])
def test_attention_is_proved_in_each_range(monkeypatch: pytest.MonkeyPatch, wrong: int | None) -> None:
    plain = decode_formulas.attend

    def by(*args: Any, scale: float, extent: int, **more: Any) -> None:
        plain(*args, scale=scale * 0.5 if extent == wrong else scale, extent=extent, **more)

    monkeypatch.setattr(decode_formulas, "attend", by)
    model = model_of("Llama")
    captured = capture(model, extents=(1, 8, 16, 48))
    assert same_tokens(model, captured)
    assert (USED in captured.report.notes) is (wrong is None), captured.report


def test_a_wrong_kernel_of_products_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode_formulas.product

    def by(x: Any, weight: Any, *rest: Any, way: str, **more: Any) -> None:
        plain(x, weight * 1.1 if way == "a wrong kernel" else weight, *rest, **more)

    monkeypatch.setattr(decode_formulas, "ways", lambda rows, dtype: ("a wrong kernel", "a formula"))
    monkeypatch.setattr(decode_formulas, "product", by)
    model = model_of("Llama")
    captured = capture(model)
    assert same_tokens(model, captured)
    assert USED in captured.report.notes
    (said,) = (note for note in captured.report.notes if note.startswith("products of 2 rows: "))
    assert "q, k, v, output, gate, up, down, logits by a formula; not by a wrong kernel, since logits differ" in said


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_way_that_fails_when_it_is_tried_gives_way_and_is_reported(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = decode_formulas.product

    def by(x: Any, weight: Any, *rest: Any, way: str, **more: Any) -> None:
        if (fault, way, weight.shape[0]) == ("raises", "a library", _SIZES["vocab_size"]):
            raise torch.OutOfMemoryError("no memory is left")
        plain(x, weight * 1.1 if (fault, way) == ("wrong", "a library") else weight, *rest, **more)

    times = itertools.count(0, -1)

    def faster(run: Any, *args: Any, **options: Any) -> tuple[float, float]:
        run()
        return 0.0, next(times)

    monkeypatch.setattr(decode_formulas, "ways", lambda rows, dtype: ("a formula", "a library"))
    monkeypatch.setattr(decode_formulas, "product", by)
    monkeypatch.setattr(step_cost, "time_on_cuda", faster)
    model = model_of("Llama")
    captured = capture(model)
    assert same_tokens(model, captured)
    assert USED in captured.report.notes
    (said,) = (note for note in captured.report.notes if note.startswith("products of 2 rows: "))
    assert {
        "raises": "q, k, v, output, gate, up, down by a library; logits by a formula; not logits by a library, since",
        "wrong": "logits by a formula; not by a library together, since logits differ",
    }[fault] in said


@pytest.mark.parametrize(("seconds", "used"), [(0.9, "a library"), (0.999, "a formula")])
def test_another_way_is_used_where_it_is_clearly_faster(
    seconds: float, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = decode_formulas.product, []

    def by(*args: Any, way: str, **more: Any) -> None:
        calls.append(way)
        plain(*args, **more)

    disturbed = itertools.chain([5.0], itertools.repeat(0.0))

    def timed(run: Any, *args: Any, **options: Any) -> tuple[float, float]:
        calls.clear()
        run()
        return 0.0, next(disturbed) + seconds ** calls.count("a library")

    monkeypatch.setattr(decode_formulas, "ways", lambda rows, dtype: ("a formula", "a library"))
    monkeypatch.setattr(decode_formulas, "product", by)
    monkeypatch.setattr(step_cost, "time_on_cuda", timed)
    captured = capture(model_of("Llama"))
    captured.generate(PROMPT, attention_mask=MASK, max_new_tokens=2, do_sample=False)
    assert f"products of 2 rows: q, k, v, output, gate, up, down, logits by {used}" in captured.report.notes


@pytest.mark.parametrize("strategy", ["first_supported", "best_performance"])
def test_a_policy_that_names_no_kernel_leaves_layers_fused(strategy: str) -> None:
    model = model_of("Llama")
    captured = capture(model)
    with xt.kernel_policy(matmul="auto", attention="auto", rms_norm="auto", auto_strategy=strategy):
        assert same_tokens(model, captured)
    assert USED in captured.report.notes


def test_bits_policies_positions_and_reset() -> None:
    model = model_of("Llama")
    exact = capture(model, tolerance=0.0)
    assert same_tokens(model, exact)
    exact.reset()
    captured = capture(model)
    with xt.kernel_policy(matmul="cpu.reference"):
        assert same_tokens(model, captured)
    assert USED not in captured.report.notes, "the policy names single products"
    far = MASK.cumsum(1) - 1 + 100
    captured.generate(PROMPT, attention_mask=MASK, position_ids=far, max_new_tokens=4, do_sample=False)
    assert USED not in captured.report.notes, "positions beyond the table of rotations"
    assert same_tokens(model, captured)
    assert USED in captured.report.notes
    captured.reset()
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert same_tokens(model, captured)
