# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`logprobs_of`: what a model of PyTorch says about the next token, by the path that generates."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.argument_types import CALLABLE, ArgumentType, check_types
from xpuruntime.errors import InputError, ModelError
from xpuruntime.pytorch.dispatch.policy_scope import kernel_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.inference.session_arguments import PolicyLike

__all__ = ["TorchLogprobs", "logprobs_of"]

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
        In place of ``model.generate``, with its arguments.
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
        self._generate = generate if generate is not None else getattr(model, "generate", None)
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
        forced = _Forced(tokens[half:])
        self._run(tokens[:half], len(tokens) - half, logits_processor=[forced])
        return torch.cat(forced.scores).numpy()

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


class _Forced:
    """A logits processor that keeps the scores, and has a certain token chosen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        token = self._tokens[len(self.scores)]
        if not 0 <= token < scores.shape[-1]:
            raise InputError(
                f"a text has the token {token}, and the model tells tokens 0 to {scores.shape[-1] - 1} apart. Fix: "
                "encode the texts with the model's own tokenizer"
            )
        self.scores.append(scores.float().cpu())
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, token] = 0
        return chosen
