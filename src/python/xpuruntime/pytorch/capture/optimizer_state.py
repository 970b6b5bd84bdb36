# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OptimizerState`: the state of an optimizer and its scaler, restored after the warm-up."""

from __future__ import annotations

from typing import Any

import torch

from xpuruntime.pytorch import _private_api

__all__ = ["OptimizerState", "ScalerState"]

#: These write the state of a parameter before they first use it, so that what is written first is what a step begins
#: with. Subclasses are their own.
_WRITES_FIRST = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
)


class _FirstValues(dict[str, Any]):
    """The state of one parameter, which also keeps what each entry was first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy(value)
        super().__setitem__(key, value)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class OptimizerState:
    """The state of an optimizer at one moment.

    A tensor keeps its place when it is given back, because a graph refers to places. What the warm-up adds for a
    parameter that had no state yet is set to what the optimizer began with, where that is known: then the step that is
    captured finds its state in memory that no graph writes to begin with. It can be given back any number of times, and
    what was added stays in the memory of the first time, because graphs that were captured meanwhile refer to it.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        state = optimizer.state
        self._entries = {p: {key: (value, _copy(value)) for key, value in state[p].items()} for p in list(state)}
        self._groups = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._factory = getattr(state, "default_factory", None)
        if type(optimizer) in _WRITES_FIRST and self._factory is not None:
            state.default_factory = _FirstValues

    def restore(self) -> str:
        """Give everything back. Returns why a step cannot be captured yet, or nothing.

        Afterwards the optimizer is as it was, except that state which it would have made in its next step may be
        there already, with the values that the step would begin with.
        """
        state = self.optimizer.state
        if self._factory is not None:
            state.default_factory = self._factory
        problem = ""
        for parameter in list(state):
            before = self._entries.get(parameter)
            if before is None:
                problem = self._begin(parameter) or problem
            else:
                problem = self._restore(parameter, before) or problem
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            for key, (value, copy) in before.items():
                group[key] = _restored(value, copy)
        return problem

    def _begin(self, parameter: Any) -> str:
        """Set state that the warm-up made to what it began with, or take it away."""
        state = self.optimizer.state
        made = state[parameter]
        name = type(self.optimizer).__name__
        if isinstance(made, _FirstValues) and made.first.keys() >= made.keys():
            self._entries[parameter] = {key: (value, made.first[key]) for key, value in made.items()}
            return self._restore(parameter, self._entries[parameter])
        if type(self.optimizer) is torch.optim.SGD and self._undamped(parameter):
            for value in made.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            self._entries[parameter] = {key: (value, _copy(value)) for key, value in made.items()}
            return ""
        del state[parameter]
        return f"{name} makes state in its first step, and what it begins with is not known" if made else ""

    def _undamped(self, parameter: Any) -> bool:
        """Say whether the first step of SGD is one from a momentum of zero, which dampening makes it not."""
        groups = self.optimizer.param_groups
        return any(group["dampening"] == 0 for group in groups if any(parameter is p for p in group["params"]))

    def _restore(self, parameter: Any, before: dict[str, tuple[Any, Any]]) -> str:
        now = self.optimizer.state[parameter]
        moved = [key for key, (value, _) in before.items() if isinstance(value, torch.Tensor) and now[key] is not value]
        added = now.keys() - before.keys()
        self.optimizer.state[parameter] = {key: _restored(value, copy) for key, (value, copy) in before.items()}
        name = type(self.optimizer).__name__
        if moved:
            return f"{name} puts new tensors into its state ({', '.join(moved)}) at each step"
        return f"{name} adds {', '.join(sorted(added))} to its state" if added else ""


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
        with torch.no_grad():
            value.copy_(copy)
        return value
    return copy


class ScalerState:
    """The state of a `torch.amp.GradScaler` at one moment; makes its tensors, if it has none yet."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler = scaler
        if scaler.is_enabled():
            scaler.scale(torch.zeros((), device=device))
        self._state = scaler.state_dict()

    def restore(self) -> None:
        """Give it back, in place, also in the middle of a step."""
        if self._state:
            self.scaler.load_state_dict(self._state)
        _private_api.scaler_states(self.scaler).clear()
