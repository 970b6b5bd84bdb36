# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One step of a decoder of GPT-2's size, as an exporter writes it.

One new token for each sequence; keys and values of those before are inputs, and the concatenated ones outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper


class Sizes(NamedTuple):
    """GPT-2, the smallest."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024 + 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class _Graph:
    def __init__(self, sizes: Sizes, dtype: type[Any]) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.draw = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> str:
        value = (self.draw.standard_normal(shape, np.float32) * scale + mean).astype(self.dtype)
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def integers(self, name: str, *values: int) -> str:
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"/{output}", domain=domain, **attributes))
        return output

    def norm(self, x: str, name: str) -> str:
        width = self.sizes.width
        inputs = [x, self.weight(f"{name}.weight", width, scale=0.02, mean=1), self.weight(f"{name}.bias", width)]
        return self.add("LayerNormalization", inputs, f"{name}/norm", axis=-1, epsilon=1e-5)

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        product = self.add("MatMul", [x, self.weight(f"{name}.weight", rows, columns, scale=0.02)], f"{name}/matmul")
        return self.add("Add", [product, self.weight(f"{name}.bias", columns, scale=0.02)], f"{name}/add")

    def attention(self, q: str, k: str, v: str, name: str, fused: bool) -> str:
        """Attend to the past and the new token. `q`, `k` and `v` are [batch, 1, width]."""
        layer = name.split(".")[1]
        if fused:
            inputs = [q, k, v, "", "", "", f"past_k{layer}", f"past_v{layer}"]
            outputs = [f"{name}/out", f"k{layer}", f"v{layer}"]
            heads = self.sizes.heads
            kind = {"name": f"/{name}/attention", "domain": "com.microsoft", "num_heads": heads}
            self.nodes.append(helper.make_node("MultiHeadAttention", inputs, outputs, **kind))
            return outputs[0]
        split = {x: self.add("Reshape", [x, "to_heads"], f"{x}/heads") for x in (q, k, v)}
        first = {x: self.add("Transpose", [made], f"{x}/first", perm=[0, 2, 1, 3]) for x, made in split.items()}
        keys = self.add("Concat", [f"past_k{layer}", first[k]], f"k{layer}", axis=2)
        values = self.add("Concat", [f"past_v{layer}", first[v]], f"v{layer}", axis=2)
        turned = self.add("Transpose", [keys], f"{name}/turned", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [first[q], turned], f"{name}/scores")
        scaled = self.add("Mul", [scores, "scale"], f"{name}/scaled")
        weights = self.add("Softmax", [scaled], f"{name}/softmax", axis=-1)
        mixed = self.add("MatMul", [weights, values], f"{name}/mixed")
        back = self.add("Transpose", [mixed], f"{name}/back", perm=[0, 2, 1, 3])
        return self.add("Reshape", [back, "to_width"], f"{name}/out")

    def layer(self, x: str, index: int, fused: bool) -> str:
        name, width = f"layers.{index}", self.sizes.width
        joined = self.linear(self.norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn", width, 3 * width)
        parts = [f"{name}/{part}" for part in "qkv"]
        self.nodes.append(helper.make_node("Split", [joined, "thirds"], parts, name=f"/{name}/split", axis=2))
        attended = self.attention(*parts, name, fused)
        x = self.add("Add", [self.linear(attended, f"{name}.attn.c_proj", width, width), x], f"{name}/first_sum")
        inner = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc", width, 4 * width)
        inner = self.add("Gelu", [inner], f"{name}.mlp/gelu", approximate="tanh")
        return self.add("Add", [self.linear(inner, f"{name}.mlp.c_proj", 4 * width, width), x], f"{name}/second_sum")


def decoder_step(
    batch: int, past: int, sizes: Sizes | None = None, *, fused_attention: bool = False, dtype: type[Any] = np.float16
) -> bytes:
    """Return the model.

    Parameters
    ----------
    batch : int
        Sequences.
    past : int
        Tokens before the new one, in each.
    sizes : Sizes, optional
    fused_attention : bool
        ``com.microsoft.MultiHeadAttention``, as ONNX Runtime's own converter writes it, instead of products around a
        Softmax.
    dtype : numpy type
        Of weights and results.
    """
    sizes = sizes or Sizes()
    graph = _Graph(sizes, dtype)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph.weight("wte", sizes.vocabulary, sizes.width, scale=0.02)
    graph.weight("wpe", sizes.positions, sizes.width, scale=0.02)
    graph.weights.append(numpy_helper.from_array(np.array(sizes.head_dim**-0.5, dtype), "scale"))
    graph.integers("to_heads", 0, 0, sizes.heads, sizes.head_dim)
    graph.integers("to_width", 0, 0, sizes.width)
    graph.integers("thirds", *[sizes.width] * 3)
    token = graph.add("Gather", ["wte", "tokens"], "token")
    x = graph.add("Add", [token, graph.add("Gather", ["wpe", "position"], "place")], "embedded")
    for index in range(sizes.layers):
        x = graph.layer(x, index, fused_attention)
    x = graph.norm(x, "ln_f")
    graph.add("MatMul", [x, graph.weight("lm_head", sizes.width, sizes.vocabulary, scale=0.02)], "logits")

    def value(name: str, kind: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [value("tokens", TensorProto.INT64, [batch, 1]), value("position", TensorProto.INT64, [1])]
    outputs = [value("logits", element, [batch, 1, sizes.vocabulary])]
    for index, letter in ((i, kv) for i in range(sizes.layers) for kv in "kv"):
        shape = [batch, sizes.heads, past, sizes.head_dim]
        inputs.append(value(f"past_{letter}{index}", element, shape))
        outputs.append(value(f"{letter}{index}", element, [*shape[:2], past + 1, shape[3]]))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.weights)
    return bytes(helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString())


def step_inputs(batch: int, past: int, sizes: Sizes | None = None, dtype: type[Any] = np.float16) -> dict[str, Any]:
    """Return inputs for `decoder_step`, the same in every process."""
    sizes = sizes or Sizes()
    draw = np.random.default_rng(1)
    inputs: dict[str, Any] = {
        "tokens": draw.integers(0, sizes.vocabulary, (batch, 1)),
        "position": np.array([past], np.int64),
    }
    for index, letter in ((i, kv) for i in range(sizes.layers) for kv in "kv"):
        shape = (batch, sizes.heads, past, sizes.head_dim)
        inputs[f"past_{letter}{index}"] = draw.standard_normal(shape, np.float32).astype(dtype)
    return inputs
