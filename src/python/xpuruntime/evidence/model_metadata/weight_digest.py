# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Digests of weights: the same for the same names, types, shapes and bytes, in whatever order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["digest_tensors", "onnx_digest"]


def digest_tensors(tensors: Iterable[tuple[str, str, Iterable[int], Any]]) -> str:
    """Return one digest of tensors, given as name, type, shape and bytes; their order does not matter."""
    whole = hashlib.sha256()
    for name, kind, shape, data in sorted(tensors, key=lambda one: one[0]):
        whole.update(f"{name}\0{kind}\0{tuple(shape)}\0".encode())
        whole.update(hashlib.sha256(data).digest())
    return f"sha256:{whole.hexdigest()}"


def onnx_digest(graph: Any) -> str | None:
    """Return the digest of the weights of an ``onnx.GraphProto``; ``None`` where some lie in other files."""
    external = 1  # TensorProto.EXTERNAL
    parts = []
    for tensor in graph.initializer:
        if tensor.data_location == external:
            return None
        data = tensor.raw_data if tensor.HasField("raw_data") else tensor.SerializeToString(deterministic=True)
        parts.append((tensor.name, str(tensor.data_type), tuple(tensor.dims), data))
    return digest_tensors(parts)
