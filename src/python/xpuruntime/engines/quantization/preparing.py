# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The float graph as a quantizer gets it: named, of an opset that has the operators, with foldable nodes folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.external import inline_functions
from xpuruntime.engines.model.file import MAX_PROTOBUF, refuse
from xpuruntime.engines.model.graph import fresh_name, graphs, name_nodes, normal_domain, set_node_names, tensors
from xpuruntime.engines.quantization.style import HEAVY, Style
from xpuruntime.printable import bytes_text

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo

_SPARE = 64 << 20
#: From here on DequantizeLinear has an axis, and 16-bit types.
_PER_CHANNEL, _SIXTEEN = 13, 21


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A float graph in a file of a temporary folder."""

    path: Path
    proto: onnx.ModelProto
    regions: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]

    def matching(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes of the prepared graph that stand for a node whose name fits one of the patterns."""
        return tuple(
            name
            for name, sources in self.regions.items()
            if any(fnmatchcase(source, pattern) for source in sources for pattern in patterns)
        )


def prepare(model: ModelInfo, style: Style, folder: Path) -> Prepared:
    """Write the model into `folder` as the quantizer takes it."""
    from onnxruntime.quantization import quant_pre_process

    proto = model.named_proto()
    _refuse_large(model, proto)
    _refuse_half(model)
    model_external.load(tensors(proto), model.base_dir, model.path)
    if proto.functions:
        proto = inline_functions(proto, model.path)
    notes: list[str] = []
    proto = _raise_opset(model, proto, style, notes)
    raw, path = folder / "float.onnx", folder / "prepared.onnx"
    raw.write_bytes(proto.SerializeToString(deterministic=True))
    try:
        quant_pre_process(str(raw), str(path), skip_symbolic_shape=True)
    except OSError:
        raise
    except Exception as error:
        raise refuse(
            model.path,
            f"ONNX Runtime cannot prepare it for quantizing: {' '.join(str(error).split())[:300]}",
            "run it with precision: fp32 first, which names what is wrong with it",
        ) from None
    raw.unlink()
    import onnx

    prepared = onnx.load(str(path))
    _keep_used_opsets(prepared)
    _give_rows_of_bias(prepared)
    set_node_names(prepared)
    path.write_bytes(prepared.SerializeToString(deterministic=True))
    return Prepared(path=path, proto=prepared, regions=_regions(proto, prepared), notes=tuple(notes))


def _refuse_large(model: ModelInfo, proto: onnx.ModelProto) -> None:
    held = sum(model_external.nbytes(tensor) or 0 for tensor in tensors(proto))
    if held >= MAX_PROTOBUF - _SPARE:
        raise refuse(
            model.path,
            f"it has {bytes_text(held)} of weights, and quantizing takes models of less than 2 GiB",
            "quantize it beforehand with a tool for models of that size, and load the result",
        )


def _refuse_half(model: ModelInfo) -> None:
    """Refuse fp16 and bf16: scales would be rounded to them, and the CPU computes neither as the device would."""
    share = model.weight_share("float16", "bfloat16")
    if share > 0:
        kind = "float16" if model.weights.get("float16") else "bfloat16"
        raise refuse(
            model.path,
            f"{share:.0%} of its weights are {kind}, and quantizing starts from float32",
            "export the model in float32, and quantize that",
        )


def _raise_opset(model: ModelInfo, proto: onnx.ModelProto, style: Style, notes: list[str]) -> onnx.ModelProto:
    import onnx

    have = next((o.version for o in proto.opset_import if normal_domain(o.domain) == ""), 0)
    need = _SIXTEEN if "16" in style.activations else _PER_CHANNEL
    if have >= need:
        return proto
    try:
        raised = onnx.version_converter.convert_version(proto, need)
    except Exception as error:  # the converter raises what its C++ raises
        raise refuse(
            model.path,
            f"quantizing needs opset {need}, the model has {have}, and it cannot be converted: "
            f"{' '.join(str(error).split())[:200]}",
            f"export the model with opset {need} or later",
        ) from None
    set_node_names(raised)
    notes.append(f"opset {have} was raised to {need}, which quantized graphs need")
    return raised


