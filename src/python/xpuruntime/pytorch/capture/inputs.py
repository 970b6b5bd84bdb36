# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`StaticInputs`: buffers that a graph reads, and how arguments get into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch._private_api import pytree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["StaticInputs", "flatten", "on_device", "signature", "structure_key"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
#: Structure of a flat call: positional tensors and nothing else.
FLAT = "flat"


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of the arguments and their structure, which is `FLAT` for positional tensors alone."""
    if not kwargs and all(type(leaf) in _PLAIN for leaf in args):
        return args, FLAT
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    return leaves, structure


def structure_key(structure: Any) -> Any:
    """Return what stands for a structure in a key: itself, unless this PyTorch cannot hash it."""
    try:
        hash(structure)
    except TypeError:
        return repr(structure)
    return structure


def unflatten(leaves: Sequence[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments made of leaves."""
    if structure is FLAT:
        return tuple(leaves), {}
    args, kwargs = pytree.tree_unflatten(list(leaves), structure)
    return args, kwargs


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a graph depends on in the leaves: layout and type of a tensor, the value of anything else."""
    try:
        return tuple(
            [
                (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad)
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
                else _constant(leaf)
                for leaf in leaves
            ]
        )
    except TypeError as error:
        msg = f"an argument of the step is neither a tensor nor hashable: {error}; pass tensors, or bind it to fn"
        raise InputError(msg) from None


def _constant(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        msg = f"an argument of the step is a tensor with layout {leaf.layout}; a graph reads strided tensors alone"
        raise InputError(msg)
    hash(leaf)
    return (type(leaf), leaf)


def on_device(leaves: Sequence[Any], device: torch.device) -> list[Any]:
    """Return the leaves with all tensors on `device`; what is there already is not copied."""
    return [
        _leaf_like(leaf, leaf.to(device, non_blocking=True)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def _leaf_like(leaf: Any, moved: Any) -> Any:
    return moved if moved is leaf else moved.detach().requires_grad_(leaf.requires_grad)


class StaticInputs:
    """Buffers on a device, one for each tensor among the leaves, filled with what the leaves hold."""

    def __init__(self, leaves: Sequence[Any], structure: Any, device: torch.device) -> None:
        self.structure = structure
        self.leaves = [
            torch.empty_like(leaf, device=device, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self._places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._all = len(self._places) == len(self.leaves)
        self.fill(leaves)
        for number in self._places:
            self.leaves[number].requires_grad_(leaves[number].requires_grad)
        self._recorded = any(leaves[number].requires_grad for number in self._places)

    def fill(self, leaves: Sequence[Any]) -> None:
        """Copy arguments into the buffers, on the current stream; a buffer given as its own argument stays."""
        if self._recorded_now():
            with torch.no_grad():
                self._fill(leaves)
        else:
            self._fill(leaves)

    def _recorded_now(self) -> bool:
        return getattr(self, "_recorded", False)

    def _fill(self, leaves: Sequence[Any]) -> None:
        buffers = self.leaves
        for number in self._places:
            buffer, leaf = buffers[number], leaves[number]
            if leaf is not buffer:
                buffer.copy_(leaf, non_blocking=True)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the buffers as positional and named arguments."""
        return unflatten(self.leaves, self.structure)

    def forget_gradients(self) -> None:
        """Take the gradients of the buffers away, so that the next backward pass makes new ones."""
        for number in self._places:
            self.leaves[number].grad = None

    def keep_until_read(self) -> None:
        """Let nobody have the memory of the buffers before the work that is on the current stream now is done."""
        for number in self._places:
            buffer = self.leaves[number]
            if buffer.is_cuda:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))

    @property
    def bytes(self) -> int:
        """How much memory the buffers take."""
        return sum(self.leaves[n].numel() * self.leaves[n].element_size() for n in self._places)
