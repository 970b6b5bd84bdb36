# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Lane`: the static tensors that a decode step reads and writes, and the cache."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.generation.decode_calls import NotCapturedError, padding_of

if TYPE_CHECKING:
    from xpuruntime.pytorch.generation.decode_calls import Choice
    from xpuruntime.pytorch.generation.fused_decoder import FusedDecoder

_SCALARS = (bool, int, float, str, type(None))
#: By how much logits over a range of the cache may differ, as a share of the largest: what bfloat16 rounds, not more.
_SAME = 2**-6
#: What each module has, and which of it are hooks.
_USUAL = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))


@functools.cache
def _ranged_layer() -> type[Any]:
    """Return the class of the cache's layers, which needs transformers."""
    from transformers.cache_utils import StaticLayer

    class RangedLayer(StaticLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
        """A static layer of which attention reads no more than the first `extent` positions."""

        extent = 0
        #: Whether what comes is a prompt, which begins the text and attends to itself alone.
        begins = False

        @property
        def is_compileable(self) -> bool:
            """Say whether the mask is made ahead of the forward; of a prompt, the forward makes it as without cache."""
            return not self.begins

        def get_seq_length(self) -> Any:
            return 0 if self.begins else super().get_seq_length()

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if self.begins:
                if not self.is_initialized:
                    self.lazy_initialization(key_states, value_states)
                length = key_states.shape[-2]
                self.keys[:, :, :length].copy_(key_states)
                self.values[:, :, :length].copy_(value_states)
                return key_states, value_states
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys[:, :, : self.extent], values[:, :, : self.extent]

        def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
            del query_length
            return self.extent, 0

    return RangedLayer


def _static_cache(model: Any, max_length: int) -> Any:
    """Return a cache whose layers all hold `max_length` positions; attention masks what a window leaves out."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    cache = StaticCache(config=model.config, max_cache_len=max_length)
    other = next((layer for layer in cache.layers if not isinstance(layer, StaticLayer)), None)
    if other is not None:
        raise NotCapturedError(f"the model keeps a {type(other).__name__}, which is no cache of keys and values")
    cache.layers[:] = [_ranged_layer()(max_cache_len=max_length) for _ in cache.layers]
    return cache


class Lane:
    """The static tensors of one batch size, and the cache, which stays for all calls."""

    def __init__(self, model: Any, batch: int, max_length: int, device: torch.device) -> None:
        self._model = model
        self.cache = _static_cache(model, max_length)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._more = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})}
        counts = {"dtype": torch.long, "device": device}
        self.token = torch.zeros(batch, 1, **counts)
        self.position = torch.zeros(batch, 1, **counts)
        self.mask = torch.ones(batch, max_length, **counts)
        self.history = torch.zeros(batch, max_length, **counts)
        self.unfinished = torch.ones(batch, **counts)
        #: Tokens so far, prompt included, and how many were chosen while a row was unfinished.
        self.length = torch.zeros(1, **counts)
        self.counted = torch.zeros(1, **counts)
        #: Tokens that a text has to have.
        self.least = torch.zeros(1, **counts)
        #: What runs a step in place of the model.
        self.fused: FusedDecoder | None = None

    def state(self) -> list[torch.Tensor]:
        """Return what a step changes, apart from keys and values: those of its own position, which it writes first."""
        lengths = [layer.cumulative_length for layer in self.cache.layers]
        return [self.token, self.position, self.history, self.unfinished, self.length, self.counted, *lengths]

    @property
    def bytes(self) -> int:
        """How much memory keys, values and the other tensors take."""
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        kept = [*self.state(), self.mask, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def read_up_to(self, extent: int) -> None:
        """Let attention read the first `extent` positions of the cache."""
        for layer in self.cache.layers:
            layer.extent = extent

    def start(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        choice: Choice | None = None,
    ) -> None:
        """Fill the tensors for a prompt. What an earlier call left, whole or broken off, is gone or not read."""
        length = ids.shape[1]
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        # Kernels of fused layers read nothing beyond the text; others give it a share of zero, which hides no NaN.
        stale = ("cumulative_length", "keys", "values") if self.fused is None else ("cumulative_length",)
        for name in stale if layers else ():
            _private_api.foreach_zero([getattr(layer, name) for layer in layers])
        self.mask.fill_(1)
        if mask is not None:
            self.mask[:, :length].copy_(mask != 0)
        if choice is not None and choice.processors:
            # They see all of the history, and count no token twice: what is empty has the last token of the prompt.
            self.history.copy_(ids[:, -1:].expand_as(self.history))
            if mask is not None:
                empty = torch.arange(length, device=ids.device) < padding_of(self.mask[:, :length])[:, None]
                ids = torch.where(empty, ids[:, -1:], ids)
            self.history[:, :length].copy_(ids)
        self.length.fill_(length)
        self.counted.zero_()
        self.unfinished.fill_(1)
        self.least.fill_(0 if choice is None else choice.least)
        self._positions = (self.mask[:, :length].cumsum(-1) - 1).clamp(min=0) if positions is None else positions
        self.position.copy_(self._positions[..., -1:])

    def try_out(self, extents: Sequence[int]) -> None:
        """Run two tokens as a text is run, over the least and the largest range. Raises what the model raises.

        A model that transformers does not declare fit for static caches may mask by itself, and miss what a range
        leaves out: its logits are compared.
        """
        ids = self.token.clone()
        self.start(ids, None, None)
        self._run_prompt(ids)
        declared = getattr(self._model, "_can_compile_fullgraph", False)
        want = None if declared else self._model(ids.expand(-1, 2), use_cache=False).logits[:, -1].float()
        for extent in {min(extents), max(extents)} - {1}:
            self.read_up_to(extent)
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(1)
            self.position.fill_(1)
            got = self.plain_logits()
            if want is not None and not (got - want).abs().amax() <= _SAME * want.abs().amax():
                raise NotCapturedError("the model computes other logits over ranges of a cache")

    def prefill(self, ids: torch.Tensor, choice: Choice) -> None:
        """Run the prompt as without a cache of fixed length, and choose the first token."""
        self.advance(self._run_prompt(ids), choice)

    def _run_prompt(self, ids: torch.Tensor) -> torch.Tensor:
        self.read_up_to(ids.shape[1])
        for layer in self.cache.layers:
            layer.begins = True
        try:
            scores = self._forward(ids, self._positions, is_first_iteration=True)
        finally:
            for layer in self.cache.layers:
                layer.begins = False
        filled = [layer.cumulative_length for layer in self.cache.layers if layer.is_initialized]
        if not filled:
            raise NotCapturedError("the model keeps nothing in the cache that it is given")
        _private_api.foreach_add(filled, ids.shape[1])
        return scores

    def step(self, choice: Choice) -> None:
        """Run the last token, and choose the next: this is what a graph holds."""
        self.advance(self.plain_logits() if self.fused is None else self.fused.logits(self), choice)

    def plain_logits(self) -> torch.Tensor:
        """Run the last token by the model."""
        return self._forward(self.token, self.position)

    def begin_probe(self, random: torch.Generator, magnitude: float) -> None:
        """Be as after a random text that fills the range of the cache but one, padded on the left in the first row."""
        device, rows, extent = self.token.device, self.token.shape[0], self.cache.layers[0].extent
        ids = torch.randint(self._model.config.vocab_size, (rows, extent - 1), generator=random, device=device)
        mask = torch.ones_like(ids)
        mask[0, : extent // 3] = 0
        self.start(ids[:, :1], None, None)
        self._forward(ids[:, :1], self._positions, is_first_iteration=True)
        for layer in self.cache.layers:
            layer.keys.normal_(0, magnitude, generator=random)
            layer.values.normal_(generator=random)
            layer.cumulative_length.fill_(extent - 1)
        self.mask[:, : extent - 1].copy_(mask)
        self.token.copy_(ids[:, -1:])
        self.length.fill_(extent)
        self.position.copy_(mask.sum(1, keepdim=True))

    def written(self, cached: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of what the last step has put into a layer of the cache."""
        last = self.length - 1
        return cached.keys.index_select(2, last), cached.values.index_select(2, last)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_name: self.cache, **self._more, **kwargs}
        if self._takes_positions:
            arguments["position_ids"] = positions
        extent = self.cache.layers[0].extent
        inputs = self._model.prepare_inputs_for_generation(ids, attention_mask=self.mask[:, :extent], **arguments)
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        return logits[:, -1].to(copy=True, dtype=torch.float32)

    def advance(self, scores: torch.Tensor, choice: Choice) -> None:
        """Choose a token of each row, and be as after it."""
        if choice.held is not None:
            open_ended = scores.index_fill(1, choice.held, -torch.inf)
            scores = torch.where(self.length < self.least, open_ended, scores)
        scores = choice.processors(self.history, scores)
        chosen = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if choice.sample else scores.argmax(-1)
        self.counted.add_(self.unfinished.amax())
        if choice.eos is not None:
            chosen = chosen * self.unfinished + choice.pad * (1 - self.unfinished)
            self.unfinished.mul_(~torch.isin(chosen, choice.eos))
        self.token.copy_(chosen[:, None])
        self.history.index_copy_(1, self.length, chosen[:, None])
        self.length.add_(1)
        self.position.add_(1)


