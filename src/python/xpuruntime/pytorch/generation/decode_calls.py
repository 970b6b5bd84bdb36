# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which calls of ``generate`` a captured model takes, how they choose tokens, and why others are left to the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xpuruntime.errors import InputError, ModelError
from xpuruntime.pytorch.generation.logprobs import ForcedTokens

#: Logits processors of transformers whose work is the same at each step, and all on the device.
_DEVICE_ONLY = frozenset({
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper", "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "TypicalLogitsWarper",
})  # fmt: skip
_PENALTY = "RepetitionPenaltyLogitsProcessor"
#: Processors that hold the end of a text back, and the tokens that it has to have; a lane does it by its own length.
_MINIMA: dict[str, Callable[[Any], int]] = {
    "MinLengthLogitsProcessor": lambda processor: processor.min_length,
    "MinNewTokensLengthLogitsProcessor": lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens,
}
#: Stopping criteria that a lane has of its own.
_STOPS = ("EosTokenCriteria", "MaxLengthCriteria")
_SCALARS = (bool, int, float, str, type(None))
#: Arguments of a forward that a step has; a prompt with others, such as images, is left to plain ``generate``.
_KNOWN = frozenset({"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"})


class NotCapturedError(Exception):
    """Why a call is left to plain ``generate``. It never leaves `CapturedDecode`."""


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen: the processors, sampling or not, tokens that end a text, and the padding.

    A text ends at `end` tokens, prompt included. `held` are tokens that are not chosen before it has `least`. `key` is
    what a graph depends on in it.
    """

    processors: Any
    sample: bool
    eos: torch.Tensor | None
    pad: int
    end: int
    held: torch.Tensor | None
    least: int
    key: tuple[Any, ...]


def choice_of(processors: Any, criteria: Any, config: Any, mask: torch.Tensor | None, device: torch.device) -> Choice:
    """Return how `generate` chooses tokens. Raises `NotCapturedError` for what a graph cannot hold."""
    keys: list[tuple[Any, ...]] = []
    kept = type(processors)()
    held, least = None, 0
    for logits_processor in processors:
        name = type(logits_processor).__name__
        if name in _MINIMA:
            ends = logits_processor.eos_token_id.reshape(-1).to(device)
            if held is not None and not torch.equal(held, ends):
                raise NotCapturedError("two least lengths hold other tokens back")
            held, least = ends, max(least, _MINIMA[name](logits_processor))
            continue
        if isinstance(logits_processor, ForcedTokens):
            kept.append(logits_processor)
            keys.append((name, logits_processor.number))
            continue
        if name not in _DEVICE_ONLY or not type(logits_processor).__module__.startswith("transformers."):
            raise NotCapturedError(f"the logits processor {name} is not among those that a graph can hold")
        processor = _without_padding(logits_processor, mask) if name == _PENALTY else logits_processor
        kept.append(processor)
        keys.append((name, *((field, _plain(value)) for field, value in sorted(vars(processor).items()))))
    eos, ends = None, []
    for criterion in criteria:
        name = type(criterion).__name__
        if name not in _STOPS or not type(criterion).__module__.startswith("transformers."):
            raise NotCapturedError(f"the stopping criterion {name} runs on the host")
        if name == "EosTokenCriteria":
            eos = criterion.eos_token_id.to(device)
        else:  # one that is given stands in place of the configuration's
            ends.append(int(criterion.max_length))
    end = min(ends, default=config.max_length)
    stops = () if eos is None else tuple(eos.reshape(-1).tolist())
    pad = config.pad_token_id
    pad = (stops[0] if stops else 0) if pad is None else int(pad)
    sample = bool(config.do_sample)
    minimum = None if held is None else tuple(held.tolist())
    return Choice(kept, sample, eos, pad, end, held, least, (tuple(keys), sample, stops, pad, minimum))


def _without_padding(processor: Any, mask: torch.Tensor | None) -> Any:
    """Return a penalty that counts all of the history, in which a lane has no padding."""
    ignored = processor.prompt_ignore_length
    if ignored is None and (mask is None or not padding_of(mask).any()):
        return processor
    if mask is None or not isinstance(ignored, torch.Tensor) or not torch.equal(ignored, padding_of(mask).to(ignored)):
        raise NotCapturedError(f"{type(processor).__name__} leaves out another part of the prompt than its padding")
    return type(processor)(processor.penalty)


def padding_of(mask: torch.Tensor) -> torch.Tensor:
    """Return how many positions of each row are padding on the left."""
    return (mask != 0).int().argmax(dim=1)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.reshape(-1).tolist())
    return value if isinstance(value, _SCALARS) else repr(value)


def why_plain(model: Any) -> str:
    """Return why nothing of a model is captured, whatever the call; empty where something may be."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model is an encoder-decoder"
    attention = str(getattr(model.config, "_attn_implementation", None))
    if attention.startswith(("flash", "flex", "paged")):
        return f"attn_implementation={attention!r} takes no static cache with a mask"
    return ""


def refuse_training(model: Any) -> None:
    """Refuse a model of which a part is in training mode, such as a layer that was added to it."""
    name = next((name for name, part in model.named_modules() if part.training), None)
    if name is not None:
        part = f"{name} of " if name else ""
        raise ModelError(f"{part}<{type(model).__qualname__}> is in training mode. Fix: call model.eval()")


def why_apart(model: Any) -> str:
    """Return that a model is on several devices; empty where it is not."""
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    return f"the model is on {' and '.join(sorted(map(str, devices)))}" if len(devices) > 1 else ""


def check_prompt(options: dict[str, Any]) -> None:
    """Refuse ids and masks that plain ``generate`` takes and gets wrong, or refuses far inside."""
    ids = options.get("inputs") if options.get("inputs") is not None else options.get("input_ids")
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        what = (
            f"a {ids.dtype} tensor of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        )
        raise InputError(f"token ids are a tensor of int64 or int32 of shape [rows, tokens], and these are {what}")
    if not ids.numel():
        raise InputError(f"the prompt has shape {list(ids.shape)}. Fix: give at least one token a row")
    mask = options.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        what = f"has shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
        raise InputError(f"attention_mask {what}, and the token ids have {list(ids.shape)}. Fix: give both one shape")


def refuse_mode(config: Any, model_kwargs: dict[str, Any], *, synced: bool) -> None:
    """Leave to plain ``generate`` what this loop does not do."""
    mode = getattr(config.get_generation_mode(), "value", "")
    if mode not in ("greedy_search", "sample"):
        raise NotCapturedError(f"the generation mode {mode} is not captured")
    named = {
        "return_dict_in_generate": config.return_dict_in_generate,
        "prefill_chunk_size": getattr(config, "prefill_chunk_size", None),
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation not in (None, "static"),
        "use_cache=False": not config.use_cache,
        "synced_gpus": synced,
        "token_healing": getattr(config, "token_healing", None),
    }
    stated = next((name for name, value in named.items() if value), None)
    if stated is not None:
        raise NotCapturedError(f"generate is called with {stated}")
    other = next((name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN), None)
    if other is not None:
        raise NotCapturedError(f"the prompt has {other}")
