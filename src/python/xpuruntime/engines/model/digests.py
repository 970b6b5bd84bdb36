# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Digests of the parts of an ONNX model, its graph and the values of weights apart, and limits on what it may state."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.model.file import parse, read, refuse
from xpuruntime.engines.model.graph import graphs, normal_domain, set_node_names, subgraphs, tensors
from xpuruntime.errors import ModelError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import onnx

    from xpuruntime.engines.model.info import ModelInfo

__all__ = [
    "MAX_DIMS",
    "MAX_ELEMENTS",
    "MAX_NODES",
    "check_limits",
    "element_count",
    "external_digests",
    "inline_functions",
    "model_digest",
    "part_digests",
    "shown_dims",
]

#: Fields of a TensorProto that hold values.
_VALUES = (
    "raw_data", "float_data", "int32_data", "int64_data", "uint64_data", "double_data", "string_data",
)  # fmt: skip


def part_digests(info: ModelInfo) -> tuple[str, str]:
    """Return the SHA-256 of the graph and of the initializers, in hex; two empty texts where it is no ONNX model.

    The graph is nodes, shapes, opsets and functions, with names, types and shapes of initializers but not their values;
    metadata and documentation are left out.
    """
    if info.format != "onnx":
        return "", ""
    if info.data is not None:
        return _digests(info.data, info.path)
    return _of_file(info.file, info.sha256)


@functools.lru_cache(maxsize=64)
def _of_file(path: str, sha256: str) -> tuple[str, str]:
    del sha256
    return _digests(read(path)[1], path)


def _digests(data: bytes, where: str) -> tuple[str, str]:
    proto = parse(data, where)
    values = hashlib.sha256()
    for tensor in tensors(proto):
        values.update(f"{tensor.name}\0{tensor.data_type}\0{tuple(tensor.dims)}\0".encode())
        if tensor.HasField("raw_data"):
            values.update(tensor.raw_data)
        else:
            values.update(tensor.SerializeToString(deterministic=True))
        for name in _VALUES:
            tensor.ClearField(name)
    del proto.metadata_props[:]
    for name in ("doc_string", "producer_name", "producer_version"):
        proto.ClearField(name)
    graph = hashlib.sha256(proto.SerializeToString(deterministic=True))
    return graph.hexdigest(), values.hexdigest()


def model_digest(info: ModelInfo) -> str:
    """Return the SHA-256, in hex, of a model file with its external data."""
    if not info.external_files:
        return info.sha256
    digest = hashlib.sha256(info.sha256.encode())
    for location, external_digest in external_digests(info).items():
        digest.update(f"{location}\0{external_digest}\0".encode())
    return digest.hexdigest()


def external_digests(info: ModelInfo) -> dict[str, str]:
    """Return file of external data to its SHA-256, in hex. Raises as `model_digest`."""
    digests = {}
    for file in sorted(info.external_files, key=lambda file_: file_.location):
        path = Path(info.base_dir or ".") / file.location
        try:
            facts = path.stat()
            digests[file.location] = _remembered(str(path), facts.st_size, facts.st_mtime_ns)
        except OSError as error:
            msg = f"cannot use the model {info.path!r}: its data {file.location!r} cannot be read ({reason_of(error)})"
            raise ModelError(f"{msg}. Fix: put the file back beside the model.") from None
    return digests


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, mtime_ns: int) -> str:
    """Return the digest of a file that had this size and time."""
    del size, mtime_ns
    return file_digest(path)


#: Dimensions of one tensor.
MAX_DIMS = 1024
#: Elements of one tensor: their bits are counted in 64-bit integers everywhere.
MAX_ELEMENTS = 1 << 55
#: Nodes of a model, with model-local functions written out.
MAX_NODES = 1_000_000

_FIX = "export the model again, or correct the program that writes it"


