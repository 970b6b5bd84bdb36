# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`JoinedProducts`: products of one input as one, where a probe shows the same bits: q, k, v; gate, up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch calls it

#: Names of the parts, in the order in which a module calls them with one input.
_KINDS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TRIALS = 3


class _Group:
    """Linear layers of one module whose weights lie side by side; each parameter is a view, none is held twice."""

    def __init__(self, module: Any, kind: tuple[str, ...], parts: list[Any]) -> None:
        self.module = module
        self.kind = kind
        self.parts = parts
        self.sizes = [part.out_features for part in parts]
        self.weight = self._join("weight")
        self.bias = None if parts[0].bias is None else self._join("bias")
        self._made: list[torch.Tensor] = []

    def _join(self, name: str) -> torch.Tensor:
        tensors = [getattr(part, name) for part in self.parts]
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, view in zip(tensors, joined.split(self.sizes), strict=True):
            tensor.data = view
        return joined

    def separate(self) -> None:
        for part in self.parts:
            for tensor, joined in ((part.weight, self.weight), (part.bias, self.bias)):
                # Another may be in its place, such as a quantized one, which has no memory of its own.
                if joined is None or type(tensor) is not torch.nn.Parameter:
                    continue
                if tensor.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr():
                    tensor.data = tensor.detach().clone()

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        return outputs

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Stand in for the first part, and keep what the others return for the same input."""
        outputs = self.outputs(x)
        self._made = [x, *outputs[1:]]
        return outputs[0]

    def other(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Stand in for another part."""
        if self._made and self._made[0] is x:
            return self._made[number]
        return F.linear(x, self.parts[number].weight, self.parts[number].bias)

    def forget(self) -> None:
        self._made = []

    def same_bits(self, rows: int) -> bool:
        """Say whether one product of one token a row has the bits of the single ones."""
        random = torch.Generator(self.weight.device).manual_seed(rows)
        for _ in range(_TRIALS):
            x = torch.randn(
                rows, 1, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device, generator=random
            )
            single = [F.linear(x, part.weight, part.bias) for part in self.parts]
            if not all(map(torch.equal, single, self.outputs(x))):
                return False
        return True


class JoinedProducts:
    """The groups of a model, and which of them may be used for a batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        with torch.inference_mode(False):
            self._groups = [
                _Group(module, kind, parts)
                for module in model.modules()
                for kind in _KINDS
                if (parts := _parts(module, kind))
            ]
        self._proved: dict[int, list[_Group]] = {}

    def operands(self, module: Any, first: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of the joined product of a module that begins with a part."""
        for group in self._groups:
            if group.module is module and group.kind[0] == first:
                return group.weight, group.bias
        raise AttributeError(f"{type(module).__name__} has no {first} that is joined")

    def prove(self, rows: int) -> list[str]:
        """Probe all groups for so many rows, once. Returns a line for each kind."""
        if rows in self._proved:
            return []
        proved = self._proved[rows] = [group for group in self._groups if group.same_bits(rows)]
        lines = []
        for kind in _KINDS:
            there = [group for group in self._groups if group.kind == kind]
            count = sum(group.kind == kind for group in proved)
            if there:
                said = f"{', '.join(kind)} as one product, {rows} rows: in {count} of {len(there)} modules"
                lines.append(said + ("" if count == len(there) else "; others have other bits, and stay as they are"))
        return lines

    @contextlib.contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Let the model compute by joined products in the block, where they were proved for so many rows."""
        groups = self._proved.get(rows, [])
        try:
            for group in groups:
                for number, part in enumerate(group.parts):
                    part.forward = group.first if number == 0 else _other(group, number)
            yield
        finally:
            for group in groups:
                group.forget()
                for part in group.parts:
                    vars(part).pop("forward", None)

    def separate(self) -> None:
        """Undo it: each parameter has memory of its own again."""
        for group in self._groups:
            group.separate()
        self._groups, self._proved = [], {}


def _other(group: _Group, number: int) -> Any:
    return lambda x: group.other(number, x)


def _parts(module: Any, kind: tuple[str, ...]) -> list[Any]:
    """Return the layers of a kind, where they are plain ones of one input, and nobody else has a hand in them."""
    parts: list[Any] = [getattr(module, name, None) for name in kind]
    if not all(type(part) is torch.nn.Linear and "forward" not in vars(part) for part in parts):
        return []
    if any(vars(part)[hooks] for part in parts for hooks in ("_forward_hooks", "_forward_pre_hooks")):
        return []
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    alike = {(type(weight), weight.shape[1], weight.dtype, weight.device) for weight in weights}
    usable = all(type(weight) is torch.nn.Parameter and weight.is_contiguous() for weight in weights)
    own = len({id(weight) for weight in weights}) == len(weights)
    return parts if len(alike) == 1 and usable and own and len({bias is None for bias in biases}) == 1 else []
