# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Shapes of ``execution.shapes`` in a model: sizes for the dimensions that its file leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.model.graph import agreed_sizes
from xpuruntime.errors import PolicyError
from xpuruntime.policies.compound_kinds import split_size
from xpuruntime.policies.document import nearest, question

if TYPE_CHECKING:
    from xpuruntime.engines.model.facts import TensorInfo
    from xpuruntime.engines.model.info import ModelInfo
    from xpuruntime.policies import Policy

_KEY = "execution.shapes"


class ShapeRange(msgspec.Struct, frozen=True):
    """The sizes that one dimension may have: least, best, largest. All three are equal for a size that is fixed."""

    min: int
    opt: int
    max: int

    @property
    def fixed(self) -> bool:
        """Whether there is only one size."""
        return self.min == self.max

    def __str__(self) -> str:
        """Return it as a policy writes it: ``8``, ``1..512``, ``1..128..512``."""
        if self.fixed:
            return str(self.min)
        return f"{self.min}..{self.max}" if self.opt == self.max else f"{self.min}..{self.opt}..{self.max}"


_Ranges = dict[str, tuple["ShapeRange | None", ...]]


def shape_ranges(info: ModelInfo, policy: Policy) -> dict[str, tuple[ShapeRange, ...]]:
    """Return the sizes of every input that is known in all dimensions, from the model and from the policy.

    A dimension that the policy states has its size in all inputs where the model gives it the same name, so that an
    input which the policy does not name may be known through another one; unless the policy states several. Inputs
    with a dimension that stays open are left out; see `open_dimensions`.
    """
    known = {}
    for name, ranges in _settle(info, policy.execution.shapes).items():
        if all(range_ is not None for range_ in ranges):
            known[name] = tuple(range_ for range_ in ranges if range_ is not None)
    return known


def open_dimensions(info: ModelInfo) -> dict[str, str]:
    """Return the inputs with dimensions that are open, each with its shape as a policy would have to state it.

    Such as ``{"x": "[1, <batch>]"}``: what stands in angle brackets is to be filled in. An input whose rank is not
    known is ``"[<all dimensions>]"``.
    """
    dimensions = {}
    for tensor in info.inputs:
        if tensor.kind != "tensor":
            continue
        if tensor.shape is None:
            dimensions[tensor.name] = "[<all dimensions>]"
        elif not all(isinstance(size, int) for size in tensor.shape):
            sizes = (str(size) if isinstance(size, int) else f"<{size or 'size'}>" for size in tensor.shape)
            dimensions[tensor.name] = f"[{', '.join(sizes)}]"
    return dimensions


def shape_fits(shape: Sequence[int], declared: Sequence[int | str | None]) -> bool:
    """Whether a shape has the rank of a declared one, and its fixed sizes."""
    return len(shape) == len(declared) and all(
        not isinstance(size, int) or actual == size for actual, size in zip(shape, declared, strict=True)
    )


def with_shapes(info: ModelInfo, policy: Policy) -> ModelInfo:
    """Return the model as ``execution.shapes``, ``static_batch`` and ``static_shape`` of a policy make it.

    Sizes that are fixed stand in its inputs, its outputs and the graph that `ModelInfo.named_proto` gives; ranges are
    in `TensorInfo.limits`, which every call is checked against. Applying it twice changes nothing.
    """
    stated = policy.execution.shapes
    if stated:
        settled = _settle(info, stated)
        symbols = agreed_sizes(
            (size, None if bounds is None or not bounds.fixed else bounds.min)
            for tensor in _all_inputs(info)
            for size, bounds in zip(tensor.shape or (), settled.get(tensor.name, ()), strict=False)
        )
        fixed = {tensor.name: _changed(tensor, settled.get(tensor.name, ())) for tensor in _all_inputs(info)}
        info = msgspec.structs.replace(
            info,
            inputs=tuple(_limited(tensor, settled.get(tensor.name)) for tensor in info.inputs),
            overridable_inputs=tuple(_limited(tensor, settled.get(tensor.name)) for tensor in info.overridable_inputs),
            outputs=tuple(_substituted(tensor, symbols) for tensor in info.outputs),
            fixed={**info.fixed, **{name: sizes for name, sizes in fixed.items() if any(s is not None for s in sizes)}},
        )
    if policy.execution.static_batch is not None:
        info = with_static_batch(info, policy.execution.static_batch)
    if policy.execution.static_shape and (left := open_dimensions(info)):
        shapes = ", ".join(f"{name}: {shape}" for name, shape in left.items())
        raise PolicyError(
            f"execution.static_shape: true, but {info.path} leaves dimensions open. Fix: state their sizes: "
            f"{_KEY}: {{{shapes}}}"
        )
    return info


