# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`name_nodes`: nodes of an exported graph by the paths of the modules that they come from."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from xpuruntime.evidence.model_metadata.policy import RESULT_KEY
from xpuruntime.pytorch.exporter.policy_metadata import plain_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import onnx

__all__ = ["name_nodes"]

#: Where PyTorch's exporter writes the modules around an operator, outermost first, and the operator last.
_SCOPES = "pkg.torch.onnx.name_scopes"
#: Operators that the exporter folds a batch normalisation into.
_FOLDING = ("Conv", "ConvTranspose", "Gemm")


def name_nodes(graph: onnx.GraphProto, modules: Collection[str]) -> set[str]:
    """Name every node ``"<path of the module>/<operator>"``, in place; return the paths.

    A second node of the same name is ``"layers.0.attn.qkv/Add_1"``. A node that the exporter says nothing of, such as
    one that it added, belongs to the innermost module that has all of the nodes around it. A normalisation that the
    exporter has folded into the product before it leaves a node of the product, whose result is that of the
    normalisation: the node says so.
    """
    paths = _paths(graph)
    counts: dict[str, int] = {}
    found: set[str] = set()
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
            found.add(path)
    return found


def _folded_into(node: onnx.NodeProto, modules: Collection[str]) -> str | None:
    """Return the module of a product that a normalisation was folded into: the one that has its weight."""
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
    found = list(stated)
    for i, node in enumerate(graph.node):
        if stated[i] is not None:
            continue
        after = {stated[r] for name in node.output for r in readers.get(name, ())}
        before = {found[makers[name]] for name in node.input if name in makers}
        around = {path for path in after or before if path is not None}
        if around:
            found[i] = _common(around)
    return found


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
    """Return the path of the innermost module that has all of these inside."""
    first, *others = (path.split(".") for path in paths)
    same = 0
    while same < len(first) and all(other[same : same + 1] == first[same : same + 1] for other in others):
        same += 1
    return ".".join(first[:same])
