# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs on which the canary compares kernels with float64, for each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch.providers.operations import OPERATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.torch_kernels import Operand, TorchCall

#: Random numbers that are drawn for one operand of own sizes: no multiple of usual ones.
_DRAWN = (1 << 20) - 3
#: Length of the attention that is also computed of views.
_VIEWED = 65
#: Number of keys of the attention of one sequence.
_ALONE = 200


class Case(NamedTuple):
    """Inputs by operand, attributes, and what they are, for the sentence of a verdict."""

    what: str
    operands: dict[str, Tensor]
    attributes: dict[str, Any]


def order_of(operand: Operand) -> list[int]:
    """Return the dimensions of an operand, the outermost in memory first."""
    return sorted(range(len(operand.shape)), key=lambda dim: -operand.strides[dim])


def own_sizes(call: TorchCall) -> list[int]:
    """Return the sizes that code compiled for a call has in it; heads, positions and classes are among them."""
    described = [operand.shape for name, operand in call.operands.items() if name != "grad"]
    compiled_in = {1, described[0][-1]}
    if call.op == "linear_cross_entropy":
        compiled_in.update(described[1])
    if call.op == "rope":
        compiled_in.update(size for shape in described for size in shape[1:])
    return sorted(compiled_in)


def _repeated(random: Callable[..., Tensor], shape: list[int]) -> Tensor:
    count = math.prod(shape)
    drawn = random(min(count, _DRAWN))
    return drawn.repeat(-(-count // max(1, len(drawn))))[:count].view(shape)


def own_kind(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    """Yield inputs of few rows with the types and layouts of a call, and sizes that are equal where its sizes are."""
    described = {name: operand for name, operand in call.operands.items() if name != "grad"}
    columns = next(iter(described.values())).shape[-1]
    compiled_in = own_sizes(call)
    sizes = {size: size for size in compiled_in}
    for size in (size for operand in described.values() for size in operand.shape):
        sizes.setdefault(size, min(size, 3 + 2 * (len(sizes) - len(compiled_in))))
    product = call.op == "linear_cross_entropy"  # whose logits are of about this size, too, as they are rounded
    for factor in (1, 8 if product else 30):
        operands: dict[str, Tensor] = {}
        for name, operand in described.items():
            shape, order = [sizes[size] for size in operand.shape], order_of(operand)
            scale = factor if not product else factor * columns**-0.5 if name == "x" else 1
            x = _repeated(random, [shape[dim] for dim in order]) * scale
            if name == "target":
                x = torch.arange(x.numel(), device=x.device) * 7 % (len(operands["weight"]) if product else columns)
                if x.numel() > 1:  # the mean over no target is NaN
                    x[-1] = int(call.attributes["ignore_index"])
            back = [order.index(dim) for dim in range(len(order))]
            operands[name] = x.to(getattr(torch, operand.dtype)).permute(back)
        yield Case(f"few rows of its own layout{' with large numbers' if factor > 1 else ''}", operands, {})


def _norms(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    """Yield norms of several sizes in turn, for a kernel that takes what it compiled for another one."""
    epsilon = call.attributes.get("epsilon", 1e-6)
    for columns in (96, 63, call.operands["x"].shape[-1], 96):
        rows, small = random(5, columns), random(5, columns) * 1e-6  # apart, since the gradient of these is far larger
        rows[2] *= 1e4
        small[1] = 0
        stated = {}
        if "weight" in call.operands:
            stated["weight"] = random(columns).to(getattr(torch, call.operands["weight"].dtype))
        if "bias" in call.operands:
            stated["bias"] = random(columns)
        for what, x in (("one of large numbers", rows), ("all small and one of zeros", small)):
            yield Case(f"rows of {columns} columns, {what}", {"x": x, **stated}, {"epsilon": epsilon})


def _attentions(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    """Yield attentions of lengths around blocks, with scores far from zero, and with heads in groups."""
    causal = bool(call.attributes["causal"])
    masked = "mask" in call.operands
    head_dim = call.operands["q"].shape[-1]
    for queries, keys, heads, shift in (
        (1, 1, 1, 0.0), (64, 64, 2, 0.0), (127, 127, 1, 0.0), (65, 65, 2, 80.0), (192, 192, 1, -120.0),
        (1, 192, 2, -120.0), (63, 128, 1, 0.0), (704, 704, 1, 0.0), (1, 200, 4, 0.0),
        (256, 384, 2, -120.0),
    ):  # fmt: skip
        batch = 1 if keys == _ALONE else 2
        q, k, v = random(batch, heads, queries, head_dim), *(random(batch, 1, keys, head_dim) for _ in range(2))
        if shift:
            size = (abs(shift) * head_dim**0.5 / head_dim) ** 0.5
            q, k = q * 0.05 + size, k * 0.05 + math.copysign(size, shift)
        else:
            k[:, :, keys // 2] *= 4  # one key that outweighs the others
        attributes = {"causal": causal, "scale": None}
        what = f"{queries} queries of {heads} heads and {keys} keys, scores about {shift:g}"
        operands = {"q": q, "k": k, "v": v}
        if masked:
            mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=q.device)
            mask[-1, :, :, : max(1, keys // 3)] = keys == 1
            mask[0, :, : queries // 9] = False
            kind = call.operands["mask"].dtype
            zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            operands["mask"] = mask if kind == "bool" else zeros.masked_fill(~mask, -math.inf)
            what += ", a third of the keys of one sequence and all keys of some queries hidden"
        yield Case(what, operands, attributes)
        if queries == keys == _VIEWED:
            views = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in operands.items()}
            yield Case(f"{what}, with the heads beside each other in memory", views, attributes)
            odd = {name: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for name, x in operands.items()}
            yield Case(f"{what}, at addresses that are aligned to one number", odd, attributes)


def _units(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    for columns in (96, 63, call.operands["gate"].shape[-1]):
        for what, factor in (("", 1), (" with a large gate", 30)):
            gate, up = random(5, columns) * factor, random(5, columns)
            yield Case(f"rows of {columns} columns{what}", {"gate": gate, "up": up}, {})


def _rotations(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    columns = call.operands["cos"].shape[-1]
    for length, heads in ((1, 2), (65, 1), (64, 4)):
        q, k = random(2, heads, length, columns), random(2, 1, length, columns)
        angles = random(2, 1, length, columns) * 3
        if call.attributes["mirrored"]:
            angles[..., columns // 2 :] = angles[..., : columns // 2]
        cos, sin = torch.cos(angles), torch.sin(angles)
        yield Case(f"{length} positions of {heads} heads", {"q": q, "k": k, "cos": cos, "sin": sin}, {})
        views = {"q": q.transpose(1, 2).contiguous().transpose(1, 2), "k": k, "cos": cos[:1], "sin": sin[:1]}
        yield Case(f"{length} positions of {heads} heads beside each other in memory", views, {})


def _losses(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    own = call.operands["logits"].shape[-1]
    for rows, classes, offset in ((5, 33, 0.0), (7, 129, 1e4), (6, own, 0.0)):
        logits = random(rows, classes) * 4 + offset
        target = torch.arange(rows, device=logits.device) * 7 % classes
        target[2] = int(call.attributes["ignore_index"])
        what = f"{rows} rows of {classes} classes about {offset:g}, one ignored"
        yield Case(what, {"logits": logits, "target": target}, {})


def _linear_losses(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    for rows, columns, classes, scale in ((5, 16, 33, 1.0), (300, 32, 96, 1.0), (64, 64, 1000, 8.0)):
        operands = {"x": random(rows, columns) * scale / columns**0.5, "weight": random(classes, columns)}
        operands["target"] = torch.arange(rows, device=operands["x"].device) * 7 % classes
        operands["target"][2] = int(call.attributes["ignore_index"])
        if "bias" in call.operands:
            operands["bias"] = random(classes)
        yield Case(f"{rows} rows of {columns} columns and {classes} classes, one ignored", operands, {})


def _softmaxes(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    for columns in (96, 63, call.operands["x"].shape[-1]):
        rows = random(5, columns) * 3
        rows[1] += 80
        rows[2, max(1, columns // 3) :] = -math.inf  # a row that is hidden whole has no softmax
        yield Case(f"rows of {columns} columns, one far from zero and one mostly hidden", {"x": rows}, {})


def _grouped_products(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    own = call.operands["weight"].shape[1:]
    for ends, (k, n) in (((3, 3, 8), (32, 64)), ((0, 65, 66, 128), (64, 96)), ((7, 7), (16, 16)), ((5, 9), own)):
        x, weight = random(ends[-1], k), random(len(ends), k, n)
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        what = f"groups that end at {list(ends)}, of {k} by {n}"
        yield Case(what, {"x": x, "weight": weight, "offsets": offsets}, {})
        turned = weight.mT.contiguous().mT
        yield Case(f"{what}, columns dense", {"x": x, "weight": turned, "offsets": offsets}, {})


def _cache_updates(random: Callable[..., Tensor], call: TorchCall) -> Iterator[Case]:
    dims = [call.operands[name].shape[-1] for name in ("keys", "values")]
    for batch, heads, length, at in ((1, 1, 5, (4,)), (2, 3, 70, range(65)), (3, 2, 9, (5, 6, 7, 8)), (2, 4, 16, (0,))):
        caches = [random(batch, heads, length, columns) for columns in dims]
        new = [random(batch, len(at), heads, columns).transpose(1, 2) for columns in dims]
        positions = torch.tensor(at, device=caches[0].device)
        operands = dict(zip(OPERATIONS["cache_update"].operands, (*caches, *new, positions), strict=True))
        yield Case(f"{len(at)} positions of {batch} caches of {length}, of {heads} heads", operands, {})


#: Operation to what makes its inputs, of a function that draws numbers and of the call that is to be served.
CASES: dict[str, Callable[[Callable[..., Tensor], TorchCall], Iterator[Case]]] = {
    "rms_norm": _norms,
    "layer_norm": _norms,
    "attention": _attentions,
    "swiglu": _units,
    "geglu": _units,
    "rope": _rotations,
    "cross_entropy": _losses,
    "linear_cross_entropy": _linear_losses,
    "softmax": _softmaxes,
    "grouped_matmul": _grouped_products,
    "cache_update": _cache_updates,
}
