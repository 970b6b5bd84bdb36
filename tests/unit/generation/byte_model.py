# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A language model of bytes, trained here in seconds, and faults that are planted into copies of it."""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import transformers as hf

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAULTS", "faulty", "held_out", "trained"]

_STEPS, _ROWS, _LENGTH = 40, 8, 48


@functools.cache
def _bytes() -> bytes:
    documented = [getattr(builtins, name) for name in sorted(dir(builtins)) if name[0].islower()]
    parts = [item for kind in documented for item in (kind, *(vars(kind).values() if isinstance(kind, type) else ()))]
    return "\n".join(dict.fromkeys(inspect.getdoc(part) or "" for part in parts)).encode()


def held_out(texts: int = 5, length: int = 32) -> list[list[int]]:
    """Return texts that the model was not trained on, as token ids."""
    end = _bytes()[-texts * length :]
    return [list(end[start : start + length]) for start in range(0, len(end), length)]


@functools.cache
def trained() -> Any:
    """Return the model. Nobody may change it."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).train()
    data = torch.tensor(list(_bytes()[:-1024]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(_STEPS):
        starts = torch.randint(0, len(data) - _LENGTH, (_ROWS,))
        ids = torch.stack([data[start : start + _LENGTH] for start in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def _scaled(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.05)


def _other_eps(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 1e-4


def _without_processor(model: Any) -> None:
    model.generation_config.repetition_penalty = 1.0


def _bf16(model: Any) -> None:
    layer = model.model.layers[1].mlp.to(torch.bfloat16)
    layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    layer.register_forward_hook(lambda _, args, result: result.float())


#: Fault to what plants it.
FAULTS: dict[str, Callable[[Any], None]] = {
    "scaled layer": _scaled,
    "other eps": _other_eps,
    "dropped processor": _without_processor,
    "bf16 layer": _bf16,
}


def faulty(fault: str) -> Any:
    """Return a copy of the model with a repetition penalty and a fault; ``""``: with none."""
    model = copy.deepcopy(trained())
    model.generation_config.repetition_penalty = 1.2
    if fault:
        FAULTS[fault](model)
    return model
