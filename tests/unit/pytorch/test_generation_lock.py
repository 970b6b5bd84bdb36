# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A lock of a generation holds for other lengths and prompts, and breaks for whatever computes other tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch
from xpuruntime.lockfile.canonical import load_lock, save_lock  # noqa: E402 - after the check
from xpuruntime.lockfile.drift import ValidatorKind  # noqa: E402 - after the check
from xpuruntime.lockfile.records import Lock  # noqa: E402 - after the check

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
KERNELS = {"matmul": "cpu.blas", "attention": "torch.math"}


def model_of(kind: str = "Llama", **config: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SIZES, **config))
    return model.eval()


def mixtral() -> Any:
    return model_of("Mixtral", num_local_experts=2, num_experts_per_tok=1)


def generate(model: Any, tokens: int = 4, prompt: int = 8, **config: Any) -> None:
    ids = torch.arange(1, 1 + prompt)[None]
    config = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **config}
    with torch.no_grad():
        model.generate(ids, **config)


def explained(model: Any, kernels: Any = None, **generation: Any) -> Any:
    with xt.kernel_policy(**(kernels or KERNELS)), xt.explain(root=model) as report:
        generate(model, **generation)
    return report


def attention(model: Any, name: str) -> Any:
    changed = copy.deepcopy(model)
    changed.set_attn_implementation(name)
    return changed


def adapted(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.up_proj.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(4, 32)))
    return changed


