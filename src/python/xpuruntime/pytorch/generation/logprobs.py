# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`logprobs_of`: what a model of PyTorch says about the next token, by the path that generates."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.argument_types import CALLABLE, ArgumentType, check_types
from xpuruntime.errors import InputError, ModelError
from xpuruntime.pytorch.call_scope.generation_calls import generate_of
from xpuruntime.pytorch.dispatch.policy_scope import kernel_policy

if TYPE_CHECKING:
    from xpuruntime.inference.session_arguments import PolicyLike

_TOKENIZER = ArgumentType("a tokenizer with encode", lambda value: callable(getattr(value, "encode", None)))


def logprobs_of(
    model: torch.nn.Module,
    *,
    policy: PolicyLike | None = None,
    generate: Callable[..., Any] | None = None,
    tokenizer: Any = None,
) -> TorchLogprobs:
    """Return what a model says about the next token, for `parity` and for ``xpuruntime.generation.check_gates``.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode. One with a ``generate`` is asked by it: the first half of a text is the prompt, and the
        tokens of the other half are forced one by one, so that prefill, decode, cache and logits processors of its
        ``generation_config`` are those of a generation. Of another, a single forward gives all logits.
    policy : optional
        As for `kernel_policy`; holds while the model is asked. Default: whatever is in force then.
    generate : callable, optional
        In place of ``model.generate``, with its arguments, ``streamer`` among them; such as that of `capture_decode`,
        whose captured steps are asked then.
    tokenizer : optional
        With ``encode``, for texts that are strings.

    Returns
    -------
    TorchLogprobs

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> class Successor(torch.nn.Module):
    ...     def forward(self, input_ids):
    ...         return torch.nn.functional.one_hot((input_ids + 1) % 4, 4).float()
    >>> xrt_torch.logprobs_of(Successor().eval()).logprobs([0, 1, 2]).argmax(-1).tolist()
    [1, 2]
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"logprobs_of takes a torch.nn.Module, got a {type(model).__name__}")
    types = {"generate": CALLABLE, "tokenizer": _TOKENIZER}
    check_types(types, {"generate": generate, "tokenizer": tokenizer}, optional=types)
    return TorchLogprobs(model, policy, generate, tokenizer)


class TorchLogprobs:
    """What a model says about the next token. Made by `logprobs_of`; its methods enter the policy."""

    def __init__(
        self, model: torch.nn.Module, policy: Any, generate: Callable[..., Any] | None, tokenizer: Any
    ) -> None:
        self.model = model
        self._policy = policy
        self._generate = generate if generate is not None else generate_of(model)
        self._forced = ForcedTokens()
        if tokenizer is not None:
            self.encode = tokenizer.encode

    @contextlib.contextmanager
    def running(self) -> Any:
        """Run the model in the block as it is asked: without gradients, under the policy."""
        training = next((name for name, part in self.model.named_modules() if part.training), None)
        if training is not None:
            what = f"<{type(self.model).__qualname__}>"
            raise ModelError(f"{what} is in training mode: its results are random. Fix: call model.eval()")
        with contextlib.ExitStack() as stack:
            if self._policy is not None:
                stack.enter_context(kernel_policy(self._policy, root=self.model))
            stack.enter_context(torch.no_grad())
            yield

    def ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return tokens as a batch of one, on the device of the model."""
        device = next((parameter.device for parameter in self.model.parameters()), None)
        return torch.tensor([list(tokens)], dtype=torch.long, device=device)

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """Return the scores of the last tokens: of those after the prompt, or of all but the first."""
        if len(tokens) < 2:
            raise InputError(f"a text of {len(tokens)} tokens has no next token. Fix: give at least 2 tokens")
        if self._generate is None:
            with self.running():
                result = self.model(self.ids(tokens))
            logits = result if isinstance(result, torch.Tensor) else result["logits"]
            return logits[0, :-1].float().cpu().numpy()
        half = max(1, len(tokens) // 2)
        forced = self._forced
        forced.begin(tokens[half:])
        self._run(tokens[:half], len(tokens) - half, logits_processor=[forced], streamer=forced)
        if len(forced.scores or ()) != len(tokens) - half:
            raise ModelError(
                "generate has not told its streamer of each token. Fix: give one that passes `streamer` on"
            )
        return torch.cat(forced.scores or []).numpy()

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` greedy tokens after `tokens`."""
        if self._generate is None:
            new_tokens: list[int] = []
            while len(new_tokens) < count:
                new_tokens.append(int(self.logprobs([*tokens, *new_tokens, 0])[-1].argmax()))
            return new_tokens
        generated: list[int] = self._run(tokens, count, ends=True)[0, len(tokens) :].tolist()
        return generated

    def _run(self, prompt: Sequence[int], count: int, *, ends: bool = False, **options: Any) -> Any:
        assert self._generate is not None
        ids = self.ids(prompt)
        if not ends:
            options["eos_token_id"] = None  # a text may go on after a token that ends one
        with self.running():
            return self._generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=1, **options
            )


class ForcedTokens:
    """A logits processor that has certain tokens chosen, and a streamer that reads the scores they were chosen by.

    What it does in a step is on the device, between tensors that stay, so that a captured step can hold it.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        #: Its own, where an address may become another's.
        self.number = next(self._numbers)
        self._tokens: list[int] = []
        self._next = self._kept = torch.empty(0)
        #: Of each token so far; of none before the prompt.
        self.scores: list[torch.Tensor] | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Have these tokens be chosen from now on."""
        self._tokens, self.scores = list(tokens), None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of which the next token is the only one."""
        del input_ids
        if not self.scores:  # the first token, which no captured step chooses
            self._prepare(scores)
        self._kept.copy_(scores)
        return torch.full_like(scores, -torch.inf).index_fill(1, self._next, 0)

    def _prepare(self, scores: torch.Tensor) -> None:
        wrong = next((token for token in self._tokens if not 0 <= token < scores.shape[-1]), None)
        if wrong is not None:
            raise InputError(
                f"a text has the token {wrong}, and the model tells tokens 0 to {scores.shape[-1] - 1} apart. Fix: "
                "encode the texts with the model's own tokenizer"
            )
        if (self._kept.shape, self._kept.device) != (scores.shape, scores.device):
            self._kept = torch.empty_like(scores, dtype=torch.float32)
            self._next = torch.empty(1, dtype=torch.long, device=scores.device)
        self._next.fill_(self._tokens[0])

    def put(self, value: torch.Tensor) -> None:
        """Keep the scores of the token that was chosen, and have the next be chosen after it."""
        if self.scores is None:  # the prompt
            self.scores = []
            return
        number = len(self.scores)
        if value.tolist() != self._tokens[number : number + 1]:
            raise ModelError(f"generate has chosen token {value.tolist()} where {self._tokens[number]} was forced")
        self.scores.append(self._kept.to("cpu", copy=True))
        if number + 1 < len(self._tokens):
            self._next.fill_(self._tokens[number + 1])

    def end(self) -> None:
        """Do nothing: the number of tokens is that of the text."""
