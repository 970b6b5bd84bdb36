# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`convert`: an fp32 ONNX model to fp16 or bf16, and the choice of the nodes that change precision."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.check import complaint_about
from xpuruntime.engines.model.external import inline_functions
from xpuruntime.engines.model.file import MAX_PROTOBUF, refuse
from xpuruntime.engines.model.graph import graphs, name_nodes, normal_domain, subgraphs, tensors
from xpuruntime.engines.precision.rewrite import Rewriter
from xpuruntime.engines.precision.types import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    NO_TENSOR,
    UNKNOWN,
    NodeTypes,
    Signature,
    node_types,
    signature,
)

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo

# Kept whatever the type: what they do is tied to fp32, or their output type is an attribute of its own.
_FIXED = {
    "QuantizeLinear": "quantization scales stay fp32",
    "DequantizeLinear": "quantization scales stay fp32",
    "DynamicQuantizeLinear": "quantization scales stay fp32",
    "EyeLike": "its output type is an attribute",
    "Bernoulli": "its output type is an attribute",
    "RandomNormal": "its output type is an attribute",
    "RandomNormalLike": "its output type is an attribute",
    "RandomUniform": "its output type is an attribute",
    "RandomUniformLike": "its output type is an attribute",
    "Constant": "it is an output of the graph",
}
_GENERATORS = {"ConstantOfShape"}


class NodePrecision(NamedTuple):
    """What becomes of one node.

    `inputs` and `outputs` are the positions that take the new type. `reason` says why a node with fp32 values is kept.
    A node that only reads floats and makes none (`follows`) takes whichever type its inputs already have.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    follows: bool = False
    reason: str = ""


def library_block_list() -> frozenset[str]:
    """Return the operators that ONNX Runtime's own fp16 converter leaves in fp32."""
    return _library_block_list()


@functools.lru_cache(maxsize=1)
def _library_block_list() -> frozenset[str]:
    import sys

    package = "onnxruntime.transformers"
    before, known = list(sys.path), package in sys.modules
    try:  # that package adds its own folder to the search path when imported
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST
    finally:
        sys.path[:] = before
        if not known:  # onnxruntime.quantization needs that folder on the path: let it be added again
            sys.modules.pop(package, None)
    return frozenset(DEFAULT_OP_BLOCK_LIST)


def choose(
    model: onnx.ModelProto,
    types: Mapping[str, NodeTypes],
    target: int,
    keep: Sequence[str],
    supported_ops: frozenset[str] | None,
) -> dict[str, NodePrecision]:
    """Return the choice for every node that reads or makes fp32 values, by node name."""
    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    choices: dict[str, NodePrecision] = {}
    for graph in graphs(model):
        for node in graph.node:
            node_types = types[node.name]
            if FLOAT in node_types.inputs or FLOAT in node_types.outputs:
                choices[node.name] = _choose(node, node_types, target, keep, supported_ops, versions)
    return choices


def _choose(
    node: onnx.NodeProto,
    types: NodeTypes,
    target: int,
    keep: Sequence[str],
    supported_ops: frozenset[str] | None,
    versions: Mapping[str, int],
) -> NodePrecision:
    domain = normal_domain(node.domain)
    op = f"{domain}:{node.op_type}" if domain else node.op_type
    if any(True for _ in subgraphs(node)):
        return NodePrecision(reason="its inputs and outputs stay fp32; the nodes inside are judged one by one")
    rule = next((pattern for pattern in keep if fnmatchcase(node.name, pattern)), None)
    if rule is not None:
        return NodePrecision(reason=f"the rule {rule!r} names it")
    if not domain and node.op_type in _FIXED:
        return NodePrecision(reason=_FIXED[node.op_type])
    if NO_TENSOR in types.inputs or NO_TENSOR in types.outputs:
        return NodePrecision(reason="sequences, maps and optionals stay fp32")
    form = signature(node.op_type, domain, versions.get(domain, 1))
    if form is None:
        return NodePrecision(reason=f"the types that {op} takes are not known")
    if FLOAT not in types.outputs and UNKNOWN not in types.outputs:
        positions = _positions(types.inputs, form, target)
        return NodePrecision(inputs=positions, follows=True)
    if node.op_type in library_block_list():
        return NodePrecision(reason="ONNX Runtime's converter keeps this operator in fp32")
    if supported_ops is not None and op not in supported_ops:
        return NodePrecision(reason=f"the engine has no {_short(target)} kernel for {op}")
    return _typed(node, types, form, target, op)


