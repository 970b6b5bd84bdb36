# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Read-back of ONNX Runtime: provider options as it holds them, and the attention kernels it ran."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.shapes import read_shapes
from xpuruntime.engines.onnxruntime.options import INTER_THREADS, NAMES, OPERATOR_LIBRARIES
from xpuruntime.runtime.libraries.identity import operator_library
from xpuruntime.runtime.libraries.loading import mapped_paths

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from xpuruntime.engines.base import Observed, Request
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings

__all__ = ["attention_kernels", "read_back"]

_DEBUG = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
_LINE = re.compile(r"Operator=(?P<op>\S+) Node=(?P<node>.*?) DataType=(?P<dtype>\S+) SdpaKernel=(?P<kernel>[A-Z0-9_]+)")
_OURS = re.compile(r"SdpaKernel=|AttentionKernelOptions:|flash=\d, lean=|Unfused kernel cannot be disabled|^\x1b\[0m$")
_OPS = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention")
#: ONNX Runtime's word to the families of the policy.
_FAMILY = {
    "FLASH_ATTENTION": "flash_v2",
    "EFFICIENT_ATTENTION": "efficient",
    "TRT_FUSED_ATTENTION": "trt_fused",
    "CUDNN_FLASH_ATTENTION": "cudnn",
    "MATH": "math",
    "LEAN_ATTENTION": "lean",
    "TRT_FLASH_ATTENTION": "trt_flash",
    "TRT_CROSS_ATTENTION": "trt_cross",
    "TRT_CAUSAL_ATTENTION": "trt_causal",
    "DECODER_ATTENTION": "decoder",
}
#: Provider option to the policy key it realises.
_KEYS = {
    "use_tf32": "execution.tf32",
    "prefer_nhwc": "execution.layout",
    "cudnn_conv_algo_search": "kernels.conv",
    "gpu_mem_limit": "execution.memory.limit",
}


def read_back(
    session: Any, settings: OnnxRuntimeSettings, shapes: Mapping[str, tuple[int | str, ...]] | None = None
) -> dict[str, str]:
    """Return policy key to ``option=value`` as the open session holds it, where it can be read.

    `shapes` are those that the policy states.
    """
    options = session.get_provider_options().get(settings.provider, {})
    found = {key: f"{name}={options[name]}" for name, key in _KEYS.items() if name in options}
    for name in settings.options:
        if name in options and name not in _KEYS:
            found[f"execution.provider_options.onnxruntime.{name}"] = str(options[name])
    for name, value in settings.session.items():
        try:
            found[f"execution.provider_options.onnxruntime.{name}"] = str(
                session.get_session_options().get_session_config_entry(name)
            )
        except Exception:  # an entry that was never set raises; then it was not taken
            found[f"execution.provider_options.onnxruntime.{name}"] = f"not set (asked {value})"
    held = session.get_session_options()
    if settings.inter_threads is not None:
        side_by_side = held.execution_mode.name == "ORT_PARALLEL"
        found[f"execution.provider_options.onnxruntime.{INTER_THREADS}"] = (
            str(held.inter_op_num_threads) if side_by_side else f"{held.inter_op_num_threads}, and sequential"
        )
    if settings.operator_libraries:
        mapped = {os.path.realpath(path) for path in mapped_paths()}
        files = [operator_library(stated) for stated in settings.operator_libraries]
        lost = [
            stated
            for stated, path in zip(settings.operator_libraries, files, strict=True)
            if path is None or os.path.realpath(path) not in mapped
        ]
        found[f"execution.provider_options.onnxruntime.{OPERATOR_LIBRARIES}"] = (
            f"not loaded: {', '.join(lost)}" if lost else ",".join(settings.operator_libraries)
        )
    threads = held.intra_op_num_threads
    if threads:
        found["execution.threads"] = f"intra_op_num_threads={threads}"
    seen = {tensor.name: tensor.shape for tensor in session.get_inputs() if isinstance(tensor.shape, list)}
    found.update(read_shapes(shapes or {}, seen))
    head = "execution.provider_options."
    for key in [key for key in found if key.startswith(head)]:
        for alias in NAMES[1:]:
            found[f"{head}{alias}.{key.removeprefix(f'{head}{NAMES[0]}.')}"] = found[key]
    return found


class _Kernels:
    """Captures the lines ONNX Runtime prints about attention kernels while the block runs."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._file: Any = None
        self._saved = -1
        self._before: str | None = None
        self.seen: dict[str, str] = {}

    def __enter__(self) -> _Kernels:
        if self._active:
            self._before = os.environ.get(_DEBUG)
            os.environ[_DEBUG] = "1"
            self._file = tempfile.TemporaryFile()
            sys.stdout.flush()
            self._saved = os.dup(1)
            os.dup2(self._file.fileno(), 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        sys.stdout.flush()
        os.dup2(self._saved, 1)
        os.close(self._saved)
        if self._before is None:
            os.environ.pop(_DEBUG, None)
        else:
            os.environ[_DEBUG] = self._before
        self._file.seek(0)
        text = self._file.read().decode(errors="replace")
        self._file.close()
        for match in _LINE.finditer(text):
            self.seen[match["node"]] = match["kernel"]
        others = "".join(line for line in text.splitlines(keepends=True) if not _OURS.search(line))
        if others:
            os.write(1, others.encode())

    def attach(self, observed: Observed, effective: dict[str, str]) -> Observed:
        """Return `observed` with the kernels seen, and with `effective` under what was observed from the units."""
        units = tuple(
            msgspec.structs.replace(
                unit, kernel=_FAMILY.get(self.seen[unit.id], self.seen[unit.id].lower()), kernel_source="reported"
            )
            if unit.id in self.seen
            else unit
            for unit in observed.units
        )
        merged = {**effective, **observed.effective}
        if self.seen:
            families = sorted({_FAMILY.get(kernel, kernel.lower()) for kernel in self.seen.values()})
            merged["kernels.attention"] = ", ".join(families)
        return msgspec.structs.replace(observed, units=units, effective=merged)


def attention_kernels(request: Request) -> _Kernels:
    """Return a context manager that catches which attention kernels run; idle where there are none to catch.

    ONNX Runtime prints them to standard output; what others print meanwhile is passed on when the block ends.
    """
    cuda = request.device.startswith("cuda")
    present = any(op.rpartition(":")[2] in _OPS for op in request.model.ops)
    return _Kernels(active=cuda and present)