def read_shapes(
    stated: Mapping[str, tuple[int | str, ...]], seen: Mapping[str, Sequence[int | str | None]]
) -> dict[str, str]:
    """Return what an engine's own input shapes say of the shapes that a policy states, by policy key.

    A range stands as it was stated where the engine left the dimension open: `InputValidator` holds it in every call.
    """
    shapes = {}
    for name, sizes in stated.items():
        if name in seen and len(seen[name]) == len(sizes):
            dims = [
                size if isinstance(size, str) and not isinstance(dim, int) else dim
                for size, dim in zip(sizes, seen[name], strict=True)
            ]
            shapes[f"{_KEY}.{name}"] = f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"
    if all(isinstance(dim, int) for shape in seen.values() for dim in shape):
        shapes["execution.static_shape"] = "all sizes are fixed"
    return shapes


def _settle(info: ModelInfo, stated: Mapping[str, tuple[int | str, ...]]) -> _Ranges:
    """Return input to ranges, ``None`` for a dimension that stays open; inputs without a rank are left out."""
    tensors = {tensor.name: tensor for tensor in _all_inputs(info)}
    for name in stated:
        if name not in tensors:
            near = nearest(name, tensors)
            msg = f"{_KEY}: the model has no input {name!r}{question(near, '.')} Its inputs: {', '.join(tensors)}"
            raise PolicyError(msg, fix=f"write {near or next(iter(tensors), 'none')}")
    symbols: dict[str, tuple[ShapeRange, str]] = {}
    several: set[str] = set()
    for name, sizes in stated.items():
        for axis, (size, bounds) in enumerate(_pairs(tensors[name], sizes)):
            if isinstance(size, int) and not (bounds.fixed and bounds.min == size):
                raise PolicyError(f"{_KEY}.{name}[{axis}]: {bounds} contradicts the model, which fixes it to {size}")
            if isinstance(size, str):
                first, by = symbols.setdefault(size, (bounds, f"{_KEY}.{name}[{axis}]"))
                if first == bounds:
                    continue
                several.add(size)
                if info.format != "onnx":  # elsewhere a name is no promise
                    raise PolicyError(
                        f"{_KEY}.{name}[{axis}]: {bounds}, but this is the dimension {size!r} of the model, which is "
                        f"{first} in {by}. Fix: give it the same size in both"
                    )
    settled: _Ranges = {}
    ranges = {size: bounds for size, (bounds, _) in symbols.items() if size not in several}
    for tensor in info.inputs:
        if tensor.name not in stated and tensor.kind == "tensor" and tensor.shape is not None:
            settled[tensor.name] = tuple(
                ShapeRange(size, size, size) if isinstance(size, int) else ranges.get(size or "")
                for size in tensor.shape
            )
    for name, sizes in stated.items():
        settled[name] = tuple(ShapeRange(*split_size(size)) for size in sizes)
    return settled


def _pairs(tensor: TensorInfo, sizes: tuple[int | str, ...]) -> Iterator[tuple[int | str | None, ShapeRange]]:
    if tensor.kind != "tensor":
        raise PolicyError(
            f"{_KEY}.{tensor.name}: this input is no tensor but of the kind {tensor.kind}. Fix: leave it out"
        )
    shape = tensor.shape if tensor.shape is not None else (None,) * len(sizes)
    if len(shape) != len(sizes):
        expected = ", ".join("?" if size is None else str(size) for size in shape)
        raise PolicyError(
            f"{_KEY}.{tensor.name}: {len(sizes)} dimensions are stated, and the model has {len(shape)}: [{expected}]"
        )
    for size, stated in zip(shape, sizes, strict=True):
        yield size, ShapeRange(*split_size(stated))


def _all_inputs(info: ModelInfo) -> tuple[TensorInfo, ...]:
    return (*info.inputs, *info.overridable_inputs)


def _changed(tensor: TensorInfo, ranges: tuple[ShapeRange | None, ...]) -> tuple[int | None, ...]:
    before = tensor.shape if tensor.shape is not None else (None,) * len(ranges)
    return tuple(
        bounds.min if bounds is not None and bounds.fixed and not isinstance(size, int) else None
        for bounds, size in zip(ranges, before, strict=False)
    )


def _limited(tensor: TensorInfo, ranges: tuple[ShapeRange | None, ...] | None) -> TensorInfo:
    if ranges is None:
        return tensor
    before = tensor.shape if tensor.shape is not None else (None,) * len(ranges)
    shape = tuple(
        bounds.min if bounds is not None and bounds.fixed else size for bounds, size in zip(ranges, before, strict=True)
    )
    limits = tuple(
        (range_.min, range_.max) if range_ is not None and not isinstance(size, int) else known
        for range_, size, known in zip(ranges, before, tensor.limits or (None,) * len(ranges), strict=True)
    )
    return msgspec.structs.replace(tensor, shape=shape, limits=limits if any(limits) else ())


