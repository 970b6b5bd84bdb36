# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention: one node of the standard or of ONNX Runtime, or the products around a Softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.graph import (
    DTYPES,
    Dim,
    Scope,
    Shape,
    Terms,
    attributes,
    number,
    operand,
    same,
    sizes,
)
from xpuruntime.engines.onnxruntime.rewriting.rules import Form, NewTranspose, RewriteCandidate

if TYPE_CHECKING:
    import onnx

_BOOL = 9
_OWN_STATE = {
    "Attention": "com.microsoft Attention multiplies by its own weights inside",
    "GroupQueryAttention": "it keeps past keys and values itself",
    "PackedAttention": "its rows are packed without padding",
    "PackedMultiHeadAttention": "its rows are packed without padding",
    "DecoderMaskedMultiHeadAttention": "it keeps past keys and values itself",
    "DecoderMaskedSelfAttention": "it keeps past keys and values itself",
}


class _Parts(NamedTuple):
    """Operands of an attention: names, heads where they are 3-D, and the nodes it stands for."""

    q: str
    k: str
    v: str
    mask: str
    q_heads: int
    kv_heads: int
    causal: bool
    scale: float | None
    output: str
    nodes: tuple[onnx.NodeProto, ...]
    before: tuple[NewTranspose, ...] = ()
    k_shape: Shape | None = None


def find_attention(scope: Scope, node: onnx.NodeProto, terms: Terms, opset: int) -> RewriteCandidate | None:
    """Return what a node is as an attention; ``None`` for other nodes. Products are found at the second one."""
    domain = normal_domain(node.domain)
    parts: _Parts | str | None = None
    if not domain and node.op_type == "Attention":
        parts = _standard(scope, node, opset)
    elif domain == "com.microsoft" and node.op_type == "MultiHeadAttention":
        parts = _multi_head(scope, node)
    elif domain == "com.microsoft" and node.op_type in _OWN_STATE:
        parts = _OWN_STATE[node.op_type]
    elif not domain and node.op_type == "MatMul":
        parts = _products(scope, node)
    if parts is None:
        return None
    dtype = DTYPES.get(scope.type(node.input[0]))
    reason = parts if isinstance(parts, str) else _misfit(scope, parts, dtype)
    if reason:
        return RewriteCandidate(node.name, "attention", node.op_type, dtype, {}, refusal=reason)
    assert isinstance(parts, _Parts)
    assert dtype is not None
    form_attributes: dict[str, Any] = {"q_num_heads": parts.q_heads, "kv_num_heads": parts.kv_heads}
    form_attributes["is_causal"] = int(parts.causal)
    if parts.scale is not None:
        form_attributes["scale"] = parts.scale
    inputs = (parts.q, parts.k, parts.v, parts.mask) if parts.mask else (parts.q, parts.k, parts.v)
    names = tuple(n.name for n in parts.nodes)
    describe = _describer(scope, parts, terms, dtype)
    form = Form("Attention", inputs, parts.output, form_attributes, names, describe, parts.before)
    facts = {"head_dim": _head_dim(scope, parts.q, parts.q_heads)}
    return RewriteCandidate(node.name, "attention", node.op_type, dtype, facts, (form,))


def _shape_of(scope: Scope, parts: _Parts, name: str) -> Shape | None:
    return parts.k_shape if name == parts.k and parts.k_shape is not None else scope.shape(name)


def _head_dim(scope: Scope, name: str, heads: int) -> int | None:
    shape = scope.shape(name)
    size = None if not shape else number(shape[-1])
    return size if size is None or not heads else size // heads


