# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What graphs were captured for: inputs, all else that a graph depends on, and the report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.notebook import one_line
from xpuruntime.printable import bytes_text, printable
from xpuruntime.pytorch._private_api import pytree
from xpuruntime.pytorch.capture.captured_state import hyperparameters
from xpuruntime.pytorch.dispatch import context

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.captured_state import CapturedState

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
        number = self._policy_ids[in_force.number] = self._policies.setdefault(in_force.policy, len(self._policies) + 1)
        return number


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


def difference(first: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Return which parts of two keys differ, in words."""
    return ", ".join(name for name, a, b in zip(PARTS, first, other, strict=True) if a != b)


def _input(part: tuple[Any, ...]) -> str:
    if len(part) == 2:
        return repr(part[1])
    return f"{_short(part[1])}{list(part[0])}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        msg = f"an argument of the step is neither a tensor nor hashable: {error}. Fix: pass tensors, or bind it to fn"
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


@dataclass(frozen=True)
class GraphInfo:
    """One graph of a step.

    Attributes
    ----------
    key : str
        What it was captured for: the inputs, and what differs from the usual.
    bytes : int
        By how much the shared pool grew for it, and its input buffers. A graph that finds room in the pool needs
        less than its work does.
    hits : int
        Calls that it has served.
    """

    key: str
    bytes: int
    hits: int


@dataclass(frozen=True)
class CaptureReport:
    """What of a step runs as a graph, what does not, and why.

    Attributes
    ----------
    device : str
    captured : bool
        Whether calls are served by graphs, as far as is known now.
    optimizer, scaler : str
        ``"in the graph"``, ``"after each replay"``, ``"in fn"``, ``"eager"`` or ``"none"``.
    reasons : tuple of str
        Why something runs eagerly, each once.
    notes : tuple of str
        What is worth knowing besides.
    graphs : tuple of GraphInfo
        Least recently used first.
    captures, replays, eager_calls : int
        How many there were.
    """

    device: str
    captured: bool
    optimizer: str
    scaler: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    graphs: tuple[GraphInfo, ...]
    captures: int
    replays: int
    eager_calls: int

    @property
    def whole_step(self) -> bool:
        """Whether nothing of the step runs outside of its graph."""
        return self.captured and "after each replay" not in (self.optimizer, self.scaler)

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  graph {graph.key}: {bytes_text(graph.bytes)}, {graph.hits} calls" for graph in self.graphs]
        return printable("\n".join([*lines, *(f"  {line}" for line in self._remarks())]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines, fragment_table

        rows = [(graph.key, bytes_text(graph.bytes), str(graph.hits)) for graph in self.graphs]
        parts = [fragment_lines([self._headline()])]
        if rows:
            parts.append(fragment_table("graphs", ("captured for", ">size", ">calls"), rows))
        return fragment([*parts, fragment_lines(self._remarks())])

    def _headline(self) -> str:
        return (
            f"step on {self.device}: {'captured' if self.captured else 'eager'}; "
            f"optimizer {self.optimizer}, scaler {self.scaler}; "
            f"{self.captures} captured, {self.replays} replayed, {self.eager_calls} eager"
        )

    def _remarks(self) -> list[str]:
        return [*(f"because {reason}" for reason in self.reasons), *(f"note: {note}" for note in self.notes)]
