# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`StepProgram`: the phases of one call of a step, and which of them can be captured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch._private_api import messages, pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["StepProgram", "uncached_autocast"]


class StepProgram:
    """What one call of a step does."""

    def __init__(
        self,
        fn: Callable[..., Any],
        optimizer: Any,
        scaler: Any,
        before_step: Callable[[], Any] | None,
        parameters: list[Any],
    ) -> None:
        self.fn = fn
        self.optimizer = optimizer
        self.scaler = scaler
        self.before_step = before_step
        self.parameters = parameters
        self.steps_inside = True

    def captured_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what belongs into a graph. Returns what `fn` does, apart from autograd."""
        self.forget_gradients()
        result = self.fn(*args, **kwargs)
        if self.optimizer is not None:
            loss = _loss_of(result)
            _differentiate(loss if self.scaler is None else self.scaler.scale(loss))
            if self.steps_inside:
                self.update()
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), result)

    def rest(self) -> None:
        """Run what is left after a replay."""
        if self.optimizer is not None and not self.steps_inside:
            self.update()

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all of the step, eagerly. Returns as `captured_part`."""
        outputs = self.captured_part(args, kwargs)
        self.rest()
        return outputs

    def update(self) -> None:
        """Run the optimizer's step and what belongs to it."""
        if self.before_step is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.before_step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def forget_gradients(self) -> None:
        """Take all gradients away, so that backward makes new ones where it runs; not where none can be made."""
        if not torch.is_grad_enabled():
            return
        for parameter in self.parameters:
            parameter.grad = None


def _loss_of(result: Any) -> Any:
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        msg = (
            f"capture_graph: with optimizer=, fn returns the loss, one number in a tensor, or a tuple that begins with "
            f"it; this fn returned {what}. Return it, or do the whole step in fn and leave optimizer= out"
        )
        raise InputError(msg)
    if not loss.requires_grad:
        msg = (
            "capture_graph: the loss that fn returned does not depend on any parameter, so backward has nothing to do; "
            "return it before detach(), and do not call the step under torch.no_grad()"
        )
        raise InputError(msg)
    return loss


def _differentiate(loss: Any) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if not messages.is_second_backward(error):
            raise
        msg = (
            "capture_graph: with optimizer=, the step itself runs backward and the optimizer, and fn has run backward "
            "already. Take backward and the optimizer's calls out of fn, or do the whole step in fn and leave "
            "optimizer= out"
        )
        raise InputError(msg) from error


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """Keep casts of one capture out of the next: no weight that was cast before is used inside, or after."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
