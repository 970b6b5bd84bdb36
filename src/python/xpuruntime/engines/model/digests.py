# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Digests of the parts of an ONNX model: its graph without the values of weights, and these values."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.model.file import parse, read
from xpuruntime.engines.model.graph import tensors
from xpuruntime.errors import ModelError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of

if TYPE_CHECKING:
    from xpuruntime.engines.model.info import ModelInfo

__all__ = [
    "external_digests",
    "model_digest",
    "part_digests",
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
    for location, found in external_digests(info).items():
        digest.update(f"{location}\0{found}\0".encode())
    return digest.hexdigest()


def external_digests(info: ModelInfo) -> dict[str, str]:
    """Return file of external data to its SHA-256, in hex. Raises as `model_digest`."""
    digests = {}
    for file in sorted(info.external_files, key=lambda one: one.location):
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