def _give_rows_of_bias(proto: onnx.ModelProto) -> None:
    # Give each constant bias of a Gemm the shape [N], and both factors the 1 that quantizers and integer kernels take.
    # The bias of a Gemm may be anything that broadcasts to [M, N], and ONNX Runtime's quantizer has scales for [N].
    # What has another shape is added after the product.
    import numpy as np
    import onnx
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    taken = {name for graph in graphs(proto) for node in graph.node for name in (*node.input, *node.output)}
    taken |= weights.keys()
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        nodes.append(node)
        if node.op_type != "Gemm" or normal_domain(node.domain) or len(node.input) < 3:
            continue
        weight, bias = weights.get(node.input[1]), weights.get(node.input[2])
        if weight is None or bias is None:
            continue
        facts = {attribute.name: attribute for attribute in node.attribute}
        columns = weight.dims[0 if "transB" in facts and facts["transB"].i else 1]
        beta = facts["beta"].f if "beta" in facts else 1.0
        alpha = facts["alpha"].f if "alpha" in facts else 1.0
        if alpha != 1.0:
            values = numpy_helper.to_array(weight)
            node.input[1] = fresh_name(f"{weight.name}_scaled", taken)
            proto.graph.initializer.append(numpy_helper.from_array(values * values.dtype.type(alpha), node.input[1]))
            facts["alpha"].f = 1.0
        if list(bias.dims) == [columns] and beta == 1.0:
            continue
        value = numpy_helper.to_array(bias)
        value = np.asarray(value * value.dtype.type(beta))
        if "beta" in facts:  # the quantizers leave it on a bias that has no scale for it
            facts["beta"].f = 1.0
        fresh = fresh_name(f"{bias.name}_row", taken)
        if value.size in (1, columns) and value.shape[-1:] in ((), (1,), (columns,)):
            row = np.ascontiguousarray(np.broadcast_to(value.reshape(-1), (columns,)))
            proto.graph.initializer.append(numpy_helper.from_array(row, fresh))
            node.input[2] = fresh
            continue
        proto.graph.initializer.append(numpy_helper.from_array(value, fresh))
        product = fresh_name(f"{node.output[0]}_product", taken)
        nodes.append(onnx.helper.make_node("Add", [product, fresh], [node.output[0]], name=f"{node.name}_bias"))
        node.output[0] = product
        del node.input[2:]
    copies = [type(node)() for node in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    used = {name for graph in graphs(proto) for node in graph.node for name in node.input}
    used |= {value.name for graph in graphs(proto) for value in graph.output}
    for index in reversed(range(len(proto.graph.initializer))):
        if proto.graph.initializer[index].name not in used:
            del proto.graph.initializer[index]


def _keep_used_opsets(proto: onnx.ModelProto) -> None:
    """Drop the opsets that ONNX Runtime imports into everything it writes."""
    used = {""} | {normal_domain(named.node.domain) for named in name_nodes(proto)}
    kept = [(o.domain, o.version) for o in proto.opset_import if normal_domain(o.domain) in used]
    del proto.opset_import[:]
    for domain, version in kept:
        proto.opset_import.add(domain=domain, version=version)


def _regions(source: onnx.ModelProto, prepared: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Return which nodes of the source each prepared node stands for."""
    # Those between it and the values before it that both graphs have. Of prepared nodes with values between them that
    # the source has not, such as the Reshape, Gemm, Reshape that a MatMul and an Add became, the product has them all.
    makers = {output: node for node in source.graph.node for output in node.output if output}
    kept = {output for node in prepared.graph.node for output in node.output} & makers.keys()
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in prepared.graph.node:
        mine = [node]
        for name in node.input:
            if name and name not in makers and name in groups and groups[name] is not mine:
                for other in groups[name]:
                    mine.append(other)
        for other in mine:
            for output in other.output:
                groups[output] = mine
    regions: dict[str, tuple[str, ...]] = {}
    for node in prepared.graph.node:
        group = groups[next(output for output in node.output if output)]
        ends = [output for member in group for output in member.output if output in kept]
        holder = next((member for member in group if member.op_type in HEAVY), group[-1])
        regions[node.name] = _between(makers, kept, ends) if holder is node else ()
    return regions


def _between(makers: dict[str, onnx.NodeProto], kept: set[str], ends: Iterable[str]) -> tuple[str, ...]:
    waiting, between = list(ends), dict[str, None]()
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.name not in between:
            between[node.name] = None
            waiting.extend(name for name in node.input if name and name not in kept)
    return tuple(between)
