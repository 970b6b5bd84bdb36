# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ResNet-50 and an encoder of BERT's form in ONNX, with a free batch and random weights, and without an exporter."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

_OPSET, _IR = 17, 8


class _Graph:
    def __init__(self, dtype: type[Any] = np.float32) -> None:
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.draw = np.random.default_rng(0)

    def weight(self, name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> str:
        value = (self.draw.standard_normal(shape, np.float32) * scale + mean).astype(self.dtype)
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{output}/{op}", **attributes))
        return output

    def model(self, name: str, inputs: list[Any], outputs: list[Any]) -> bytes:
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
        data: bytes = made.SerializeToString()
        return data


def resnet(
    stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, size: int = 224, classes: int = 1000
) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Return a ResNet of bottleneck blocks, batch normalization folded, and the shape of a row of its input.

    The defaults are those of ResNet-50: `image` [N, 3, 224, 224] to `logits` [N, 1000].
    """
    g = _Graph()

    def conv(x: str, name: str, given: int, made: int, kernel: int, stride: int = 1, *, relu: bool = True) -> str:
        scale = (2.0 / (given * kernel * kernel)) ** 0.5 * (1.0 if relu else 0.5)
        inputs = [x, g.weight(f"{name}.w", (made, given, kernel, kernel), scale), g.weight(f"{name}.b", (made,), 0.01)]
        pads = [kernel // 2] * 4
        y = g.add("Conv", inputs, name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
        return g.add("Relu", [y], f"{name}.relu") if relu else y

    x = conv("image", "stem", 3, width, 7, 2)
    x = g.add("MaxPool", [x], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, blocks in enumerate(stages):
        inner = width << stage
        for block in range(blocks):
            name, stride = f"s{stage}.{block}", 2 if stage and not block else 1
            y = conv(x, f"{name}.a", channels, inner, 1)
            y = conv(y, f"{name}.b", inner, inner, 3, stride)
            y = conv(y, f"{name}.c", inner, 4 * inner, 1, relu=False)
            if not block:
                x = conv(x, f"{name}.skip", channels, 4 * inner, 1, stride, relu=False)
            channels = 4 * inner
            x = g.add("Relu", [g.add("Add", [x, y], f"{name}.sum")], f"{name}.out")
    x = g.add("Flatten", [g.add("GlobalAveragePool", [x], "mean")], "flat")
    bias = g.weight("fc.b", (classes,), 0.01)
    g.add("Gemm", [x, g.weight("fc.w", (channels, classes), channels**-0.5), bias], "logits")
    row = (3, size, size)
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", *row])
    return g.model("resnet", [given], [_output("logits", ["N", classes])]), {"image": row}


def encoder(
    layers: int = 12, width: int = 768, heads: int = 12, words: int = 30522, length: int = 128
) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Return an encoder with the sizes of BERT's smaller one, and the shape of a row of its input.

    `tokens` int64 [N, length] to `pooled` [N, width], the hidden state of the first token.
    """
    g = _Graph()
    head = width // heads

    def linear(x: str, name: str, given: int, made: int) -> str:
        product = g.add("MatMul", [x, g.weight(f"{name}.w", (given, made), given**-0.5)], f"{name}.product")
        return g.add("Add", [product, g.weight(f"{name}.b", (made,), 0.01)], name)

    def norm(x: str, name: str) -> str:
        inputs = [x, g.weight(f"{name}.w", (width,), 0.02, 1.0), g.weight(f"{name}.b", (width,), 0.02)]
        return g.add("LayerNormalization", inputs, name, axis=-1, epsilon=1e-5)

    split = g.constant("split", np.array([0, length, heads, head], np.int64))
    whole = g.constant("whole", np.array([0, length, width], np.int64))
    scale = g.constant("scale", np.float32(head**-0.5))
    half, one, root = (g.constant(n, np.float32(v)) for n, v in (("half", 0.5), ("one", 1.0), ("root", 2**-0.5)))

    def heads_of(x: str, name: str, order: list[int]) -> str:
        return g.add("Transpose", [g.add("Reshape", [x, split], f"{name}.split")], f"{name}.heads", perm=order)

    found = g.add("Gather", [g.weight("words", (words, width), 0.5), "tokens"], "found")
    x = norm(g.add("Add", [found, g.weight("places", (length, width), 0.5)], "placed"), "begin")
    for layer in range(layers):
        name = f"l{layer}"
        q = heads_of(linear(x, f"{name}.q", width, width), f"{name}.q", [0, 2, 1, 3])
        k = heads_of(linear(x, f"{name}.k", width, width), f"{name}.k", [0, 2, 3, 1])
        v = heads_of(linear(x, f"{name}.v", width, width), f"{name}.v", [0, 2, 1, 3])
        scores = g.add("Mul", [g.add("MatMul", [q, k], f"{name}.qk"), scale], f"{name}.scores")
        mixed = g.add("MatMul", [g.add("Softmax", [scores], f"{name}.share", axis=-1), v], f"{name}.mixed")
        joined = g.add("Transpose", [mixed], f"{name}.back", perm=[0, 2, 1, 3])
        joined = g.add("Reshape", [joined, whole], f"{name}.joined")
        attended = g.add("Add", [x, linear(joined, f"{name}.o", width, width)], f"{name}.attended")
        x = norm(attended, f"{name}.norm1")
        up = linear(x, f"{name}.up", width, 4 * width)
        bell = g.add("Erf", [g.add("Mul", [up, root], f"{name}.erf_in")], f"{name}.erf")
        gelu = g.add("Mul", [g.add("Mul", [up, half], f"{name}.half"), g.add("Add", [bell, one], f"{name}.bell")],
                     f"{name}.gelu")  # fmt: skip
        x = norm(g.add("Add", [x, linear(gelu, f"{name}.down", 4 * width, width)], f"{name}.sum"), f"{name}.norm2")
    first, axis = g.constant("first", np.array(0, np.int64)), 1
    g.add("Gather", [x, first], "pooled", axis=axis)
    given = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", length])
    return g.model("encoder", [given], [_output("pooled", ["N", width])]), {"tokens": (length,)}


def rows_of(name: str, row: tuple[int, ...], count: int, words: int, seed: int = 0) -> np.ndarray:
    """Return random rows for an input of these models."""
    draw = np.random.default_rng(seed)
    if name == "tokens":
        return draw.integers(0, words, (count, *row), np.int64)
    return draw.standard_normal((count, *row), np.float32)


def _output(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