def _substituted(tensor: TensorInfo, symbols: Mapping[str, int]) -> TensorInfo:
    if not tensor.shape or not any(size in symbols for size in tensor.shape):
        return tensor
    return msgspec.structs.replace(
        tensor, shape=tuple(symbols.get(size, size) if isinstance(size, str) else size for size in tensor.shape)
    )


#: Name of the batch dimension of a session whose engine runs one size.
OPEN = "batch"


def batch_axes(inputs: Sequence[TensorInfo]) -> tuple[str | None, dict[str, int]]:
    """Return the batch dimension, its name or ``None``, and its axis in each input that has it.

    It is the open first dimension of the first input that begins with one. Where that has a name, other inputs may have
    it at another place; where not, it is the first dimension of all inputs whose first has no name.
    """
    leading = [input_ for input_ in inputs if input_.shape and not isinstance(input_.shape[0], int)]
    if not leading or not leading[0].shape:
        return None, {}
    key = leading[0].shape[0]
    if not isinstance(key, str):
        return None, {tensor.name: 0 for tensor in leading if tensor.shape and tensor.shape[0] is None}
    return key, {input_.name: input_.shape.index(key) for input_ in inputs if input_.shape and key in input_.shape}


def with_static_batch(info: ModelInfo, size: int) -> ModelInfo:
    """Return the model with its batch dimension fixed in inputs, outputs and graph, unless it is already fixed."""
    if fixed_axes(info.inputs):
        return info
    key, axes = batch_axes(info.inputs)
    if not axes:
        raise PolicyError(
            f"execution.static_batch: {size}, but no input of {info.path} begins with an open dimension. "
            "Fix: leave it out"
        )
    for tensor in info.inputs:
        if tensor.name in axes and _ranged(tensor, axes[tensor.name]) and info.format == "onnx":
            raise PolicyError(
                f"execution.static_batch: {size} contradicts the range of the batch in execution.shapes.{tensor.name}; "
                "state one of the two"
            )
    outputs = {
        output.name: output.shape.index(key) if isinstance(key, str) else 0
        for output in info.outputs
        if output.shape and (key in output.shape if isinstance(key, str) else output.shape[0] is None)
    }
    fixed = {
        input_.name: tuple(
            size if axis == axes[input_.name] else known
            for axis, known in enumerate(info.fixed.get(input_.name, (None,) * len(input_.shape or ())))
        )
        for input_ in info.inputs
        if input_.name in axes
    }
    return msgspec.structs.replace(
        info,
        inputs=tuple(_marked(input_, axes.get(input_.name), size) for input_ in info.inputs),
        outputs=tuple(_marked(output, outputs.get(output.name), size) for output in info.outputs),
        fixed={**info.fixed, **fixed},
    )


def fixed_axes(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """Return the axis of the batch in the tensors where `with_static_batch` has fixed it."""
    axes = {}
    for tensor in tensors:
        for axis, (size, limit) in enumerate(zip(tensor.shape or (), tensor.limits, strict=False)):
            if limit == (1, size) and tensor.name not in axes:
                axes[tensor.name] = axis
    return axes


def with_open_batch(info: ModelInfo) -> ModelInfo:
    """Return the model as callers see it: the batch dimension has a name and the sizes 1 to the fixed one."""
    return msgspec.structs.replace(
        info,
        inputs=tuple(_opened(input_) for input_ in info.inputs),
        outputs=tuple(_opened(output) for output in info.outputs),
    )


def _ranged(tensor: TensorInfo, axis: int) -> bool:
    return bool(tensor.limits) and tensor.limits[axis] is not None


def _marked(tensor: TensorInfo, axis: int | None, size: int) -> TensorInfo:
    if axis is None or tensor.shape is None:
        return tensor
    limits = tensor.limits or (None,) * len(tensor.shape)
    return msgspec.structs.replace(
        tensor,
        shape=tuple(size if place == axis else size_ for place, size_ in enumerate(tensor.shape)),
        limits=tuple((1, size) if place == axis else limit for place, limit in enumerate(limits)),
    )


def _opened(tensor: TensorInfo) -> TensorInfo:
    axis = fixed_axes((tensor,)).get(tensor.name)
    if axis is None or tensor.shape is None:
        return tensor
    shape = tuple(OPEN if place == axis else size for place, size in enumerate(tensor.shape))
    return msgspec.structs.replace(tensor, shape=shape)
