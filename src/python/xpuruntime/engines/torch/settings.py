# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TorchSettings`: what the plan decided, in PyTorch's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.settings import EngineSettings

__all__ = ["TorchSettings"]


class TorchSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to PyTorch."""

    mode: Literal["eager", "compile"] = "eager"
    compile: Mapping[str, str] = {}
    convert: Literal["fp16", "bf16"] | None = None
    tf32: bool | None = None
    deterministic: bool = False
    threads: int | None = None
    graph: Literal["off", "prefer", "require"] = "off"
    strict: bool = False