def _typed(node: onnx.NodeProto, types: NodeTypes, form: Signature, target: int, op: str) -> NodePrecision:
    if op == "Cast" or op in _GENERATORS:  # the output type is an attribute, which is changed too
        if form.allows(form.output(0), target):
            return NodePrecision(inputs=_positions(types.inputs, form, target), outputs=frozenset({0}))
        return NodePrecision(reason=_refusal(node, form, target))
    inputs = _positions(types.inputs, form, target)
    variables = {form.input(i) for i in inputs}
    outputs = frozenset(i for i, t in enumerate(types.outputs) if t == FLOAT and form.output(i) in variables)
    if not outputs:
        if inputs and FLOAT not in types.outputs:
            return NodePrecision(reason="the type of its output is not known")
        return NodePrecision(reason=_refusal(node, form, target))
    return NodePrecision(inputs=inputs, outputs=outputs)


def _positions(types: Sequence[int], form: Signature, target: int) -> frozenset[int]:
    return frozenset(
        i
        for i, t in enumerate(types)
        if t == FLOAT and form.input(i) in form.allowed and form.allows(form.input(i), target)
    )


def _short(target: int) -> str:
    return "bf16" if target == BFLOAT16 else "fp16"


def _refusal(node: onnx.NodeProto, form: Signature, target: int) -> str:
    domain = normal_domain(node.domain)
    text = f"{node.op_type} (version {form.since}) has no {_short(target)} form"
    first = _first_with(node.op_type, domain, form.since, target) if not domain else None
    return f"{text}; opset {first} brings it" if first else text


@functools.lru_cache(maxsize=1024)
def _first_with(op: str, domain: str, after: int, target: int) -> int | None:
    from onnx import defs

    for version in range(after + 1, defs.onnx_opset_version() + 1):
        form = signature(op, domain, version)
        if form is not None and form.since > after and form.inputs and form.allows(form.input(0), target):
            return form.since
    return None


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node that stays in fp32, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedModel:
    """A model after `convert`. Its inputs and outputs have the dtypes they had before."""

    proto: onnx.ModelProto
    precision: Literal["fp16", "bf16"]
    notes: tuple[str, ...]
    converted_nodes: tuple[str, ...]
    kept_nodes: tuple[KeptNode, ...]
    inserted_casts: tuple[str, ...]
    converted_weights: int
    clamped_weights: int

    @property
    def changed(self) -> bool:
        """Whether anything was converted."""
        return bool(self.converted_nodes or self.converted_weights)

    def fits_in_memory(self) -> bool:
        """Whether `serialized` can hold it: a protobuf ends at 2 GiB."""
        held = sum(model_external.nbytes(t) or 0 for t in tensors(self.proto))
        return held < MAX_PROTOBUF - (64 << 20)

    def serialized(self) -> bytes:
        """Return the model as bytes; the same model gives the same bytes."""
        if not self.fits_in_memory():
            raise refuse(
                self.proto.graph.name,
                f"in {self.precision} it has more than 2 GiB, which a protobuf cannot hold",
                "write it to a folder with ConvertedModel.write",
            )
        return bytes(self.proto.SerializeToString(deterministic=True))

    def write(self, folder: str | Path) -> Path:
        """Write ``model.onnx`` into a folder, with the weights in ``model.onnx.data`` beside it when they are large."""
        import onnx

        path = Path(folder) / "model.onnx"
        if self.fits_in_memory():
            path.write_bytes(self.serialized())
        else:
            onnx.save_model(
                self.proto, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=1024
            )
        return path


def convert(
    model: ModelInfo,
    precision: Literal["fp16", "bf16"],
    *,
    keep_fp32_nodes: Sequence[str] = (),
    supported_ops: frozenset[str] | None = None,
) -> ConvertedModel:
    """Convert the fp32 parts of a model to fp16 or bf16.

    Inputs and outputs keep their dtypes: casts stand at the border. fp64 and integer values are left alone.
    """
    target = {"fp16": FLOAT16, "bf16": BFLOAT16}[precision]
    proto = model.named_proto()
    notes: list[str] = []
    opset = next((o.version for o in proto.opset_import if normal_domain(o.domain) == ""), 0)
    if target == BFLOAT16 and opset < 13:
        raise refuse(
            model.path,
            f"bf16 needs opset 13 or later, and the model has opset {opset}",
            "convert it with onnx.version_converter.convert_version(model, 22), or use fp16",
        )
    proto = _prepare(proto, notes, model.path)
    types = node_types(proto)
    choices = choose(proto, types, target, tuple(keep_fp32_nodes), supported_ops)
    rewriter = Rewriter(proto, types, choices, target, base_dir=model.base_dir, where=model.path)
    ops = {named.name: named.node.op_type for named in name_nodes(proto)}
    rewriter.run()
    model_external.load(tensors(proto), model.base_dir, model.path)
    _check(proto, model.path, precision)
    kept = tuple(KeptNode(n, ops[n], c.reason) for n, c in choices.items() if c.reason)
    converted = tuple(n for n, c in choices.items() if c.outputs)
    notes += _tell(model, precision, keep_fp32_nodes, rewriter, converted, kept)
    return ConvertedModel(
        proto=proto,
        precision=precision,
        notes=tuple(notes),
        converted_nodes=converted,
        kept_nodes=kept,
        inserted_casts=tuple(rewriter.casts),
        converted_weights=rewriter.weights,
        clamped_weights=rewriter.over + rewriter.under,
    )


