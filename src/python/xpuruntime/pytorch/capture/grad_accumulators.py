# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gradient accumulation nodes of autograd with the streams that they remember, and captures by ``torch.cuda.graph``.

Kernels chosen for eager calls by measured times are chosen anew in such a capture, by the time on the device. PyTorch
refuses to capture a backward pass while a loss of the warm-up is alive, where that ran on the default stream; see
`forget_accumulators`. In this, captures on a stream that the caller names, as those of ``torch.compile``, are left
alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.dispatch.context import forget_tuned_routes
from xpuruntime.pytorch.method_patch import MethodPatch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "forget_accumulators",
    "leave_torch_graph",
    "leaves_on",
    "patch_torch_graph",
]

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