class ModelFacts:
    """What of a model a graph freezes: places of tensors, switches of modules and configurations, and which hooks.

    Modules are compared as they are, attribute by attribute; only where one differs are the facts made anew, since
    models may keep their last results.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._facts = self._make()

    def hold(self) -> bool:
        """Say whether the model is as it was."""
        with contextlib.suppress(Exception):  # such as of tensors, which are neither equal nor unequal
            if not any(self._empty) and self._parts == self._kept and self._now() == self._places:
                return True
        before, self._facts = self._facts, self._make()
        return bool(self._facts == before)

    def _make(self) -> Any:
        #: Kept, since the facts have the numbers of the objects.
        self._modules = list(self._model.modules())
        owned = [vars(module) for module in self._modules]
        self._tensors = [tensors for own in owned for name in _TENSORS if (tensors := own.get(name)) is not None]
        parts = [
            part
            for own in owned
            for name, part in own.items()
            if name not in _TENSORS and isinstance(part, (dict, list))
        ]
        # Forwards read them, such as how attention is computed; modules share them.
        shared = {id(config): config for own in owned if hasattr(config := own.get("config"), "__dict__")}
        configs = [vars(config) for config in shared.values()]
        self._parts: list[Any] = owned + configs + [part for part in parts if part]
        #: Most are, such as those of hooks.
        self._empty = [part for part in parts if not part]
        self._kept = [dict(part) if isinstance(part, dict) else list(part) for part in self._parts]
        self._places = self._now()
        switches = [[(name, _switch(value)) for name, value in config.items()] for config in configs]
        return self._places, switches, [_facts_of(module) for module in self._modules]

    def _now(self) -> list[Any]:
        return [
            (name, tensor.data_ptr() if type(tensor) in _PLAIN else _place(tensor), tensor.dtype, tensor.device)
            for tensors in self._tensors
            for name, tensor in tensors.items()
            if tensor is not None
        ]


def _place(tensor: torch.Tensor) -> Any:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.data_ptr()
    return tuple(_place(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _facts_of(module: Any) -> list[Any]:
    own = vars(module)
    facts: list[Any] = [id(module), id(own.get("forward")), own.get("training")]
    facts += [(name, tuple(own[name])) for name in _HOOKS if own.get(name)]
    for name, value in own.items():
        if name not in _USUAL and (switch := _switch(value)) is not None:
            facts.append((name, switch))
    return facts


def _switch(value: Any) -> Any:
    """Return the value of a switch, such as those of adapters, or the keys of a dict; nothing of anything else."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, _SCALARS) for item in value):
        return tuple(value)
    if isinstance(value, dict) and all(isinstance(name, _SCALARS) for name in value):
        return tuple((name, item if isinstance(item, _SCALARS) else None) for name, item in value.items())
    return None
