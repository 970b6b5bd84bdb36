# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of transformers in tiny configurations, made without a download, and how each is trained for two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers as hf

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAMILIES", "Family", "losses"]

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGE: dict[str, Any] = {"image_size": 16, "num_labels": 5}


class Family(NamedTuple):
    """One family of models.

    Attributes
    ----------
    make : callable
        Returns a new model.
    batch : callable
        Returns a batch with labels.
    module : str
        A module whose products a rule gives to another kernel.
    """

    make: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    module: str


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 8))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}


def _audio() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 64, (2, 6))}


FAMILIES = {
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2)
        ),
        _tokens,
        "transformer.h.1.*",
    ),
    "bert": Family(lambda: hf.BertForMaskedLM(hf.BertConfig(**_SMALL)), _tokens, "bert.encoder.layer.1.*"),
    "t5": Family(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                vocab_size=64,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        ),
        _tokens,
        "encoder.block.1.*",
    ),
    "llama": Family(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL, **_IDS)), _tokens, "model.layers.1.*"
    ),
    "vit": Family(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, patch_size=4, **_IMAGE
            )
        ),
        _images,
        "classifier",
    ),
    "convnextv2": Family(
        lambda: hf.ConvNextV2ForImageClassification(
            hf.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, **_IMAGE)
        ),
        _images,
        "classifier",
    ),
    "resnet": Family(
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic"
            )
        ),
        _images,
        "classifier.*",
    ),
    "whisper": Family(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64, num_mel_bins=8, max_source_positions=16,
                max_target_positions=16, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
                **_IDS,
            )
        ),
        _audio,
        "model.encoder.layers.1.*",
    ),
}  # fmt: skip


def losses(name: str, prepare: Callable[[Any], Any] = lambda model: model) -> tuple[list[float], Any]:
    """Train two steps, always from the same start, and return the losses and the model.

    Parameters
    ----------
    name : str
        A key of `FAMILIES`.
    prepare : callable
        Takes the model and returns what is called instead.
    """
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.make()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # which kernel serves changes what is drawn
    for key in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "drop_path_rate"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    called = prepare(model.train())
    batch = family.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
    return numbers, model
