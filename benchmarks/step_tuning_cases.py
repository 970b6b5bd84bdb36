# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps that are tuned in `bench_step_tuning`: models of transformers, and what a real loop adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Case:
    """One training step.

    Attributes
    ----------
    kind : {"gpt2", "bert"}
    rows, length : int
        Of a batch of tokens.
    layers : int
    accumulation : int
        Parts of a batch, with a backward each.
    scaler, clipping, checkpointing : bool
        fp16 with a GradScaler; gradients clipped to a norm of 1; activations of layers computed again in the backward.
    wrap : {"", "ddp", "fsdp2"}
    """

    kind: Literal["gpt2", "bert"]
    rows: int
    length: int
    layers: int = 12
    accumulation: int = 1
    scaler: bool = False
    clipping: bool = False
    checkpointing: bool = False
    wrap: Literal["", "ddp", "fsdp2"] = ""

    @property
    def words(self) -> int:
        """Words of the vocabulary."""
        return 50257 if self.kind == "gpt2" else 30522

    def tokens(self, quick: bool) -> tuple[int, int]:
        """Shape of a batch."""
        return (max(self.accumulation, 2), 16) if quick else (self.rows, self.length)

    def model(self, layers: int | None) -> torch.nn.Module:
        """Return the model on the CPU, in training mode, without dropout."""
        import transformers

        layers = layers or self.layers
        if self.kind == "gpt2":
            config = transformers.GPT2Config(n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            config.use_cache = False
            made = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
            made = transformers.BertForMaskedLM(config)
        if self.checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made.train()

    def blocks(self, model: Any) -> list[torch.nn.Module]:
        """Return the layers, which are sharded one by one."""
        return list(model.transformer.h if self.kind == "gpt2" else model.bert.encoder.layer)


CASES = {
    "gpt2-8x1024": Case("gpt2", 8, 1024),
    "bert-32x128": Case("bert", 32, 128),
    "accumulation": Case("gpt2", 8, 512, layers=4, accumulation=2),
    "scaler": Case("gpt2", 4, 512, layers=4, scaler=True, clipping=True),
    "clipping": Case("gpt2", 4, 512, layers=4, clipping=True),
    "checkpointing": Case("gpt2", 8, 512, layers=4, checkpointing=True),
}
RANK_CASES = {
    "ddp": Case("gpt2", 4, 1024, layers=6, wrap="ddp"),
    "fsdp2": Case("gpt2", 4, 1024, layers=6, wrap="fsdp2"),
}