def _prepare(proto: onnx.ModelProto, notes: list[str], where: str) -> onnx.ModelProto:
    if proto.functions:
        count = len(proto.functions)
        proto = inline_functions(proto, where)
        notes.append(f"{count} model-local functions were inlined")
    if proto.ir_version < 4:
        weights = {tensor.name for tensor in proto.graph.initializer}
        inputs = [value for value in proto.graph.input if value.name not in weights]
        copies = [type(value)() for value in inputs]
        for copy, value in zip(copies, inputs, strict=True):
            copy.CopyFrom(value)
        del proto.graph.input[:]
        proto.graph.input.extend(copies)
        notes.append(f"IR version {proto.ir_version} was raised to 4, which keeps weights apart from inputs")
        proto.ir_version = 4
    _lift_constants(proto.graph)
    return proto


def _lift_constants(graph: onnx.GraphProto) -> None:
    import onnx

    results = {value.name for value in graph.output}
    left: list[onnx.NodeProto] = []
    lifted: list[onnx.TensorProto] = []
    for node in graph.node:
        for _, inner in subgraphs(node):
            _lift_constants(inner)
        tensor = _constant(node) if node.output and node.output[0] not in results else None
        copy: onnx.NodeProto | onnx.TensorProto
        if tensor is None:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            left.append(copy)
        else:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = node.output[0]
            lifted.append(copy)
    if lifted:
        del graph.node[:]
        graph.node.extend(left)
        graph.initializer.extend(lifted)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    import onnx

    if node.op_type != "Constant" or normal_domain(node.domain) != "":
        return None
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_type == FLOAT:
            return attribute.t
        if attribute.name == "value_float":
            return onnx.helper.make_tensor("", FLOAT, [], [attribute.f])
        if attribute.name == "value_floats":
            return onnx.helper.make_tensor("", FLOAT, [len(attribute.floats)], attribute.floats)
    return None


def _check(proto: onnx.ModelProto, where: str, precision: str) -> None:
    reason = complaint_about(proto)
    if reason is not None:
        raise refuse(
            where,
            f"the conversion to {precision} gave an invalid graph: {reason}",
            "keep the node in fp32 by a rule, or use precision: fp32",
        )


def _tell(
    model: ModelInfo,
    precision: str,
    patterns: Sequence[str],
    rewriter: Rewriter,
    converted: Sequence[str],
    kept: Sequence[KeptNode],
) -> list[str]:
    from fnmatch import fnmatchcase

    notes: list[str] = []
    if not converted and not rewriter.weights:
        why = "its nodes stay in fp32" if kept else f"it has no fp32 values ({_types(model)})"
        notes.append(f"nothing was converted to {precision}: {why}")
    else:
        notes.append(
            f"{len(converted)} nodes and {rewriter.weights} weight elements were converted to {precision}; "
            f"{len(rewriter.casts)} casts were inserted"
        )
    for reason, count in Counter(f"{k.op}: {k.reason}" for k in kept).most_common(20):
        notes.append(f"kept in fp32: {reason}" + (f" ({count} nodes)" if count > 1 else ""))
    if rewriter.over:
        notes.append(f"{rewriter.over} weights were too large for {precision} and took its largest value")
    if rewriter.under:
        notes.append(f"{rewriter.under} weights were too small for {precision} and took its smallest value")
    if rewriter.copied:
        notes.append(
            f"{len(rewriter.copied)} weights are held in fp32 and in {precision}: nodes of both kinds read them"
        )
    names = [node.name for node in model.nodes]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            notes.append(f"the pattern {pattern!r} names no node of the model")
    if model.quantization.scheme != "none":
        notes.append(f"the model is quantized ({model.quantization.scheme}); its integer parts were left alone")
    return notes


def _types(model: ModelInfo) -> str:
    shares = ", ".join(f"{share} {name}" for name, share in model.weights.items())
    return f"weights: {shares}" if shares else "no weights"
