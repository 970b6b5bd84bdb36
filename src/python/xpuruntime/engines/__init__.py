# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines: the `Engine` interface, the registry, and one folder of adapters for each vendor."""

from __future__ import annotations

from xpuruntime.engines.base import Binding, Engine, Judgement, LoadedModel, Observed, Request
from xpuruntime.engines.registry import EngineRegistry, default_registry

__all__ = [
    "Binding",
    "Engine",
    "EngineRegistry",
    "Judgement",
    "LoadedModel",
    "Observed",
    "Request",
    "default_registry",
]
