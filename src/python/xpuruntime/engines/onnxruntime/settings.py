# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OnnxRuntimeSettings`: what the plan decided, in ONNX Runtime's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.settings import EngineSettings

__all__ = ["OnnxRuntimeSettings", "uncompilable"]

#: Options that belong to one session and not to a copy of it.
_PRIVATE = (
    "user_compute_stream",
    "has_user_compute_stream",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "enable_cuda_graph",
)


class OnnxRuntimeSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to ONNX Runtime."""

    provider: str
    options: Mapping[str, str] = {}
    session: Mapping[str, str] = {}
    level: Literal["disable", "basic", "extended", "layout", "all"] = "all"
    level_stated: bool = False
    threads: int | None = None
    inter_threads: int | None = None
    operator_libraries: tuple[str, ...] = ()
    deterministic: bool = False
    convert: Literal["fp16", "bf16"] | None = None
    qdq: Literal["ort-cpu", "ort-cuda"] | None = None
    keep_fp32: tuple[str, ...] = ()
    allow_cpu_ops: tuple[str, ...] = ()
    pool: str = "engine"
    pool_limit: int | None = None
    graph: str = "off"
    strict: bool = False
    capability: tuple[int, int] | None = None
    rewrites: Mapping[str, str] = {}
    left: Mapping[str, str] = {}
    tune: bool = False

    @property
    def arch(self) -> str | None:
        """The architecture of the CUDA device as a policy names it, such as ``"sm90"``."""
        return None if self.capability is None else "sm{}{}".format(*self.capability)

    def public(self) -> OnnxRuntimeSettings:
        """Return the settings for a session beside the one they were made for: without its stream, pool and graph."""
        options = {key: value for key, value in self.options.items() if key not in _PRIVATE}
        return self.replace(options=options, pool="engine", pool_limit=None, graph="off")

    def with_options(self, options: Mapping[str, str]) -> OnnxRuntimeSettings:
        """Return the same settings with these provider options, which replace others of the same names."""
        return self.replace(options={**self.options, **options})

    def with_session(self, entries: Mapping[str, str]) -> OnnxRuntimeSettings:
        """Return the same settings with these session entries, which replace others of the same names."""
        return self.replace(session={**self.session, **entries})


def uncompilable(settings: OnnxRuntimeSettings) -> str | None:
    """Return why a session of these settings cannot be compiled, or ``None``."""
    if settings.provider not in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        return (
            f"{settings.provider} compiles parts of the graph itself, and ONNX Runtime writes no such graph to a file"
        )
    if not settings.rewrites and not settings.tune:
        return None
    return (
        "operators of the model become xpuruntime kernels, whose rules are kept by the process and not in a file, so "
        "ONNX Runtime's compiled graph would not have them"
    )
