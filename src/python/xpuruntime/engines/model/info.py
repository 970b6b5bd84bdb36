# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelInfo`: what an ONNX model is, read without any engine."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.external import ExternalFile, check_limits
from xpuruntime.engines.model.facts import (
    NodeInfo,
    Quantization,
    TensorInfo,
    quantization,
    random_outputs,
    tensor_info,
    weights,
)
from xpuruntime.engines.model.file import opened, parse, read, refuse
from xpuruntime.engines.model.graph import (
    NamedNode,
    fix_shapes,
    name_nodes,
    normal_domain,
    set_node_names,
    sort_nodes,
    tensors,
)
from xpuruntime.evidence.metadata import KERNEL_KEY, LOCK_KEY, RESULT_KEY, onnx_digest
from xpuruntime.files.digests import LARGE, CacheEntries, file_state, open_file_digest, recall_digest, remembers
from xpuruntime.files.paths import folder_of
from xpuruntime.files.reading import open_regular
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    import onnx

_BYTES = "<bytes>"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An ONNX model that was checked: its facts, not its weights."""

    path: str
    size: int
    mtime_ns: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    overridable_inputs: tuple[TensorInfo, ...] = ()
    nodes: tuple[NodeInfo, ...]
    ops: dict[str, int]
    opsets: dict[str, int]
    custom_domains: dict[str, tuple[str, ...]] = {}
    unknown_ops: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    producer: str = ""
    graph_name: str = ""
    ir_version: int
    functions: tuple[str, ...] = ()
    external_files: tuple[ExternalFile, ...] = ()
    weights: dict[str, int] = {}
    quantization: Quantization = Quantization()
    renamed: tuple[str, ...] = ()
    resorted: bool = False
    fixed: dict[str, tuple[int | None, ...]] = {}
    base_dir: str | None = None
    data: bytes | None = None
    format: str = "onnx"
    source: Any = None
    digest: str | None = None
    metadata: dict[str, str] = {}
    random_outputs: dict[str, str] = {}
    weights_digest: str | None = None
    #: The graph's file where `path` is a folder.
    graph_file: str | None = None
    #: Whether comparing nodes with their schemas is left to the engine that loads the model.
    deferred: bool = False

    def __hash__(self) -> int:
        return hash((self.path, self.size, self.mtime_ns, self.graph_name, len(self.nodes)))

    def __repr__(self) -> str:
        return f"<ModelInfo {self.path!r}: {len(self.nodes)} nodes, {self.size} bytes>"

    @property
    def file(self) -> str:
        """The path to open: `path` in the folder that it was read from; `path` itself when the model is no file."""
        if self.data is not None or self.base_dir is None:
            return self.path
        return self.base_dir if self.graph_file is not None else str(Path(self.base_dir) / Path(self.path).name)

    @property
    def _graph(self) -> str:
        return self.file if self.graph_file is None else str(Path(self.file) / self.graph_file)

    @property
    def has_external_data(self) -> bool:
        """Whether weights lie in other files."""
        return bool(self.external_files)

    @property
    def needs_renaming(self) -> bool:
        """Whether the file as it is differs from `named_proto`: in node names, their order, or sizes of inputs."""
        return bool(self.renamed) or self.resorted or bool(self.fixed)

    @property
    def sha256(self) -> str:
        """SHA-256 of the model file, without external data, in hex. Computed on first use and remembered."""
        if self.digest is not None:
            return self.digest
        if self.data is not None:
            return hashlib.sha256(self.data).hexdigest()
        return _digest(self._graph, self.size, self.mtime_ns)

    def weight_share(self, *dtypes: str) -> float:
        """Return the share (0 to 1) of weight elements that have one of `dtypes`; 0 when there are no weights."""
        total = sum(self.weights.values())
        return sum(self.weights.get(dtype, 0) for dtype in dtypes) / total if total else 0.0

    def named_proto(self) -> onnx.ModelProto:
        """Read the model again, with unique node names, ordered nodes and fixed sizes; external data is not loaded."""
        data = self.data
        if data is None:
            _, data, facts = read(self._graph)
            if (facts.st_size, facts.st_mtime_ns) != (self.size, self.mtime_ns):
                raise refuse(self.path, "the file changed since it was inspected", "open the session again")
        proto = parse(data, self.path)
        if self.resorted:
            sort_nodes(proto.graph)
        set_node_names(proto)
        if self.fixed:
            fix_shapes(proto, self.fixed)
        return proto

    def check_unchanged(self) -> None:
        """Refuse a file that is not the one that was inspected any more."""
        try:
            facts = Path(self._graph).stat()
        except OSError as error:
            raise refuse(self._graph, f"the file cannot be read ({error.strerror})", "put it back") from None
        if (facts.st_size, facts.st_mtime_ns) != (self.size, self.mtime_ns):
            raise refuse(self.path, "the file changed since it was inspected", "open the session again")

    def serialized_named(self) -> bytes:
        """Return `named_proto` as bytes. External data stays where it is, relative to `base_dir`."""
        return bytes(self.named_proto().SerializeToString(deterministic=True))

    def facts(self, *, digest: bool = True) -> dict[str, Any]:
        """Return what a plan or report says about the model, ready for JSON. `digest=False` leaves SHA-256 out."""
        facts: dict[str, Any] = {
            "path": self.path,
            "format": self.format,
            "size": self.size,
            "producer": self.producer,
            "graph": self.graph_name,
            "ir_version": self.ir_version,
            "opsets": {domain or "ai.onnx": version for domain, version in self.opsets.items()},
            "inputs": [msgspec.to_builtins(t) for t in self.inputs],
            "outputs": [msgspec.to_builtins(t) for t in self.outputs],
            "overridable_inputs": [msgspec.to_builtins(t) for t in self.overridable_inputs],
            "node_count": len(self.nodes),
            "ops": dict(self.ops),
            "custom_domains": {domain or "ai.onnx": list(ops) for domain, ops in self.custom_domains.items()},
            "functions": list(self.functions),
            "external_files": [msgspec.to_builtins(f) for f in self.external_files],
            "weights": dict(self.weights),
            "quantization": msgspec.to_builtins(self.quantization),
            "renamed_nodes": len(self.renamed),
            "resorted": self.resorted,
        }
        if digest:
            facts["sha256"] = self.sha256
        return facts


def inspect_model(path: str | os.PathLike[str] | bytes | onnx.ModelProto, *, defer: bool = False) -> ModelInfo:
    """Read an ONNX model, check it, and return its facts; with `defer`, a plain file is `ModelInfo.deferred`."""
    if isinstance(path, (bytes, bytearray, memoryview)) or hasattr(path, "SerializeToString"):
        return inspect_bytes(path)
    with opened(path) as (where, file, facts):
        large = facts.st_size >= LARGE  # hashed for nothing else, it costs more than it saves
        data = None if large else file.read(facts.st_size)
        entry = _entry(recall_digest(facts) if data is None else hashlib.sha256(data).hexdigest())
        info = None if entry is None else _recall(entry)
        if info is not None and (defer or not info.deferred) and not _has_registered(info):
            return msgspec.structs.replace(info, path=where, mtime_ns=facts.st_mtime_ns, base_dir=folder_of(where))
        if data is None:
            data = file.read(facts.st_size)
            if file_state(os.fstat(file.fileno())) != file_state(facts):
                entry = None  # of what it held before
    info = _inspect(where, data, folder_of(where), facts.st_mtime_ns, None, defer=defer)
    if entry is not None and not info.external_files:
        kept = msgspec.structs.replace(info, path="", mtime_ns=0, base_dir=None)
        _INSPECTED.write(entry, msgspec.msgpack.encode(kept))
    return info


#: What checks of models have found, by content. Files beside a model are looked at each time.
_INSPECTED = CacheEntries("models", most=256, largest=1 << 20)


def _entry(digest: str | None) -> str | None:
    """Return the name of the entry for content that the installed versions and this code have checked."""
    if digest is None or not remembers():
        return None
    versions = installed("onnx", "protobuf", "xpuruntime")
    try:
        with os.scandir(os.path.dirname(__file__)) as files:  # noqa: PTH120 - on the way to every session
            code = sorted((file.name, file.stat().st_mtime_ns) for file in files if file.name.endswith(".py"))
    except OSError:
        return None
    return hashlib.sha256(repr((digest, versions, code)).encode()).hexdigest() if "onnx" in versions else None


def _has_registered(info: ModelInfo) -> bool:
    """Whether this process gave onnx a schema for an operator of the model that it has none for, and checks by it."""
    compiled = sys.modules.get("onnx.onnx_cpp2py_export")
    return compiled is not None and any(
        compiled.defs.has_schema(op, max_inclusive_version=info.opsets.get(domain, 1), domain=domain)
        for domain, ops in info.custom_domains.items()
        for op in ops
    )


def _recall(entry: str) -> ModelInfo | None:
    kept = _INSPECTED.read(entry)
    try:
        return None if kept is None else msgspec.msgpack.decode(kept, type=ModelInfo)
    except msgspec.MsgspecError:
        return None


def inspect_bytes(data: bytes | onnx.ModelProto, base_dir: str | os.PathLike[str] | None = None) -> ModelInfo:
    """Check a model held in memory and return its facts; the bytes are kept in `ModelInfo.data`."""
    if hasattr(data, "SerializeToString"):
        kind = getattr(getattr(data, "DESCRIPTOR", None), "full_name", type(data).__name__)
        if kind != "onnx.ModelProto":
            raise refuse(_BYTES, f"it is of the type {kind}", "make a model of it: onnx.helper.make_model(graph)")
        try:
            data = data.SerializeToString()
        except Exception as error:  # protobuf raises different types for the same 2 GiB limit
            raise refuse(_BYTES, f"it cannot be serialized ({error})", "save it with external data") from None
    if not isinstance(data, bytes):
        data = bytes(data)
    folder = None if base_dir is None else str(base_dir)
    return _inspect(_BYTES, data, folder, 0, data)


def inspect_edited(info: ModelInfo, proto: onnx.ModelProto) -> ModelInfo:
    """Check an edited copy of a model, whose external data is where that of the model is; raises as `inspect_bytes`."""
    folder = info.base_dir
    if folder is not None:
        folder = model_external.resolve_links(tensors(proto), folder)
    return inspect_bytes(proto, folder)


def _inspect(
    where: str, data: bytes, folder: str | None, mtime_ns: int, keep: bytes | None, *, defer: bool = False
) -> ModelInfo:
    from xpuruntime.engines.model.check import check_graph, check_text

    proto = parse(data, where)
    size = len(data)
    del data
    check_text(proto, where)
    check_limits(proto, where)
    external = model_external.check(tensors(proto), folder, where)
    elements = weights(proto)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    digest = onnx_digest(proto.graph) if LOCK_KEY in metadata else None
    checked = check_graph(proto, where, defer=defer)  # empties large tensors
    places = name_nodes(proto)
    nodes = tuple(_node(place) for place in places)
    initial = {tensor.name for tensor in proto.graph.initializer}
    initial |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    ops = Counter(f"{node.domain}:{node.op}" if node.domain else node.op for node in nodes)
    # Before IR 4 every initializer is listed as an input, so nothing is meant by it.
    overridable = [v for v in proto.graph.input if v.name in initial] if proto.ir_version >= 4 else []
    return ModelInfo(
        path=where,
        size=size,
        mtime_ns=mtime_ns,
        inputs=tuple(tensor_info(v) for v in proto.graph.input if v.name not in initial),
        outputs=tuple(tensor_info(v) for v in proto.graph.output),
        overridable_inputs=tuple(tensor_info(v) for v in overridable),
        nodes=nodes,
        ops=dict(sorted(ops.items())),
        opsets={normal_domain(o.domain): o.version for o in proto.opset_import},
        custom_domains=checked.custom,
        unknown_ops=checked.unknown,
        notes=checked.notes,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        graph_name=proto.graph.name,
        ir_version=proto.ir_version,
        functions=tuple(sorted(f"{f.domain}:{f.name}" for f in proto.functions)),
        external_files=external,
        weights=elements,
        quantization=quantization(proto),
        renamed=tuple(place.name for place in places if place.renamed),
        resorted=checked.resorted,
        base_dir=folder,
        data=keep,
        metadata=metadata,
        random_outputs=random_outputs(proto, places),
        weights_digest=digest,
        deferred=checked.deferred,
    )


def _node(place: NamedNode) -> NodeInfo:
    node = place.node
    said = {entry.key: entry.value for entry in node.metadata_props}
    return NodeInfo(
        name=place.name,
        op=node.op_type,
        domain=normal_domain(node.domain),
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        graph=place.graph,
        kernels=said.get(KERNEL_KEY, ""),
        result_of=said.get(RESULT_KEY, ""),
    )


@functools.lru_cache(maxsize=64)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Return the SHA-256 of a file, which must still be the one of that size and time."""
    try:
        with open_regular(path) as file:
            digest, facts = open_file_digest(file)
    except OSError as error:
        raise refuse(path, f"the file cannot be read ({error.strerror})", "put it back, or inspect it again") from None
    if (facts.st_size, facts.st_mtime_ns) != (size, mtime_ns):
        raise refuse(path, "the file changed since it was inspected", "inspect it again")
    return digest