def element_count(dims: Sequence[int]) -> int:
    """Return the product of some sizes, and ``MAX_ELEMENTS + 1`` for a larger one: the work is bounded."""
    if any(dim == 0 for dim in dims):
        return 0
    count = 1
    for dim in dims:
        count *= dim
        if count > MAX_ELEMENTS or count < 0:
            return MAX_ELEMENTS + 1
    return count


def shown_dims(dims: Sequence[int]) -> str:
    """Return sizes for a message: the first eight."""
    return f"[{', '.join(map(str, dims[:8]))}{', ...' if len(dims) > 8 else ''}]"


def check_limits(model: onnx.ModelProto, where: str) -> None:
    """Refuse a model that states more than can be meant, in time linear in its size."""
    for tensor in tensors(model):
        dims = tensor.dims
        if len(dims) > MAX_DIMS:
            raise refuse(
                where, f"tensor {tensor.name!r} has {len(dims):,} dimensions, and at most {MAX_DIMS:,} are read", _FIX
            )
        negative = next((dim for dim in dims if dim < 0), None)
        if negative is not None:
            raise refuse(where, f"tensor {tensor.name!r} has the size {negative} in {shown_dims(dims)}", _FIX)
        if element_count(dims) > MAX_ELEMENTS:
            raise refuse(
                where, f"tensor {tensor.name!r} of shape {shown_dims(dims)} has more than 2**55 elements", _FIX
            )
    for graph in graphs(model):
        for value in (*graph.input, *graph.output):
            rank = len(value.type.tensor_type.shape.dim)
            if rank > MAX_DIMS:
                raise refuse(where, f"{value.name!r} has {rank:,} dimensions, and at most {MAX_DIMS:,} are read", _FIX)
    _check_nodes(model, where)


def inline_functions(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return the model with its model-local functions written out, and each node named."""
    import onnx
    from onnx.inliner import inline_local_functions

    try:
        inlined = inline_local_functions(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise refuse(where, f"its model-local functions cannot be written out: {reason}", _FIX) from None
    set_node_names(inlined)
    return inlined


def _check_nodes(model: onnx.ModelProto, where: str) -> None:
    nodes = [node for graph in graphs(model) for node in graph.node]
    if len(nodes) > MAX_NODES:
        raise refuse(where, f"it has {len(nodes):,} nodes, and at most {MAX_NODES:,} are read", "split the model")
    if not model.functions:
        return
    bodies = {(normal_domain(f.domain), f.name): list(_all_nodes(f.node)) for f in model.functions}
    sizes = _expanded(bodies, where)
    total = sum(sizes.get((normal_domain(node.domain), node.op_type), 1) for node in nodes)
    if total > MAX_NODES:
        raise refuse(
            where,
            f"its model-local functions stand for {_amount(total)} nodes, and at most {MAX_NODES:,} are read",
            "export it with smaller functions",
        )


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(inner for _, graph in subgraphs(node) for inner in graph.node)


def _expanded(bodies: Mapping[tuple[str, str], Sequence[onnx.NodeProto]], where: str) -> dict[tuple[str, str], int]:
    """Return the nodes that each function stands for, at most ``MAX_NODES + 1``."""
    calls = {
        name: [key for node in body if (key := (normal_domain(node.domain), node.op_type)) in bodies]
        for name, body in bodies.items()
    }
    sizes: dict[tuple[str, str], int] = {}
    entered: set[tuple[str, str]] = set()
    for root in bodies:
        waiting = [root]
        while waiting:
            name = waiting[-1]
            if name in sizes:
                waiting.pop()
            elif name not in entered:
                entered.add(name)
                for called in set(calls[name]):
                    if called in entered and called not in sizes:
                        raise refuse(where, f"its model-local function {called[1]!r} calls itself", _FIX)
                    waiting.append(called)
            else:
                plain = len(bodies[name]) - len(calls[name])
                sizes[name] = min(plain + sum(sizes[called] for called in calls[name]), MAX_NODES + 1)
                waiting.pop()
    return sizes


def _amount(total: int) -> str:
    return f"{total:,}" if total <= 1000 * MAX_NODES else "far too many"
