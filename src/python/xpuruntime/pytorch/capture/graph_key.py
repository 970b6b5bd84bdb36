# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GraphKey`: all that a captured graph depends on besides its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.capture.capturable import hyperparameters
from xpuruntime.pytorch.dispatch import context

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.captured_state import CapturedState

__all__ = ["PARTS", "GraphKey", "describe", "difference"]

#: The parts of the key of a graph, in order.
PARTS = (
    "inputs",
    "structure of the inputs",
    "policy",
    "grad mode",
    "inference mode",
    "autocast",
    "type of autocast",
    "deterministic algorithms",
    "train or eval mode of a module",
    "a number of an optimizer",
)


class GraphKey:
    """Finds what a graph depends on besides its inputs, quickly, at each call."""

    def __init__(self, used: CapturedState, device: torch.device) -> None:
        self._modules = used.all_modules()
        self._optimizers = used.optimizers
        self._type = device.type
        #: Equal policies make equal graphs, so that entering one again and again captures nothing anew.
        self._policies: dict[Any, int] = {}
        self._policy_ids: dict[int, int] = {0: 0}

    def now(self) -> tuple[Any, ...]:
        """Return all of it, as the end of a key."""
        in_force = context.active_policy()
        number = 0 if in_force is None else in_force.number
        policy = self._policy_ids.get(number)
        if policy is None:
            policy = self._number_of(in_force)
        return (
            policy,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(self._type),
            torch.get_autocast_dtype(self._type),
            torch.are_deterministic_algorithms_enabled(),
            tuple([module.training for module in self._modules]),
            tuple([numbers for optimizer in self._optimizers for numbers in hyperparameters(optimizer)]),
        )

    def _number_of(self, in_force: Any) -> int:
        if len(self._policy_ids) > 1024:
            self._policy_ids = {0: 0}
        found = self._policy_ids[in_force.number] = self._policies.setdefault(in_force.policy, len(self._policies) + 1)
        return found


def describe(key: tuple[Any, ...]) -> str:
    """Return the key of a graph in words, for reports."""
    inputs, _, policy, grad, _, autocast, dtype, _, training, _ = key
    words = [", ".join(_input(part) for part in inputs) or "no inputs"]
    if training:
        words.append("train" if all(training) else "eval" if not any(training) else "train in part")
    if not grad:
        words.append("no_grad")
    if autocast:
        words.append(f"autocast {_short(dtype)}")
    if policy:
        words.append(f"policy {policy}")
    return "; ".join(words)


def difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Return which parts of two keys differ, in words."""
    return ", ".join(name for name, a, b in zip(PARTS, one, other, strict=True) if a != b)


def _input(part: tuple[Any, ...]) -> str:
    if len(part) == 2:
        return repr(part[1])
    return f"{_short(part[1])}{list(part[0])}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
