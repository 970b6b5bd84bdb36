# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rewriting a graph to a lower precision, node by node in order.

Each value has one or two forms, fp32 and the new type. A node asks for the form it wants; a form that is missing is
made once, by a Cast right where the value lives, so that two nodes never cast the same value and neighbors kept in
fp32 pass fp32 to each other. Inputs and outputs of the model, and of every subgraph, stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.graph import graphs, subgraphs
from xpuruntime.engines.precision.types import BFLOAT16, FLOAT, FLOAT16, NodeTypes

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

    from xpuruntime.engines.precision.conversion import NodePrecision

#: Dimensions of the keys and values that GroupQueryAttention hands out.
_CACHE_RANK = 4


class _Scope:
    """One graph while it is rewritten: the forms of its own values, and the nodes written so far."""

    def __init__(self, graph: onnx.GraphProto, outer: _Scope | None) -> None:
        self.graph = graph
        self.outer = outer
        self.nodes: list[onnx.NodeProto] = []
        self.forms: dict[str, dict[int, str]] = {}

    def owner(self, name: str) -> _Scope | None:
        scope: _Scope | None = self
        while scope is not None and name not in scope.forms:
            scope = scope.outer
        return scope


class Rewriter:
    """Rewrites one model in place."""

    def __init__(
        self,
        model: onnx.ModelProto,
        types: Mapping[str, NodeTypes],
        choices: Mapping[str, NodePrecision],
        target: int,
        *,
        base_dir: str | None,
        where: str,
    ) -> None:
        self.model = model
        self.types = types
        self.choices = choices
        self.target = target
        self.suffix = "bf16" if target == BFLOAT16 else "fp16"
        self.base_dir = base_dir
        self.where = where
        self.casts: list[str] = []
        self.copied: list[str] = []
        self.over = self.under = self.weights = 0
        self._taken = {name for graph in graphs(model) for name in _names(graph)}

    def run(self) -> None:
        """Rewrite the model."""
        self._graph(self.model.graph, None)

    def _graph(self, graph: onnx.GraphProto, outer: _Scope | None) -> None:
        scope = _Scope(graph, outer)
        for value in graph.input:
            if value.type.tensor_type.elem_type == FLOAT:
                scope.forms[value.name] = {FLOAT: value.name}
        self._initializers(scope)
        results = {value.name for value in graph.output}
        for node in graph.node:
            self._node(node, scope, results)
        for value in graph.output:  # a subgraph may hand out a value of the graph around it
            owner = scope.owner(value.name)
            if owner is not None:
                value.name = self._want(value.name, FLOAT, scope)
        for value in graph.value_info:
            if scope.forms.get(value.name, {}).get(self.target) == value.name:
                value.type.tensor_type.elem_type = self.target
        nodes = [_copy(node) for node in scope.nodes]
        del graph.node[:]
        graph.node.extend(nodes)

    def _node(self, node: onnx.NodeProto, scope: _Scope, results: set[str]) -> None:
        types = self.types[node.name]
        choice = self.choices.get(node.name)
        for _, inner in subgraphs(node):
            self._graph(inner, scope)
        if choice is not None:
            wanted = self._wanted(node, choice, scope)
            for i, name in enumerate(node.input):
                if name and types.inputs[i] == FLOAT:
                    node.input[i] = self._want(name, self.target if i in wanted else FLOAT, scope)
        scope.nodes.append(node)
        outputs = choice.outputs if choice is not None else frozenset()
        if outputs:
            self._retype_attribute(node)
        for i, name in enumerate(node.output):
            if not name or types.outputs[i] != FLOAT:
                continue
            if i not in outputs:
                scope.forms[name] = {FLOAT: name}
            elif name in results:
                node.output[i] = self._fresh(f"{name}_{self.suffix}")
                rank = _CACHE_RANK if node.op_type == "GroupQueryAttention" and i in (1, 2) else None
                self._state_shape(scope.graph, name, node.output[i], rank)
                scope.forms[name] = {self.target: node.output[i], FLOAT: name}
                self._cast(scope, node.output[i], name, FLOAT)
            else:
                scope.forms[name] = {self.target: name}

    def _wanted(self, node: onnx.NodeProto, choice: NodePrecision, scope: _Scope) -> frozenset[int]:
        if not choice.follows and node.op_type != "Cast":
            return choice.inputs
        for i in choice.inputs:
            owner = scope.owner(node.input[i])
            if owner is None or self.target not in owner.forms[node.input[i]] or FLOAT in owner.forms[node.input[i]]:
                return frozenset()
        return choice.inputs

    def _want(self, name: str, form: int, scope: _Scope) -> str:
        owner = scope.owner(name)
        if owner is None:
            owner = scope
            owner.forms[name] = {FLOAT: name}
        forms = owner.forms[name]
        if form not in forms:
            forms[form] = self._fresh(f"{name}_{'fp32' if form == FLOAT else self.suffix}")
            self._cast(owner, next(iter(forms.values())), forms[form], form)
        return forms[form]

    def _state_shape(self, graph: onnx.GraphProto, result: str, copy_name: str, rank: int | None) -> None:
        """State the sizes of what is cast to a result of the model, those that are not fixed by names of their own."""
        # ONNX Runtime infers that cached keys and values with new ones behind them are as long as those before, and
        # writes them in their place where both are no inputs and results of the model.
        for value in [output for output in graph.output if output.name == result]:
            copy = graph.value_info.add()
            copy.CopyFrom(value)
            copy.name, tensor = copy_name, copy.type.tensor_type
            tensor.elem_type = self.target
            if rank is not None and not tensor.HasField("shape"):
                for _ in range(rank):
                    tensor.shape.dim.add()
            for axis, dim in enumerate(tensor.shape.dim):
                if not dim.HasField("dim_value"):
                    dim.dim_param = f"{copy_name}.{axis}"

    def _cast(self, scope: _Scope, source: str, output: str, form: int) -> None:
        import onnx

        name = self._fresh(f"Cast:{output}")
        scope.nodes.append(onnx.helper.make_node("Cast", [source], [output], name=name, to=form))
        self.casts.append(name)

    def _fresh(self, base: str) -> str:
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}#{count}"
        self._taken.add(name)
        return name

    def _retype_attribute(self, node: onnx.NodeProto) -> None:
        import onnx

        if node.op_type == "Cast":
            for attribute in node.attribute:
                if attribute.name == "to":
                    attribute.i = self.target
        elif node.op_type == "ConstantOfShape":
            value = next((a for a in node.attribute if a.name == "value"), None)
            if value is None:
                zero = onnx.helper.make_tensor("value", FLOAT, [1], [0.0])
                value = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=zero)
            tensor, rounded = round_tensor(value.t, self.target)
            self.over += rounded.over
            self.under += rounded.under
            value.t.CopyFrom(tensor)

    def _initializers(self, scope: _Scope) -> None:
        graph = scope.graph
        fixed = {value.name for value in (*graph.input, *graph.output)}
        requested: dict[str, set[int]] = {}
        for name, form in self._asked(graph):
            requested.setdefault(name, set()).add(form)
        added: list[onnx.TensorProto] = []
        for tensor in graph.initializer:
            if tensor.data_type != FLOAT:
                continue
            scope.forms[tensor.name] = {FLOAT: tensor.name}
            forms = requested.get(tensor.name, set())
            if self.target not in forms or tensor.name in fixed:
                continue
            if model_external.is_external(tensor):
                model_external.load([tensor], self.base_dir, self.where)
            rounded_tensor, rounded = round_tensor(tensor, self.target)
            self.over += rounded.over
            self.under += rounded.under
            self.weights += int(rounded.bits.size)
            if FLOAT in forms:
                rounded_tensor.name = self._fresh(f"{tensor.name}_{self.suffix}")
                scope.forms[tensor.name][self.target] = rounded_tensor.name
                self.copied.append(tensor.name)
                added.append(rounded_tensor)
            else:
                scope.forms[tensor.name] = {self.target: tensor.name}
                tensor.CopyFrom(rounded_tensor)
        graph.initializer.extend(added)
        for sparse in graph.sparse_initializer:
            if sparse.values.data_type == FLOAT:
                scope.forms[sparse.values.name] = {FLOAT: sparse.values.name}

    def _asked(self, graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
        """Yield each float input of a graph's nodes, and of those in its subgraphs, with the form it will want."""
        for node in graph.node:
            choice = self.choices.get(node.name)
            types = self.types[node.name]
            if choice is not None and not choice.follows:
                for i, name in enumerate(node.input):
                    if name and types.inputs[i] == FLOAT:
                        yield name, self.target if i in choice.inputs else FLOAT
            for _, inner in subgraphs(node):
                yield from self._asked(inner)


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
    for tensor in graph.initializer:
        yield tensor.name
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = type(node)()
    copy.CopyFrom(node)
    return copy


_FP16_MAX = 65504.0
_FP16_TINY = 2.0**-24  # the smallest positive value
_BF16_MAX_BITS = 0x7F7F
# Elements rounded at a time, so that large weights need no large temporaries.
_BLOCK = 1 << 20


class Rounded(NamedTuple):
    """`bits` as uint16, and how many finite values were too large (`over`) or not zero yet too small (`under`)."""

    bits: NDArray[np.uint16]
    over: int
    under: int


def round_values(values: NDArray[np.float32], target: int) -> Rounded:
    """Round to nearest, ties to even.

    Finite values stay finite and values other than zero stay other than zero, as in ONNX Runtime's converter: too
    large ones become the largest value of the type, too small ones the smallest. NaN and infinities stay.
    """
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if target == FLOAT16:
        size = np.abs(values)
        large = (size > _FP16_MAX) & np.isfinite(values)
        small = (size < _FP16_TINY) & (size > 0)
        over, under = int(np.count_nonzero(large)), int(np.count_nonzero(small))
        if over or under:
            values = values.copy()
            values[large] = np.copysign(np.float32(_FP16_MAX), values[large])
            values[small] = np.copysign(np.float32(_FP16_TINY), values[small])
        return Rounded(values.astype(np.float16).view(np.uint16), over, under)
    raw = values.view(np.uint32)
    bits = ((raw + (((raw >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    bits[nan] = (raw[nan] >> 16).astype(np.uint16) | 0x40
    grown = ((bits & 0x7FFF) == 0x7F80) & np.isfinite(values)
    bits[grown] = (bits[grown] & 0x8000) | _BF16_MAX_BITS
    lost = ((bits & 0x7FFF) == 0) & (values != 0)
    bits[lost] |= 1
    return Rounded(bits, int(np.count_nonzero(grown)), int(np.count_nonzero(lost)))


def round_tensor(tensor: onnx.TensorProto, target: int) -> tuple[Any, Rounded]:
    """Return a float tensor as a new tensor of the target type, and how it was rounded. Its data must be loaded."""
    import numpy as np
    import onnx

    if tensor.HasField("raw_data"):
        values = np.frombuffer(tensor.raw_data, dtype="<f4")
    else:
        values = np.array(tensor.float_data, dtype=np.float32)
    bits = np.empty(values.size, "<u2")
    over = under = 0
    for start in range(0, values.size, _BLOCK):
        part = round_values(values[start : start + _BLOCK], target)
        bits[start : start + _BLOCK] = part.bits
        over, under = over + part.over, under + part.under
    proto = onnx.TensorProto(name=tensor.name, doc_string=tensor.doc_string, data_type=target, dims=tensor.dims)
    proto.raw_data = bits.tobytes()
    return proto, Rounded(bits, over, under)
