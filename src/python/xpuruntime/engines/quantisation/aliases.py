# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Aliases`: tensor names for the time of quantizing, from which the quantizer's names cannot collide with the model's.

ONNX Runtime's quantizer derives names (``x_scale``, ``x_quantized``, ``bias2`` for a bias that two nodes read) and does
not look whether the model has them already: such a graph is invalid, or reads another tensor.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xpuruntime.engines.model.graph import fresh_name, graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

__all__ = ["Aliases"]


class Aliases:
    """Aliases of every tensor of a graph and its subgraphs; one name has one alias wherever it stands."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        names: dict[str, None] = {}

        def note(name: str) -> str:
            names[name] = None
            return name

        _rename(proto, note)
        prefix = "t"
        while any(name.startswith(prefix) for name in names):
            prefix += "_"
        #: Alias of each name.
        self.of = {name: f"{prefix}{index}#" for index, name in enumerate(names)}
        self._name = {alias: name for name, alias in self.of.items()}
        self._pattern = re.compile(re.escape(prefix) + r"\d+#")
        self._nodes = {node.name for graph in graphs(proto) for node in graph.node}

    def apply(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of the model under the aliases; nodes keep their names."""
        copy = type(proto)()
        copy.CopyFrom(proto)
        _rename(copy, self.of.__getitem__)
        return copy

    def undo(self, proto: onnx.ModelProto) -> None:
        """Give tensors their names again, and what the quantizer put in names derived from those, each unique."""
        taken, given = set(self.of), dict(self._name)

        def name_of(alias: str) -> str:
            if alias not in given:
                given[alias] = fresh_name(self._plain(alias), taken)
            return given[alias]

        _rename(proto, name_of)
        nodes = set(self._nodes)
        for graph in graphs(proto):
            for node in graph.node:
                if node.name not in self._nodes:
                    node.name = fresh_name(self._plain(node.name), nodes)

    def _plain(self, derived: str) -> str:
        return self._pattern.sub(lambda found: self._name.get(found[0], found[0]), derived)


def _rename(proto: onnx.ModelProto, change: Callable[[str], str]) -> None:
    """Replace each name of a tensor in the graph and its subgraphs."""
    for graph in graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = change(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = change(sparse.values.name)
        for annotation in graph.quantization_annotation:
            annotation.tensor_name = change(annotation.tensor_name)
            for entry in annotation.quant_parameter_tensor_names:
                entry.value = change(entry.value)
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [change(name) if name else name for name in names]
