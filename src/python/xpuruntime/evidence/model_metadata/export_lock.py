# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExportLock`: what a model was exported from, written into its metadata and compared with where it runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import LockError
from xpuruntime.runtime.json_reading import decode_json

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SCHEMA", "ExportLock", "LockedKernel", "digest_tensors", "locked_kernels", "onnx_digest"]

SCHEMA = "xpuruntime.export/1"
#: Kernels that a lock lists, at most.
_MOST = 64


class LockedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that our dispatcher ran for one operation before the export.

    Attributes
    ----------
    op, dtype : str
        Such as ``"matmul"`` and ``"fp32"``.
    kernel : str
        With its configuration, as a policy takes it: ``"cublas.cublasLt@algo=21"``.
    module : str
        Path of the module that asked; empty where no rule depends on it.
    """

    op: str
    dtype: str
    kernel: str
    module: str = ""


class ExportLock(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was exported from.

    Attributes
    ----------
    torch, xpuruntime : str
        Versions.
    exporter : str
        ``"torch.onnx with onnxscript 0.7.2"`` or ``"torch.export"``.
    opset : int
        Of ONNX; 0 for a program of PyTorch.
    weights : str
        ``"sha256:…"`` over name, type, shape and bytes of every weight in the file.
    device : str
        Where the module was, such as ``"cuda:0"``.
    device_name, arch : str
        Such as ``"NVIDIA H200"`` and ``"sm90"``; empty on the CPU.
    kernels : tuple of LockedKernel
        What our dispatcher has run on that device, forward, each once; at most 64.
    """

    torch: str
    xpuruntime: str
    exporter: str
    opset: int
    weights: str
    device: str
    device_name: str = ""
    arch: str = ""
    kernels: tuple[LockedKernel, ...] = ()
    schema: str = SCHEMA

    def to_json(self) -> str:
        """Return it as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str, where: str) -> ExportLock:
        """Read what `to_json` wrote; `where` names the model in messages.

        Raises
        ------
        LockError
            It is damaged, or of another release.
        """
        try:
            lock = decode_json(text, cls)
        except msgspec.MsgspecError as error:
            raise LockError(f"the lock in {where!r} cannot be read: {error}. Fix: export the model again") from None
        if lock.schema != SCHEMA:
            msg = f"the lock in {where!r} has schema {lock.schema!r}, and this release reads {SCHEMA!r}"
            raise LockError(f"{msg}. Fix: export the model again, or use the release that wrote it")
        return lock


def locked_kernels(decisions: Iterable[Any], device: str) -> tuple[LockedKernel, ...]:
    """Return the kernels of decisions that were made on a device outside of any backward, each once.

    Parameters
    ----------
    decisions : iterable of Decision
    device : str
        Concrete, such as ``"cuda:0"``.
    """
    found: dict[LockedKernel, None] = {}
    for one in decisions:
        if one.count and one.device == device and one.phase != "backward":
            found.setdefault(LockedKernel(op=one.op, dtype=one.dtype, kernel=one.kernel, module=one.module))
    return tuple(found)[:_MOST]


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