def in_bfloat16(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.down_proj.bfloat16()
    changed.model.layers[0].mlp.down_proj.forward = lambda x: x[..., :32]
    return changed


def test_it_holds_for_other_lengths_and_prompts(tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "generation.lock"
    lock = xt.lock(explained(model), path)
    for tokens, prompt, batch in (
        (40, 8, {}),
        (4, 23, {}),
        (4, 8, {"max_length": 99}),
        (6, 8, {"output_logits": True}),
    ):
        assert xt.lock(explained(model, tokens=tokens, prompt=prompt, **batch), path).digest == lock.digest
        with xt.kernel_policy(lock=path):
            generate(model, tokens, prompt, **batch)


def test_it_holds_for_the_model_from_its_files_and_breaks_under_autocast(tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "generation.lock"
    xt.lock(explained(model), path)
    model.save_pretrained(tmp_path / "saved")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with xt.kernel_policy(lock=path):
        generate(loaded)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(xrt.LockError, match=r"autocast: .* found bfloat16"):
            generate(loaded)


DEVIATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (lambda model: attention(model, "eager"), {}),
    "dtype": (lambda model: copy.deepcopy(model).double(), {}),
    "cache": (lambda model: model, {"cache_implementation": "static"}),
    "sampling": (lambda model: model, {"do_sample": True}),
    "penalty": (lambda model: model, {"repetition_penalty": 1.3}),
    "beams": (lambda model: model, {"num_beams": 2}),
    "eos": (lambda model: model, {"eos_token_id": 7}),
    "first eos": (lambda model: model, {"eos_token_id": 0}),
    "several eos": (lambda model: model, {"eos_token_id": [7, 8]}),
    "lookup": (lambda model: model, {"prompt_lookup_num_tokens": 2, "use_cache": True}),
    "no cache": (lambda model: model, {"use_cache": False}),
    "processor": (lambda model: model, {"logits_processor": [hf.TopKLogitsWarper(3)]}),
    "class": (lambda _: model_of("Mistral"), {}),
    "eps": (lambda _: model_of(rms_norm_eps=1e-3), {}),
    "rope": (lambda _: model_of(rope_theta=5e5), {}),
    "activation": (lambda _: model_of(hidden_act="gelu"), {}),
    "adapter": (lambda model: adapted(model), {}),
    "one layer": (lambda model: in_bfloat16(model), {}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock of the plain model."""
    made = tmp_path_factory.mktemp("locks") / "generation.lock"
    xt.lock(explained(model_of()), made)
    return made


@pytest.mark.parametrize("name", DEVIATIONS)
def test_it_breaks_for_what_computes_other_tokens(name: str, path: Path) -> None:
    model = model_of()
    change, generation = DEVIATIONS[name]
    with pytest.raises(xrt.LockError):
        xt.lock(explained(change(model), **generation), path)
    with xt.kernel_policy(lock=path), pytest.raises(xrt.LockError, match="does not hold") as refused:
        generate(change(model), **generation)
    assert "LlamaForCausalLM" in str(refused.value)
    with xt.kernel_policy(lock=path):  # no false alarm
        generate(model)


def taken_before(model: Any) -> Any:
    return model.generate


def captured(model: Any) -> Any:
    return xt.capture_decode(model, max_length=64).generate


@pytest.mark.parametrize("taken", [taken_before, captured])
@pytest.mark.parametrize("name", ["sampling", "eps"])
def test_it_breaks_however_generate_was_taken_before_the_policy(taken: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "generation.lock"

    def run(lock: str = "", **generation: Any) -> Any:
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **generation}
        generate_now, policy = taken(model), {"lock": path} if lock else KERNELS
        with xt.kernel_policy(**policy), xt.explain(root=model) as report, torch.no_grad():
            generate_now(torch.arange(1, 9)[None], **options)
        return report

    model = model_of()
    lock = xt.lock(run(), path)
    assert xt.lock(run(max_new_tokens=20), path).digest == lock.digest
    run("under the lock", max_new_tokens=20)
    change, generation = DEVIATIONS[name]
    model = change(model)
    with pytest.raises(xrt.LockError):
        xt.lock(run(**generation), path)
    with pytest.raises(xrt.LockError, match="does not hold"):
        run("under the lock", **generation)


def test_it_breaks_for_another_kernel(path: Path) -> None:
    with pytest.raises(xrt.LockError, match=r"kernel matmul.*cpu\.blas"):
        xt.lock(explained(model_of(), {**KERNELS, "matmul": "cpu.reference"}), path)


def test_it_breaks_for_other_experts(tmp_path: Path) -> None:
    model, path = mixtral(), tmp_path / "generation.lock"
    if not getattr(model.config, "_experts_implementation", None):
        pytest.skip("this transformers has one implementation of experts")
    lock = xt.lock(explained(model), path)
    assert xt.lock(explained(model, tokens=7), path).digest == lock.digest
    model.set_experts_implementation("batched_mm")
    with pytest.raises(xrt.LockError, match=r"experts_implementation"):
        xt.lock(explained(model), path)
    with xt.kernel_policy(lock=path), pytest.raises(xrt.LockError, match=r"expected .*found batched_mm"):
        generate(model)


def test_it_breaks_for_another_version_of_transformers(path: Path, tmp_path: Path) -> None:
    lock, other = load_lock(path), tmp_path / "generation.lock"
    validators = tuple(
        msgspec.structs.replace(validator, expect="4.0.0") if validator.key == "transformers" else validator
        for validator in lock.identity.validators
    )
    assert validators != lock.identity.validators
    save_lock(Lock.of(msgspec.structs.replace(lock.identity, validators=validators)), other)
    with pytest.raises(xrt.LockError, match=r"package transformers: expected 4\.0\.0"), xt.kernel_policy(lock=other):
        pass


def tokenizer(words: str, template: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    level = tokenizers.models.WordLevel({word: index for index, word in enumerate(words.split())}, unk_token="[UNK]")
    result = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(level), unk_token="[UNK]")
    result.chat_template = template
    return result


def test_it_has_digests_of_a_tokenizer(tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "generation.lock"
    words, template = "[UNK] a b", "{{ messages }}"
    lock = xt.lock(explained(model), path, tokenizer=tokenizer(words, template))
    assert xt.lock(explained(model), path, tokenizer=tokenizer(words, template)).digest == lock.digest
    for other in (tokenizer("[UNK] b a", template), tokenizer(words, "{{ messages[0] }}")):
        with pytest.raises(xrt.LockError, match="tokenizer"):
            xt.lock(explained(model), path, tokenizer=other)
    with pytest.raises(xrt.LockError, match="found nothing"):
        xt.lock(explained(model), path)
    with pytest.raises(TypeError, match="give a tokenizer"):
        xt.lock(explained(model), path, tokenizer="gpt2")


def test_facts_are_in_the_evidence() -> None:
    found = explained(model_of(), top_k=5, do_sample=True)
    facts = found.generation["LlamaForCausalLM"]
    assert (facts["attn_implementation"], facts["cache"]) == ("sdpa", "DynamicCache")
    stated = {name: value for name, value in facts.items() if name.startswith("generation_config")}
    assert {"generation_config.do_sample": True, "generation_config.top_k": 5}.items() <= stated.items()
    assert not any("max" in name or "._" in name for name in stated)
    assert found.to_dict()["generation"] == found.generation
    assert "LlamaForCausalLM generated by attn_implementation sdpa, cache DynamicCache" in " ".join(str(found).split())
    lock = xt.lock(found)
    assert {validator.key for validator in lock.identity.validators if validator.kind == ValidatorKind.GENERATION} == {
        "LlamaForCausalLM"
    }
