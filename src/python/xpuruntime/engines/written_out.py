# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations that a model writes out: attention as two products around a softmax, norms as their arithmetic.

Exporters write them so for opsets that have no such operator, and people do by hand. A kernel key that is for one of
these operations is not met because no single node carries its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_PRODUCTS = frozenset(
    (
        "matmul", "gemm", "einsum", "bmm", "baddbmm", "mm", "addmm", "linear", "matmulinteger", "qlinearmatmul",
        "fusedmatmul", "fusedgemm", "transposematmul", "matmulnbits", "dynamicquantizematmul", "matmulintegertofloat",
    )
)  # fmt: skip
_CONVOLUTIONS = frozenset(
    ("conv", "conv1d", "conv2d", "conv3d", "convtranspose", "convinteger", "qlinearconv", "fusedconv", "nhwcconv",
     "convolution", "_convolution", "deformconv")
)  # fmt: skip
_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax", "qlinearsoftmax"))
_ATTENTION = frozenset(
    (
        "attention", "multiheadattention", "groupqueryattention", "packedattention", "packedmultiheadattention",
        "decodermaskedmultiheadattention", "decodermaskedselfattention", "qattention", "longformerattention",
        "sparseattention", "flexattention", "linearattention", "scaled_dot_product_attention",
    )
)  # fmt: skip
_LAYER_NORM = frozenset(("layernormalization", "skiplayernormalization", "embedlayernormalization", "layer_norm"))
_RMS_NORM = frozenset(
    ("rmsnormalization", "simplifiedlayernormalization", "skipsimplifiedlayernormalization", "rms_norm")
)
#: What may stand between the softmax of an attention and its products: elementwise steps and moves of values.
_BETWEEN = frozenset(
    (
        "add", "sub", "mul", "div", "where", "cast", "castlike", "identity", "dropout", "reshape", "transpose",
        "expand", "squeeze", "unsqueeze", "clip", "tanh", "max", "min", "neg", "quantizelinear", "dequantizelinear",
        "split", "slice", "concat", "masked_fill", "view",
        "_unsafe_view", "alias", "detach", "permute", "to", "_to_copy", "clone", "isnan", "nan_to_num",
        "contiguous", "softcap", "pow", "exp", "reducesum", "sum", "mul_", "add_", "div_", "log",
    )
)  # fmt: skip
_MEANS = frozenset(("reducemean", "mean", "globalaveragepool", "averagepool", "reducesum", "sum", "var", "var_mean"))
_ROOTS = frozenset(("sqrt", "rsqrt", "pow"))
_STEPS = 12


class _Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def outputs(self) -> Sequence[str]: ...


def absence(op: str, operations: Iterable[str]) -> tuple[str, str]:
    """Return why a key for an operation that is not in the model chooses nothing, and the fix."""
    others = ", ".join(operations)
    return (
        f"no {op} was found in the model, neither as a node nor written out, so the key chooses nothing",
        f"state the key for an operation that the model has ({others})" if others else "name a model with such a node",
    )


def written_out(nodes: Iterable[_Node]) -> dict[str, tuple[str, ...]]:
    """Return the operations of a model that kernels are chosen for, with the nodes at which each is found.

    One node of the name, or arithmetic that comes to the same: for attention the softmax, for norms the root.
    """
    return _Search(list(nodes)).run()


def _word(op: str) -> str:
    """Return the operator's plain name: ``"aten.softmax.int"`` and ``"Softmax"`` are ``"softmax"``."""
    parts = [part for part in op.lower().replace(":", ".").split(".") if part]
    named = [part for part in parts if part not in ("aten", "prims", "default", "com", "microsoft", "torch")]
    return named[0] if named else op.lower()


class _Search:
    def __init__(self, nodes: list[_Node]) -> None:
        self.nodes = nodes
        self.words = [_word(node.op) for node in nodes]
        self.makers = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
        self.readers: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name in self.makers:
                    self.readers.setdefault(self.makers[name], []).append(index)

    def run(self) -> dict[str, tuple[str, ...]]:
        nodes_by_op: dict[str, list[str]] = {}
        for index, word in enumerate(self.words):
            for op in self._ops(index, word):
                nodes_by_op.setdefault(op, []).append(self.nodes[index].name)
        return {op: tuple(names) for op, names in nodes_by_op.items()}

    def _ops(self, index: int, word: str) -> list[str]:
        if word in _PRODUCTS:
            return ["matmul"]
        if word in _CONVOLUTIONS:
            return ["conv"]
        if word in _ATTENTION or word.startswith("_scaled_dot_product"):
            return ["attention"]
        if word in _LAYER_NORM or word == "native_layer_norm":
            return ["layer_norm"]
        if word in _RMS_NORM or word == "_fused_rms_norm":
            return ["rms_norm"]
        if (word in _SOFTMAX or self._is_softmax(index, word)) and self._between_products(index):
            return ["attention"]
        if word in _ROOTS:
            norm = self._norm(index)
            return [norm] if norm else []
        return []

    def _is_softmax(self, index: int, word: str) -> bool:
        if word != "div" or len(self.nodes[index].inputs) < 2:
            return False
        above = [self.makers.get(name, -1) for name in self.nodes[index].inputs[:2]]
        if -1 in above or self.words[above[1]] not in ("reducesum", "sum"):
            return False
        return self.words[above[0]] == "exp" and above[0] in self._above(above[1])

    def _between_products(self, index: int) -> bool:
        product = _PRODUCTS.__contains__
        return self._reaches(index, self._above, product) and self._reaches(index, self._below, product)

    def _above(self, index: int) -> list[int]:
        return [self.makers[name] for name in self.nodes[index].inputs if name in self.makers]

    def _below(self, index: int) -> list[int]:
        return self.readers.get(index, [])

    def _reaches(self, index: int, step: Callable[[int], list[int]], wanted: Callable[[str], bool]) -> bool:
        """Whether a node is reached in few steps through what may stand between."""
        ring, seen = step(index), {index}
        for _ in range(_STEPS):
            further: list[int] = []
            for other in ring:
                if wanted(self.words[other]):
                    return True
                if other not in seen and self.words[other] in _BETWEEN:
                    further += step(other)
                seen.add(other)
            ring = further
        return False

    def _norm(self, index: int) -> str | None:
        """Return which norm the root of a mean of squares belongs to; its result divides or multiplies."""
        mean = next((node for node in self._near(index) if self.words[node] in _MEANS), None)
        if mean is None or not any(self.words[node] in ("div", "mul", "reciprocal") for node in self._below(index)):
            return None
        if self.words[mean] in ("var", "var_mean"):
            return "layer_norm"
        square = next((index for index in self._above(mean) if self.words[index] in ("pow", "mul", "square")), None)
        if square is None:
            return None
        base = [index for index in self._above(square) if self.words[index] in ("sub", "cast", "to", "_to_copy")]
        centred = any(
            self.words[index] == "sub" or any(self.words[up] == "sub" for up in self._above(index)) for index in base
        )
        return "layer_norm" if centred else "rms_norm"

    def _near(self, index: int) -> list[int]:
        """Return what a node reads, also through the addition of an epsilon, a clip, or a cast."""
        above = self._above(index)
        passed = [
            up for node in above if self.words[node] in ("add", "max", "clip", "cast") for up in self._above(node)
        ]
        return [*above, *passed]
