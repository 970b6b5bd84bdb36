# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Choice of the nodes of a graph that change precision, with the reasons of the others."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.model.graph import graphs, normal_domain, subgraphs
from xpuruntime.engines.precision.types import BFLOAT16, FLOAT, NO_TENSOR, UNKNOWN, NodeTypes, Signature, signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

__all__ = ["NodePrecision", "choose", "library_block_list"]

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
    """Return the fp32 inputs whose type variable also allows the target."""
    return frozenset(
        i
        for i, t in enumerate(types)
        if t == FLOAT and form.input(i) in form.allowed and form.allows(form.input(i), target)
    )


def _short(target: int) -> str:
    return "bf16" if target == BFLOAT16 else "fp16"


def _refusal(node: onnx.NodeProto, form: Signature, target: int) -> str:
    """Say that the operator's signature has no such type, and which opset brings it."""
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
