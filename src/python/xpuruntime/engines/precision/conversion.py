# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`convert`: an fp32 ONNX model to fp16 or bf16.

The list of operators that stay in fp32 and the rounding of weights are those of ONNX Runtime's own fp16 converter. The
graph itself is rewritten here: that converter knows no bf16, gives an invalid model when two nodes kept in fp32 read
the same tensor, sends values between two such nodes through fp16, and puts the casts of a subgraph into the graph
around it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.check import complaint_about
from xpuruntime.engines.model.digests import inline_functions
from xpuruntime.engines.model.file import MAX_PROTOBUF, refuse
from xpuruntime.engines.model.graph import name_nodes, normal_domain, subgraphs, tensors
from xpuruntime.engines.precision.judge import choose
from xpuruntime.engines.precision.rewrite import Rewriter
from xpuruntime.engines.precision.types import BFLOAT16, FLOAT, FLOAT16, node_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from xpuruntime.engines.model import ModelInfo

__all__ = ["ConvertedModel", "KeptNode", "convert"]


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
    """Inline functions, separate weights from inputs, and turn float constants into weights."""
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
    """Turn Constant nodes with fp32 values into initializers, except outputs of the graph."""
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
    """Let the ONNX checker look at the result."""
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
