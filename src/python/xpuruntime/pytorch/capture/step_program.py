# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`StepProgram`: the phases of one call of a step, and which of them can be captured."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch._private_api import lookup, pytree
from xpuruntime.pytorch.dispatch.context import forget_tuned_routes
from xpuruntime.pytorch.method_patch import MethodPatch


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

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if not lookup.is_second_backward(error):
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


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def forget_accumulators(leaves: Iterable[Any]) -> None:
    """Let the next forward pass make new nodes that add up the gradients of these leaves.

    Such a node belongs to the stream on which it was made, and lives as long as any graph that leads to it: a loss of a
    warm-up on the default stream that is still at hand would draw that stream into a capture, and spoil it. What was
    recorded before still adds to the same gradients. PyTorch drops the node when a tensor changes its type, so that is
    done and undone; the memory of the leaf stays where it is.

    With ``torch.distributed`` initialized nothing is done, because its wrappers hang their hooks on these nodes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    for leaf in leaves:
        if type(leaf) not in _PLAIN or not leaf.requires_grad or not leaf.is_leaf or leaf.layout is not torch.strided:
            continue
        data, gradient = leaf.data, leaf.grad
        leaf.grad = None
        other = torch.float32 if leaf.dtype is not torch.float32 else torch.float64
        leaf.data = torch.empty(0, dtype=other, device=leaf.device)
        leaf.data = data
        leaf.grad = gradient


@contextlib.contextmanager
def warnings_of_torch() -> Iterator[None]:
    """Have what PyTorch and Triton warn of in the block be told, where filters make it an error: it decides nothing."""
    with warnings.catch_warnings():
        for package in ("torch", "triton"):
            warnings.filterwarnings("default", module=rf"{package}(\.|$)")
        yield


def leaves_on(device: torch.device) -> list[Any]:
    """Return all tensors on a device that backward may write gradients of, since nothing says which a block uses."""
    leaves = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in gc.get_objects():
            if not issubclass(type(value), torch.Tensor):
                continue
            with contextlib.suppress(Exception):  # a tensor that is none any more
                if value.requires_grad and value.is_leaf and value.device == device:
                    leaves.append(value)
    return leaves


def _forgetting(original: Any) -> Any:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if self.capture_stream is type(self).default_capture_stream:
            forget_accumulators(leaves_on(self.capture_stream.device))
        forget_tuned_routes()
        return original(self)

    return enter


_PATCH = MethodPatch("torch_graph_patch", torch.cuda.graph, "__enter__", _forgetting)
patch_torch_graph = _PATCH.require
leave_torch_graph = _PATCH.release