def _misfit(scope: Scope, parts: _Parts, dtype: str | None) -> str:
    if dtype is None:
        return f"{parts.q!r} is not known to hold floating-point numbers"
    shapes = [_shape_of(scope, parts, name) for name in (parts.q, parts.k, parts.v)]
    rank = 3 if parts.q_heads else 4
    operand_shapes: list[Shape] = []
    for name, shape in zip((parts.q, parts.k, parts.v), shapes, strict=True):
        if shape is None or len(shape) != rank:
            rank_text = "an unknown number of" if shape is None else str(len(shape))
            return f"{name!r} has {rank_text} dimensions, and the xpuruntime kernel takes {rank} here"
        operand_shapes.append(shape)
    q, k, v = operand_shapes
    if not (same(q[0], k[0]) and same(q[0], v[0])):
        return "its batches are not known to be alike, so one of them may have to be repeated"
    heads = (parts.q_heads, parts.kv_heads, parts.kv_heads) if parts.q_heads else (1, 1, 1)
    dims = [None if (size := number(s[-1])) is None else size // h for s, h in zip(operand_shapes, heads, strict=True)]
    if None in dims or len(set(dims)) != 1:
        return f"the sizes of its heads ({', '.join(str(d or '?') for d in dims)}) are not known to be one number"
    if not parts.q_heads and not (same(q[1], k[1]) and same(k[1], v[1])):
        many, few = number(q[1]), number(k[1])
        if many is None or few is None or many % few or not same(k[1], v[1]):
            return "its numbers of heads are not known to fit each other"
    return _mask_misfit(scope, parts, q, k) if parts.mask else ""


def _mask_misfit(scope: Scope, parts: _Parts, q: Shape, k: Shape) -> str:
    shape, elem_type = scope.shape(parts.mask), scope.type(parts.mask)
    if shape is None or len(shape) > 4:
        return f"the number of dimensions of the mask {parts.mask!r} is not known to be at most 4"
    if elem_type not in (_BOOL, 1, scope.type(parts.q)):
        return f"the mask {parts.mask!r} is neither bool, nor fp32, nor of the type of {parts.q!r}"
    heads: Dim = frozenset((parts.q_heads,)) if parts.q_heads else q[1]
    full = (q[0], heads, q[1] if parts.q_heads else q[2], k[1] if parts.q_heads else k[2])
    for index, dim in enumerate(reversed(shape)):
        wanted = full[3 - index]
        if number(dim) == 1 or same(dim, wanted):
            continue
        known = (number(dim), number(wanted))
        if None not in known or (index == 3 and number(wanted) == 1):
            return f"the mask {parts.mask!r} has another size than the scores in dimension -{index + 1}"
    return ""


def _standard(scope: Scope, node: onnx.NodeProto, opset: int) -> _Parts | str:
    attrs, inputs = attributes(node), [*node.input, "", "", "", "", ""]
    if any(inputs[4:6]) or any(node.output[1:3]):
        return "it keeps past keys and values"
    if inputs[6]:
        return "it takes the number of keys that are no padding"
    if any(node.output[3:]):
        return "its scores are read as well"
    if attrs.get("softcap", 0.0):
        return f"softcap is {attrs['softcap']:g}, and the xpuruntime kernel has none"
    if attrs.get("softmax_precision", 1) not in (0, 1) and attrs["softmax_precision"] != scope.type(node.input[0]):
        return f"softmax_precision {attrs['softmax_precision']} is another one than fp32"
    mask, shape = inputs[3], scope.shape(node.input[0])
    if shape is None or len(shape) not in (3, 4):
        return f"the number of dimensions of {node.input[0]!r} is not known before it runs"
    if mask and opset >= 24 and not _mask_is_long(scope, mask, node.input[1], len(shape)):
        return f"the mask {mask!r} is not known to be as long as the keys"
    three = len(shape) == 3
    q_heads, kv_heads = (int(attrs.get(n, 0)) for n in ("q_num_heads", "kv_num_heads"))
    scale = float(attrs["scale"]) if "scale" in attrs else None
    return _Parts(
        node.input[0], node.input[1], node.input[2], mask, q_heads if three else 0, kv_heads if three else 0,
        bool(attrs.get("is_causal", 0)), scale, node.output[0], (node,),
    )  # fmt: skip


def _mask_is_long(scope: Scope, mask: str, keys: str, rank: int) -> bool:
    mask_shape, key_shape = scope.shape(mask), scope.shape(keys)
    return bool(mask_shape) and key_shape is not None and same(mask_shape[-1], key_shape[1 if rank == 3 else 2])  # type: ignore[index]


def _multi_head(scope: Scope, node: onnx.NodeProto) -> _Parts | str:
    """Read com.microsoft MultiHeadAttention: query, key, value, bias, key_padding_mask, attention_bias, past."""
    attrs, inputs = attributes(node), [*node.input, *[""] * 10]
    named = {3: "bias", 4: "key_padding_mask", 6: "past_key", 7: "past_value", 8: "past_sequence_length"}
    used = [name for index, name in named.items() if inputs[index]] + [f"input {i}" for i in (9, 10) if inputs[i]]
    if used:
        return f"it takes {', '.join(used)}, which the xpuruntime kernel does not"
    if any(node.output[1:]):
        return "it hands out its keys, values or scores"
    if not inputs[1] or not inputs[2]:
        return "its query, key and value are packed into one tensor"
    q, k = scope.shape(inputs[0]), scope.shape(inputs[1])
    causal = bool(attrs.get("unidirectional", 0))
    if causal and not (q and k and len(q) == len(k) == 3 and same(q[1], k[1])):
        return "it is causal, and its queries and keys are not known to be equally many"
    heads = int(attrs["num_heads"])
    scale = float(attrs["scale"]) if attrs.get("scale", 0.0) else None
    return _Parts(inputs[0], inputs[1], inputs[2], inputs[5], heads, heads, causal, scale, node.output[0], (node,))


def _products(scope: Scope, node: onnx.NodeProto) -> _Parts | str | None:
    """Read ``Softmax(q @ k^T * scale + mask) @ v``, as PyTorch writes it."""
    softmax = scope.maker(node.input[0])
    if softmax is None or softmax.op_type != "Softmax" or normal_domain(softmax.domain):
        return None
    shape = scope.shape(softmax.input[0])
    axis = attributes(softmax).get("axis", -1)
    if shape is None or axis % len(shape) != len(shape) - 1:
        return None
    nodes, scale, mask, current = [node, softmax], 1.0, "", softmax.input[0]
    product = None
    for _ in range(4):
        maker = scope.maker(current)
        if maker is None or normal_domain(maker.domain):
            return None
        if maker.op_type == "MatMul":
            product = maker
            break
        nodes.append(maker)
        step = _step(scope, maker, bool(mask) or scale != 1.0)
        if step is None:
            return None
        factor, added, current = step
        scale *= factor
        mask = mask or added
    if product is None:
        return None
    nodes.append(product)
    outputs = [n.output[0] for n in nodes[1:]]
    if not all(scope.only(name, nodes) for name in outputs):
        return "its scores are read elsewhere as well"
    q, q_factor, q_nodes = _factors(scope, product.input[0], nodes)
    keys = _keys(scope, product, nodes)
    if isinstance(keys, str):
        return keys
    k, k_factor, k_nodes, before, k_shape = keys
    nodes += [*q_nodes, *k_nodes]
    scale *= q_factor * k_factor
    if not math.isfinite(scale):
        return "its scale is not finite"
    unique = tuple({id(n): n for n in nodes}.values())
    return _Parts(q, k, node.input[1], mask, 0, 0, False, scale, node.output[0], unique, before, k_shape)


def _step(scope: Scope, maker: onnx.NodeProto, seen: bool) -> tuple[float, str, str] | None:
    """Return the factor, the mask and the tensor before one step between the scores and the Softmax."""
    if maker.op_type not in ("Add", "Mul", "Div"):
        return None
    for position in (0, 1):
        inner, other = maker.input[position], maker.input[1 - position]
        constant = scope.scalar(other)
        if maker.op_type == "Add":
            shape = scope.shape(other)
            if not seen and shape is not None and len(shape) <= 4 and _is_product(scope, inner):
                return 1.0, other, inner
        elif constant is not None and constant != 0 and (maker.op_type == "Mul" or position == 0):
            return (constant if maker.op_type == "Mul" else 1.0 / constant), "", inner
    return None


def _is_product(scope: Scope, name: str) -> bool:
    for _ in range(3):
        maker = scope.maker(name)
        if maker is None or maker.op_type not in ("MatMul", "Mul", "Div"):
            return False
        if maker.op_type == "MatMul":
            return True
        position = 1 if maker.op_type == "Mul" and scope.scalar(maker.input[0]) is not None else 0
        if scope.scalar(maker.input[1 - position]) is None:
            return False
        name = maker.input[position]
    return False


def _factors(scope: Scope, name: str, readers: list[onnx.NodeProto]) -> tuple[str, float, list[onnx.NodeProto]]:
    """Return a tensor without the constant factors that only it is multiplied by for these readers."""
    factor = 1.0
    nodes: list[onnx.NodeProto] = []
    for _ in range(2):
        maker = scope.maker(name)
        if maker is None or maker.op_type not in ("Mul", "Div") or normal_domain(maker.domain):
            break
        if not scope.only(name, [*readers, *nodes]):
            break
        position = 1 if maker.op_type == "Mul" and scope.scalar(maker.input[0]) is not None else 0
        constant = scope.scalar(maker.input[1 - position])
        if constant is None or constant == 0:
            break
        factor *= constant if maker.op_type == "Mul" else 1.0 / constant
        nodes.append(maker)
        name = maker.input[position]
    return name, factor, nodes


def _keys(
    scope: Scope, product: onnx.NodeProto, readers: list[onnx.NodeProto]
) -> tuple[str, float, list[onnx.NodeProto], tuple[NewTranspose, ...], Shape] | str:
    """Return the keys as rows: what was transposed for the product, or a Transpose of what was not."""
    name, factor, nodes = _factors(scope, product.input[1], readers)
    shape = scope.shape(name)
    if shape is None or len(shape) != 4:
        rank_text = "an unknown number of" if shape is None else str(len(shape))
        return f"its keys {name!r} have {rank_text} dimensions, and the xpuruntime kernel takes 4"
    rows = (shape[0], shape[1], shape[3], shape[2])
    taken = [*readers, *nodes]
    maker = scope.maker(name)
    if maker is not None and maker.op_type == "Transpose":
        perm = list(attributes(maker).get("perm", (3, 2, 1, 0)))
        if scope.only(name, taken):
            nodes = [*nodes, maker]
        if perm == [0, 1, 3, 2]:
            return maker.input[0], factor, nodes, (), rows
        perm[2], perm[3] = perm[3], perm[2]
        return _transposed(product, maker.input[0], perm, factor, nodes, rows)
    folded = _folded_transpose(scope, name, shape)
    if folded is not None:
        source, between = folded
        outputs = [n.output[0] for n in between]
        inside = [*taken, *between]
        if all(scope.only(output, inside) for output in outputs):
            nodes = [*nodes, *between]
        return source, factor, nodes, (), rows
    return _transposed(product, name, [0, 1, 3, 2], factor, nodes, rows)


def _transposed(
    product: onnx.NodeProto, source: str, perm: list[int], factor: float, nodes: list[onnx.NodeProto], rows: Shape
) -> tuple[str, float, list[onnx.NodeProto], tuple[NewTranspose, ...], Shape]:
    transposed = f"{product.output[0]}_xpuruntime_keys"
    new = NewTranspose(f"{product.name}_xpuruntime_keys", source, tuple(perm), transposed)
    return transposed, factor, nodes, (new,), rows


def _folded_transpose(scope: Scope, name: str, shape: Shape) -> tuple[str, list[onnx.NodeProto]] | None:
    # Return what ``Reshape(Transpose(Reshape(x), [0, 2, 1]))`` transposes, where that swaps the last two of x's four.
    # PyTorch joins batch and heads for it. The sizes prove it: the reshapes keep the last two dimensions.
    back = scope.maker(name)
    middle = scope.maker(back.input[0]) if back is not None and back.op_type == "Reshape" else None
    join = scope.maker(middle.input[0]) if middle is not None and middle.op_type == "Transpose" else None
    if back is None or middle is None or join is None or join.op_type != "Reshape":
        return None
    if list(attributes(middle).get("perm", ())) != [0, 2, 1]:
        return None
    x, joined = scope.shape(join.input[0]), scope.shape(join.output[0])
    if x is None or joined is None or len(x) != 4 or len(joined) != 3:
        return None
    kept = same(joined[1], x[2]) and same(joined[2], x[3])
    back_again = all(same(a, b) for a, b in zip(shape, (x[0], x[1], x[3], x[2]), strict=True))
    return (join.input[0], [back, middle, join]) if kept and back_again else None


def _describer(scope: Scope, parts: _Parts, terms: Terms, dtype: str) -> Callable[[int], dict[str, Any]]:
    def describe(stand_in: int) -> dict[str, Any]:
        operands: dict[str, dict[str, Any]] = {}
        for slot, name, heads in (("q", parts.q, parts.q_heads), ("k", parts.k, parts.kv_heads), ("v", parts.v, 0)):
            shape = _shape_of(scope, parts, name)
            assert shape is not None
            heads = heads or parts.kv_heads
            dims = sizes(shape, stand_in)
            if len(dims) == 3:
                batch, length, width = dims
                size = width // heads
                strides = (length * width, size, width, 1)
                operands[slot] = operand(dtype, [batch, heads, length, size], strides)
            else:
                operands[slot] = operand(dtype, dims)
        operands["out"] = {**operands["q"]}
        if parts.mask:
            kind = scope.type(parts.mask)
            q, k = operands["q"]["shape"], operands["k"]["shape"]
            full = (q[0], q[1], q[2], k[2])
            dims = [1 if number(d) == 1 else full[index - len(_of(scope, parts.mask))] for index, d in
                    enumerate(_of(scope, parts.mask))]  # fmt: skip
            shape4 = [*[1] * (4 - len(dims)), *dims]
            operands["mask"] = operand("bool" if kind == _BOOL else DTYPES[kind], shape4)
        head = operands["q"]["shape"][3]
        scale = parts.scale if parts.scale is not None else 1.0 / math.sqrt(max(head, 1))
        causal = "top_left" if parts.causal else "none"
        return terms.describe("attention", operands, {"scale": scale, "causal": causal})

    return describe


def _of(scope: Scope, name: str) -> Shape:
    return scope.shape(name) or ()
