# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX programs of modules, their node names, and files that are written as a whole."""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.metadata import KERNEL_KEY, LOCK_KEY, POLICY_KEY, RESULT_KEY, onnx_digest, pinned_by_rule
from xpuruntime.files.paths import reason_of
from xpuruntime.files.writing import files_beside
from xpuruntime.printable import error_line
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.exporter.exported import (
    OPSET,
    Exported,
    lock_of,
    plain_path,
    quiet,
    translate,
    warn_state_changes,
    written_state,
)

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from xpuruntime.policies import Policy


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a place to write `target` to; its other files, then itself, are moved to their place afterwards."""
    try:
        with files_beside(target) as temporary:
            yield temporary
    except OSError as error:
        raise XpuRuntimeError(
            f"cannot write {str(target)!r}: {reason_of(error)}. Fix: free the disk, or name a place that can be written"
        ) from error


#: Where PyTorch's exporter writes the modules around an operator, outermost first, and the operator last.
_SCOPES = "pkg.torch.onnx.name_scopes"
#: Operators that the exporter folds a batch normalization into.
_FOLDING = ("Conv", "ConvTranspose", "Gemm")


def name_nodes(graph: onnx.GraphProto, modules: Collection[str]) -> set[str]:
    """Name every node ``"<path of the module>/<operator>"``, in place; return the paths.

    A second node of the same name is ``"layers.0.attn.qkv/Add_1"``. A node that the exporter says nothing of, such as
    one that it added, belongs to the innermost module that has all of the nodes around it. A normalization that the
    exporter has folded into the product before it leaves a node of the product, whose result is that of the
    normalization: the node says so.
    """
    paths = _paths(graph)
    counts: dict[str, int] = {}
    nodes: set[str] = set()
    for node, own in _walk(graph, paths, ""):
        path = own
        if (folded := _folded_into(node, modules)) is not None:
            path = folded
            node.metadata_props.add(key=RESULT_KEY, value=own)
        base = f"{path}/{node.op_type}" if path else node.op_type
        count = counts.get(base, 0)
        counts[base] = count + 1
        node.name = f"{base}_{count}" if count else base
        if path:
            nodes.add(path)
    return nodes


def _folded_into(node: onnx.NodeProto, modules: Collection[str]) -> str | None:
    scopes = _scopes(node)
    if node.op_type not in _FOLDING or not scopes or "batch_norm" not in scopes[-1] or len(node.input) < 2:
        return None
    owner = node.input[1].rpartition(".")[0]
    return owner if owner and owner in modules else None


def _walk(graph: onnx.GraphProto, paths: list[str | None], outer: str) -> Iterator[tuple[onnx.NodeProto, str]]:
    for node, path in zip(graph.node, paths, strict=True):
        own = outer if path is None else path
        yield node, own
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
                yield from _walk(inner, _paths(inner), own)


def _paths(graph: onnx.GraphProto) -> list[str | None]:
    """Return the module of each node; ``None`` where nothing states it."""
    stated = [_stated(node) for node in graph.node]
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(graph.node):
        for name in node.input:
            readers.setdefault(name, []).append(i)
    paths = list(stated)
    for i, node in enumerate(graph.node):
        if stated[i] is not None:
            continue
        after = {stated[r] for name in node.output for r in readers.get(name, ())}
        before = {paths[makers[name]] for name in node.input if name in makers}
        around = {path for path in after or before if path is not None}
        if around:
            paths[i] = _common(around)
    return paths


def _stated(node: onnx.NodeProto) -> str | None:
    scopes = _scopes(node)
    if scopes is None:
        return None
    return plain_path(scopes[-2]) if len(scopes) > 1 else ""


def _scopes(node: onnx.NodeProto) -> list[str] | None:
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), None)
    if text is None:
        return None
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return [str(scope) for scope in scopes] if isinstance(scopes, list) else None


def _common(paths: set[str]) -> str:
    first, *others = (path.split(".") for path in paths)
    same = 0
    while same < len(first) and all(other[same : same + 1] == first[same : same + 1] for other in others):
        same += 1
    return ".".join(first[:same])


#: Bytes of weights up to which they are written into the model itself; a protobuf message ends at 2 GiB.
_INSIDE = 1_900_000_000
#: Of tensors that go into the other file, the least size in bytes.
_SMALL = 1024
#: What PyTorch writes of the machine that exports.
_DROPPED = ("pkg.torch.onnx.stack_trace",)


def write_onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Path,
    policy: Policy | None,
    *,
    opset: int,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    external_data: bool | None,
) -> Exported:
    """Export a module and write it; see `export`."""
    _need("onnx", "onnxscript")
    proto, changed = _traced(model, args, kwargs, opset, dynamic_shapes, input_names, output_names)
    modules = name_nodes(proto.graph, {path for path, _ in model.named_modules()})
    nodes = {node.name: node for node in proto.graph.node}
    carried, notes = translate(policy, nodes, modules, by_node=True)
    notes += _about_attention(proto, carried, opset)
    if changed:
        lost = "an ONNX model keeps no state: each run begins with the values that are exported"
        notes.append(warn_state_changes(model, changed, lost))
    pinned = {}
    for name, node in nodes.items():
        _drop(node)
        kernel_names = None if carried is None else pinned_by_rule(carried.kernels, node.op_type, name)
        if kernel_names is not None:
            pinned[name] = kernel_names
            node.metadata_props.add(key=KERNEL_KEY, value=", ".join(kernel_names))
    lock = lock_of(
        model,
        (args, kwargs),
        exporter=f"torch.onnx with onnxscript {metadata.version('onnxscript')}",
        opset=opset,
        weights=onnx_digest(proto.graph) or "",
    )
    if carried is not None:
        proto.metadata_props.add(key=POLICY_KEY, value=carried.dumps("json"))
    proto.metadata_props.add(key=LOCK_KEY, value=lock.to_json())
    size = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    outside = size > _INSIDE if external_data is None else external_data
    with appearing(target) as temporary:
        if outside:
            notes.append(f"weights lie in {_write_beside(proto, temporary, lock.weights)}")
        else:
            temporary.write_bytes(proto.SerializeToString(deterministic=True))
    return Exported(path=target, format="onnx", policy=carried, lock=lock, pinned=pinned, notes=tuple(notes))


def _need(*packages: str) -> None:
    for package in packages:
        if util.find_spec(package) is None:
            raise UnsupportedOperationError(
                f"export to ONNX needs the package {package}, which is not installed. Fix: pip install {package} (part "
                "of xpuruntime[torch]), or export to .pt2, which needs PyTorch alone",
                engine="torch",
            )


def _traced(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opset: int,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    what = f"<{type(model).__qualname__}>"
    with context.thread_policy(None), quiet():
        try:
            program: Any = torch.onnx.export(
                model,
                args,
                kwargs=kwargs or None,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                dynamic_shapes=dynamic_shapes,
                input_names=None if input_names is None else list(input_names),
                output_names=None if output_names is None else list(output_names),
            )
            proto: onnx.ModelProto = program.model_proto
        except Exception as error:
            raise ModelError(f"torch.onnx cannot export {what}: {_reason(error)}. Fix: {_FIX}") from error
    for kind, names, tensors in (
        ("input", input_names, proto.graph.input),
        ("output", output_names, proto.graph.output),
    ):
        if names is not None and len(names) != len(tensors):
            raise InputError(
                f"{what} has {len(tensors)} {kind}s, and {kind}_names has {len(names)}. Fix: name each {kind} once"
            )
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if version != opset:
        raise ModelError(
            f"torch.onnx wrote {what} in opset {version} where {opset} was asked for. Fix: ask for opset={version}, or "
            "upgrade onnxscript"
        )
    return proto, written_state(program.exported_program)


_FIX = "read PyTorch's own error above; torch.export.export(model, args) alone shows whether it can be traced"


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return error_line(error).rstrip(".")


def _about_attention(proto: onnx.ModelProto, policy: Policy | None, opset: int) -> list[str]:
    if policy is None or policy.kernels.attention is None or any(n.op_type == "Attention" for n in proto.graph.node):
        return []
    if opset >= OPSET:
        return ["kernels.attention: the module calls no scaled_dot_product_attention, so that no node is an attention"]
    return [
        f"kernels.attention: opset {opset} has no Attention, which is MatMul, Softmax and MatMul there; use opset=23"
    ]


def _drop(node: onnx.NodeProto) -> None:
    kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key not in _DROPPED]
    del node.metadata_props[:]
    for key, value in kept:
        node.metadata_props.add(key=key, value=value)


def _write_beside(proto: onnx.ModelProto, temporary: Path, digest: str) -> str:
    """Write the weights into another file, whose name is theirs alone: a model that is there keeps its own."""
    import onnx
    from onnx.external_data_helper import set_external_data

    name = f"{temporary.name}.{hashlib.sha256(digest.encode()).hexdigest()[:12]}.data"
    offset = 0
    with (temporary.parent / name).open("wb") as file:
        for tensor in proto.graph.initializer:
            data = tensor.raw_data
            if len(data) < _SMALL:
                continue
            pad = -offset % 4096  # engines map the file
            file.write(b"\0" * pad)
            offset += pad
            set_external_data(tensor, name, offset=offset, length=len(data))
            file.write(data)
            offset += len(data)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
    temporary.write_bytes(proto.SerializeToString(deterministic=True))
    return name
