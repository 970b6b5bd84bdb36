# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Small models of transformers, and the ways in which tests of captured decoding run them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

import transformers as hf  # noqa: E402
from recorded_steps import AgainRecorder  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.capture.captured_state import CapturedState  # noqa: E402
from xpuruntime.pytorch.generation.captured_decode import CapturedDecode  # noqa: E402

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SMALL, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None,
            pad_token_id=0,
        )
    ),
}  # fmt: skip
PROMPT = torch.tensor([[5, 9, 2, 7, 11], [3, 8, 6, 4, 1]])
PADDED = torch.tensor([[0, 0, 2, 7, 11], [3, 8, 6, 4, 1]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@functools.cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def on_stand_in(model: Any, **options: Any) -> CapturedDecode:
    """Capture on the CPU by a recorder that runs again what it has recorded."""
    settings: dict[str, Any] = {
        "max_length": 48,
        "batches": (1, 2, 4),
        "extents": (8, 16, 48),
        "check_every": 4,
        "max_graphs": 32,
    }
    settings |= {"fuse": True, "tolerance": None, "compile": False, "strict": None, **options}
    return CapturedDecode(model, torch.device("cpu"), AgainRecorder(CapturedState()), why_eager="", **settings)


def eager(model: Any, **options: Any) -> CapturedDecode:
    return xt.capture_decode(model, **{"max_length": 48, "batch": (1, 2, 4), "kv_ranges": (8, 16), **options})


def ending(model: Any, ids: Any, count: int = 3, **options: Any) -> list[int]:
    """Return tokens that rows choose soon, so that they end texts at different places."""
    made = model.generate(ids, max_new_tokens=6, do_sample=False, **options)[:, ids.shape[1] :]
    return sorted({int(row[i]) for i, row in enumerate(made.repeat(3, 1)[:count])})


class Streamer:
    def __init__(self, fails: int = -1) -> None:
        self.got: list[Any] = []
        self.fails = fails

    def put(self, value: Any) -> None:
        if len(self.got) == self.fails:
            raise KeyboardInterrupt
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")
