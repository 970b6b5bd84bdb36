# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What transformers replaces, drops or skips by itself: refused under strict, else in the evidence."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

batching = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")

pytestmark = pytest.mark.filterwarnings("ignore:Passing `.*` with `inputs_embeds`:UserWarning")

STRICT = xrt.Policy(mode="strict", kernels={"attention": "torch.math"})
PREFER = xrt.Policy(kernels={"attention": "torch.math"})
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def llama(**config: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **config)).eval()


def config_of(**stated: Any) -> Any:
    return hf.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0, **stated)


def batch(model: Any, *, drop: bool = True, **stated: Any) -> Any:
    small = batching.ContinuousBatchingConfig(
        num_blocks=16, page_size=16, max_batch_tokens=32, drop_unsupported_processors=drop
    )
    return model.generate_batch(
        [[1, 2, 3], [4, 5]], generation_config=config_of(**stated), continuous_batching_config=small, warmup=False
    )


def generate(model: Any, **stated: Any) -> None:
    with torch.no_grad():
        model.generate(torch.arange(1, 5)[None], generation_config=config_of(**stated))


def dropped(_: Any) -> None:
    batch(llama(), repetition_penalty=1.5)


def failed(_: Any) -> None:
    batch(llama(), drop=False, no_repeat_ngram_size=2)


def flash(patch: pytest.MonkeyPatch) -> None:
    """Let transformers believe that FlashAttention 2 is there, as on a machine that has it."""
    patch.setattr(batching, "is_flash_attn_3_available", lambda **_: False)
    patch.setattr(batching, "is_flash_attn_2_available", lambda **_: True)
    patch.setattr(hf.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda *_, **__: "flash_attention_2")
    model = llama(attn_implementation="sdpa")
    model.config._attn_implementation_internal = "sdpa"
    model.init_continuous_batching(config_of())


def uncompiled(_: Any) -> None:
    generate(llama(), compile_config=hf.CompileConfig(), cache_implementation="static")


#: As a program has it that takes `generate` from a model before it enters a policy.
TAKEN = hf.GenerationMixin.generate


def uncompiled_of_before(_: Any) -> None:
    config = config_of(compile_config=hf.CompileConfig(), cache_implementation="static")
    with torch.no_grad():
        TAKEN(llama(), torch.arange(1, 5)[None], generation_config=config)


class Elsewhere(hf.MixtralForCausalLM):  # type: ignore[misc,name-defined,unused-ignore]
    """Is on a CUDA device for who asks for the device after the experts, as transformers does before it decodes."""

    __module__ = hf.MixtralForCausalLM.__module__  # in whose file transformers looks whether experts can be replaced
    asked = False

    def get_experts_implementation(self) -> Any:
        self.asked = True
        return super().get_experts_implementation()

    @property
    def device(self) -> Any:
        asked, self.asked = self.asked, False
        return torch.device("cuda" if asked else "cpu")


def mixtral() -> Any:
    model = Elsewhere(hf.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def experts(_: Any) -> None:
    generate(mixtral())


def experts_of_before(_: Any) -> None:
    with torch.no_grad():
        TAKEN(mixtral(), torch.arange(1, 5)[None], generation_config=config_of())


def hub(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find a kernel of the Hub in place of FlashAttention 2, as where `kernels` is installed."""
    modeling = pytest.importorskip("transformers.modeling_utils")
    patch.setattr(modeling, "is_kernels_available", lambda: True)
    patch.setattr(modeling, "lazy_import_flash_attention", lambda *_, **__: None)
    llama(attn_implementation="flash_attention_2")


def decompressed(_: Any) -> None:
    """Run a model whose configuration says int8, and which holds floats, as after a first forward elsewhere."""
    model = llama()
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with torch.no_grad():
        model(torch.arange(4)[None])


SWITCHES: dict[str, tuple[Callable[[Any], None], str]] = {
    "processors are dropped": (dropped, "drops RepetitionPenaltyLogitsProcessor"),
    "requests fail": (failed, "2 of 2 requests"),
    "attention of batches": (flash, "sdpa of LlamaForCausalLM by flash_attention_2"),
    "compiled code": (uncompiled, "runs the forward uncompiled"),
    "compiled code, taken before": (uncompiled_of_before, "runs the forward uncompiled"),
    "experts": (experts, "experts implementation grouped_mm of Elsewhere by batched_mm"),
    "experts, taken before": (experts_of_before, "experts implementation grouped_mm of Elsewhere by batched_mm"),
    "kernel of the Hub": (hub, "by kernels-community/"),
    "weights": (decompressed, "says compressed-tensors, and all of its weights are float32 after"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_it_is_refused_under_strict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, what = SWITCHES[name]
    with pytest.raises(xrt.UnsupportedOperationError, match=what) as refused, xt.kernel_policy(STRICT):
        run(monkeypatch)
    assert "Fix: " in str(refused.value)


@pytest.mark.parametrize("name", SWITCHES)
def test_it_is_in_the_evidence_under_prefer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, what = SWITCHES[name]
    with pytest.warns(xrt.XpuRuntimeWarning, match=what), xt.kernel_policy(PREFER), xt.explain() as report:
        run(monkeypatch)
    assert what in " ".join(report.switches)
    assert what in " ".join(str(report).split())
    with pytest.raises(xrt.UnsupportedOperationError, match=what):
        report.require(no_bypass=False, no_unmatched=False)


def test_nothing_is_said_where_nothing_is_switched() -> None:
    with warnings.catch_warnings(), xt.kernel_policy(STRICT), xt.explain() as report:
        warnings.simplefilter("error", xrt.XpuRuntimeWarning)
        generate(llama(), repetition_penalty=1.5)
        generate(llama(), cache_implementation="static")
        generate(llama(), compile_config=hf.CompileConfig(), disable_compile=True)
        llama(attn_implementation="eager")
        generate(llama(), num_beams=2)
        generate(llama(), prompt_lookup_num_tokens=2)
        with torch.no_grad():
            llama().generate(torch.arange(1, 5)[None], assistant_model=llama(), max_new_tokens=3, pad_token_id=0)
        assert all(one.error is None for one in batch(llama(), temperature=0.7).values())
    assert report.switches == ()


def test_nothing_is_left_in_transformers() -> None:
    owners = [hf.PreTrainedModel, hf.GenerationMixin, batching.ContinuousMixin]
    before = [dict(vars(owner)) for owner in owners]
    with xt.kernel_policy(STRICT), xt.explain():
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


def test_weights_that_are_decompressed_at_the_first_forward(tmp_path: Path) -> None:
    """A checkpoint of int8 weights and activations, as llm-compressor writes it."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors")
    safetensors = pytest.importorskip("safetensors.torch")
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel"},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    model, tensors = llama(), {}
    for name, weight in model.state_dict().items():
        if "proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name], tensors[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
        else:
            tensors[name] = weight.contiguous()
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group": group},
    }
    model.config.save_pretrained(tmp_path)
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    with pytest.raises(xrt.UnsupportedOperationError, match="they were decompressed"), xt.kernel_policy(STRICT):
        generate(loaded)
