# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorRtSettings`: what the plan decided, in TensorRT's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.settings import EngineSettings

__all__ = ["Profile", "TensorRtSettings"]

#: Least, best and largest shape of one input.
Profile = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class TensorRtSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` and `compile` hand to TensorRT."""

    targets: tuple[str, ...] = ()
    convert: Literal["fp16", "bf16"] | None = None
    quantise: bool = False
    keep_fp32: tuple[str, ...] = ()
    tf32: bool = True
    profiles: Mapping[str, Profile] = {}
    workspace: int | None = None
    options: Mapping[str, str] = {}
    graph: Literal["off", "prefer", "require"] = "off"
    pool: Literal["engine", "direct", "caching", "driver"] = "engine"
    pool_limit: int | None = None
    strict: bool = False
