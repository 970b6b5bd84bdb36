# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of one operator of ONNX Runtime's own domain, or of classical machine learning, that other engines take too.

The package `onnx` has neither their schemas nor test cases of them. What ONNX Runtime quantizes for itself while it
runs, such as the operands of DynamicQuantizeMatMul, is not here: an engine that does not is closer to the truth.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["UNITS", "Operator", "operators"]

MS, ML = "com.microsoft", "ai.onnx.ml"
#: Results that are rounded to an integer: one unit apart, they are equal.
UNITS = {f"{MS}.QLinear{op}" for op in ("Add", "AveragePool", "Concat", "LeakyRelu", "Mul", "Sigmoid", "Softmax")}


class Operator(NamedTuple):
    """An operator with inputs by name, ``None`` for one that is left out; `outputs` is a name for each, or empty.

    Sizes of `kept` inputs are never open.
    """

    op: str
    feeds: dict[str, Any]
    constants: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("y",)
    attributes: Mapping[str, Any] = MappingProxyType({})
    domain: str = MS
    kept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name, with the domain."""
        return f"{self.domain}.{self.op}"


_RANDOM = np.random.default_rng(0)


def _floats(*shape: int) -> Any:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _scales(*shape: int) -> Any:
    return np.abs(_floats(*shape)) + np.float32(0.01)


def _bytes(*shape: int) -> Any:
    return _RANDOM.integers(0, 256, shape).astype(np.uint8)


@cache
def operators() -> tuple[Operator, ...]:
    """Return them."""
    return (*_activations(), *_products(), *_quantized(), *_attention(), *_grouped(), *_normalizers())


def _normalizers() -> Iterator[Operator]:
    for norm in ("MAX", "L1", "L2"):
        x = np.array([[1, -5, 2], [-1, -2, -3], [0.5, 0.25, 3]], np.float32)
        yield Operator("Normalizer", {"x": x}, attributes={"norm": norm}, domain=ML)


def _activations() -> Iterator[Operator]:
    x, bias, weight = _floats(2, 5, 16), _floats(16), _floats(16)
    for op in ("BiasGelu", "FastGelu"):
        yield Operator(op, {"x": x, "bias": bias})
    yield Operator("FastGelu", {"x": 4 * x})
    yield Operator("Gelu", {"x": x})
    for alpha in (1.702, 0.5):
        yield Operator("QuickGelu", {"x": x}, attributes={"alpha": alpha})
    for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        for outputs in (("y",), ("y", "", "", "sum")):
            yield Operator(op, {"x": x, "skip": _floats(2, 5, 16), "g": weight}, (), outputs, {"epsilon": 1e-3})
    feeds = {"x": x, "skip": _floats(2, 5, 16), "g": weight, "b": bias, "bias": _floats(16)}
    yield Operator("SkipLayerNormalization", feeds, attributes={"epsilon": 1e-3})
    words, places, kinds = _floats(9, 16), _floats(5, 16), _floats(2, 16)
    ids, segments = np.array([[1, 8, 0, 3, 3], [2, 2, 7, 5, 0]], np.int32), np.array([[0, 0, 1, 1, 1]] * 2, np.int32)
    tables = {"words": words, "places": places, "kinds": kinds, "g": weight, "b": bias}
    yield Operator("EmbedLayerNormalization", {"ids": ids, "segments": segments, **tables}, tuple(tables), ("y", ""))
    without = {
        "words": words,
        "places": places,
        "kinds": None,
        "g": weight,
        "b": bias,
        "mask": np.array([[1] * 5] * 2, np.int32),
    }
    known = ("words", "places", "g", "b")
    yield Operator("EmbedLayerNormalization", {"ids": ids, "segments": None, **without}, known, ("y", "index"))


def _products() -> Iterator[Operator]:
    for left, right in ((0, 0), (1, 0), (0, 1), (1, 1)):
        a, b = _floats(3, *((8, 4) if left else (4, 8))), _floats(3, *((6, 8) if right else (8, 6)))
        yield Operator("FusedMatMul", {"a": a, "b": b}, attributes={"transA": left, "transB": right, "alpha": 0.25})
    gemm = {"activation": "LeakyRelu", "activation_alpha": 0.3}
    yield Operator("FusedGemm", {"a": _floats(3, 4), "b": _floats(4, 5), "c": _floats(5)}, attributes=gemm)
    image, kernel = {"x": _floats(1, 3, 9, 9)}, {"w": _floats(4, 3, 3, 3), "b": _floats(4)}
    for activation, numbers in (
        ("Relu", ()),
        ("LeakyRelu", (0.3,)),
        ("HardSigmoid", (0.3, 0.4)),
        ("Clip", (-0.5, 0.5)),
    ):
        attributes: dict[str, Any] = {"activation": activation, "kernel_shape": [3, 3]}
        attributes |= {"activation_params": numbers} if numbers else {}
        yield Operator("FusedConv", {**image, **kernel}, ("w", "b"), attributes=attributes)
    attributes = {"activation": "Relu", "kernel_shape": [3, 3]}
    yield Operator("FusedConv", {**image, **kernel, "z": _floats(1, 4, 7, 7)}, ("w", "b"), attributes=attributes)
    integers, weights = _bytes(3, 8), (_bytes(8, 5).astype(np.int32) - 128).astype(np.int8)
    quantized = {"a": integers, "b": weights, "as": np.float32(0.02), "bs": np.float32(0.03)}
    yield Operator("MatMulIntegerToFloat", quantized, ("b", "bs"))
    points = {"az": np.uint8(117), "bz": np.int8(3), "bias": _floats(5)}
    yield Operator("MatMulIntegerToFloat", {**quantized, **points}, ("b", "bs", "bz", "bias"))
    for bits, block, k in ((4, 32, 64), (4, 16, 128), (8, 32, 64), (2, 32, 64), (4, 32, 100)):
        blocks = -(-k // block)
        sizes: dict[str, Any] = {"K": k, "N": 6, "bits": bits, "block_size": block}
        given = {"a": _floats(3, k), "b": _bytes(6, blocks, block * bits // 8), "s": _scales(6 * blocks) / 10}
        yield Operator("MatMulNBits", given, ("b", "s"), attributes=sizes)
        if bits == 4:
            given = {**given, "z": _bytes(6 * ((blocks + 1) // 2))}
            yield Operator("MatMulNBits", given, ("b", "s", "z"), attributes=sizes)
    table: dict[str, Any] = {"d": _bytes(8, 32), "i": np.array([[1, 7], [0, 3]], np.int64), "s": _scales(8, 2)}
    attributes = {"block_size": 32, "bits": 4, "gather_axis": 0, "quantize_axis": 1}
    yield Operator("GatherBlockQuantized", table, ("d", "s"), attributes=attributes)


def _quantized() -> Iterator[Operator]:
    for kind in (np.uint8, np.int8):
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        a, b = ((_bytes(4, 16).astype(np.int32) + low).astype(kind) for _ in range(2))
        for point in (low, high - 27, high):
            first = {"as": np.float32(0.02), "az": kind(point)}
            both = {"a": a, **first, "b": b, "bs": np.float32(0.03), "bz": kind(point)}
            for scale in (0.01, 1.0):
                result = {"cs": np.float32(scale), "cz": kind(point)}
                constants = ("as", "az", "bs", "bz", "cs", "cz")
                for op in ("QLinearAdd", "QLinearMul"):
                    yield Operator(op, {**both, **result}, constants)
                yield Operator("QLinearConcat", {**result, **both}, constants, attributes={"axis": 1})
                known = ("as", "az", "cs", "cz")
                yield Operator("QLinearLeakyRelu", {"a": a, **first, **result}, known, attributes={"alpha": 0.1})
            shares = {"cs": np.float32(1 / 256), "cz": kind(low)}
            yield Operator("QLinearSigmoid", {"a": a, **first, **shares}, known)
            yield Operator("QLinearSigmoid", {"a": a, **first, "cs": np.float32(1 / 512), "cz": kind(0)}, known)
            for opset, axis in ((13, -1), (12, 1)):
                attributes = {"axis": axis, "opset": opset}
                yield Operator("QLinearSoftmax", {"a": a, **first, **shares}, known, attributes=attributes)
            pool = {"kernel_shape": [2, 2], "strides": [1, 1]}
            image = a.reshape(1, 2, 4, 8)
            for scale in (0.01, 0.02):
                feeds = {"a": image, **first, "cs": np.float32(scale), "cz": kind(point)}
                yield Operator("QLinearAveragePool", feeds, known, attributes=pool)
        steps = {"s": np.float32(0.02), "z": kind(5)}
        yield Operator("QuantizeLinear", {"x": 3 * _floats(2, 9), **steps}, ("s", "z"))
        yield Operator("DequantizeLinear", {"x": a, **steps}, ("s", "z"))


def _attention() -> Iterator[Operator]:
    q, k, v = _floats(2, 5, 32), _floats(2, 7, 32), _floats(2, 7, 32)
    heads: dict[str, Any] = {"num_heads": 4}
    yield Operator("MultiHeadAttention", {"q": q, "k": k, "v": v}, attributes=heads)
    for more in ({"scale": 0.3}, {"unidirectional": 1}, {"unidirectional": 1, "mask_filter_value": -1.0}):
        feeds = {"q": q, "k": _floats(2, 5, 32), "v": _floats(2, 5, 32), "b": _floats(96)}
        yield Operator("MultiHeadAttention", feeds, attributes={**heads, **more})
    yield Operator("MultiHeadAttention", {"q": q, "k": k, "v": _floats(2, 7, 64)}, attributes=heads)
    yield Operator("MultiHeadAttention", {"q": q, "k": _floats(2, 4, 7, 8), "v": _floats(2, 4, 7, 8)}, attributes=heads)
    for mask in (np.array([4, 7], np.int32), np.array([[1, 1, 1, 1, 0, 0, 0], [1] * 7], np.int32)):
        yield Operator("MultiHeadAttention", {"q": q, "k": k, "v": v, "b": None, "mask": mask}, attributes=heads)
    given = {"q": q, "k": k, "v": v, "b": None, "mask": None, "add": _floats(2, 4, 5, 7)}
    yield Operator("MultiHeadAttention", given, attributes=heads)
    step = {"q": _floats(2, 1, 32), "k": _floats(2, 1, 32), "v": _floats(2, 1, 32), "b": None, "mask": None}
    past = {"add": None, "pk": _floats(2, 4, 3, 8), "pv": _floats(2, 4, 3, 8)}
    yield Operator("MultiHeadAttention", {**step, **past}, (), ("y", "key", "value"), heads)
    whole = {"x": _floats(2, 5, 16), "w": _floats(16, 48), "b": _floats(48)}
    masks = (
        np.array([3, 5], np.int32),
        np.array([[1, 1, 1, 0, 0], [1] * 5], np.int32),
        np.tril(np.ones((2, 5, 5), np.int32)),
    )
    for attributes in ({}, {"unidirectional": 1}, {"scale": 0.9}):
        yield Operator("Attention", whole, ("w", "b"), attributes={"num_heads": 2, **attributes})
    for mask in masks:
        for more in ({}, {"mask_filter_value": -1.0}):
            yield Operator("Attention", {**whole, "mask": mask}, ("w", "b"), attributes={"num_heads": 2, **more})
    feeds = {**whole, "mask": None, "past": None, "add": _floats(2, 2, 5, 5)}
    yield Operator("Attention", feeds, ("w", "b"), attributes={"num_heads": 2})


def _grouped() -> Iterator[Operator]:
    angles = {"cos": _floats(16, 8), "sin": _floats(16, 8)}
    places = np.arange(5, dtype=np.int64)[None].repeat(2, 0)
    for interleaved in (0, 1):
        attributes = {"interleaved": interleaved, "num_heads": 4}
        feeds = {"x": _floats(2, 5, 64), "at": places, **angles}
        yield Operator("RotaryEmbedding", feeds, ("cos", "sin"), attributes=attributes)
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    for past, new in ((0, 5), (6, 1), (6, 3)):
        q, k, v = _floats(1, new, 64), _floats(1, new, 32), _floats(1, new, 32)
        feeds = {"q": q, "k": k, "v": v, "pk": _floats(1, 2, past, 16), "pv": _floats(1, 2, past, 16)}
        feeds |= {"last": np.array([past + new - 1], np.int32), "total": np.int32(past + new)}
        for more in ({}, {"local_window_size": 3}, {"scale": 0.9}, {"softcap": 1.5}, {"do_rotary": 1}):
            given = feeds | (angles if more.get("do_rotary") else {})
            yield Operator("GroupQueryAttention", given, (), ("y", "key", "value"), heads | more)
    room = {name: np.pad(feeds[name], ((0, 0), (0, 0), (0, 10), (0, 0))) for name in ("pk", "pv")}
    outputs = ("y", "key", "value")
    yield Operator("GroupQueryAttention", {**feeds, **room}, (), outputs, heads, kept=("pk", "pv"))
