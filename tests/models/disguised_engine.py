# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DisguisedEngine`: ONNX Runtime under the name of another engine, for tests that change what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.registry import EngineRegistry

if TYPE_CHECKING:
    from xpuruntime.engines.base import Judgement, Request
    from xpuruntime.runtime.machine import EngineFacts, Machine

__all__ = ["DisguisedEngine"]


class DisguisedEngine(OnnxRuntimeEngine):
    """ONNX Runtime whose `name` is that of a derived class."""

    aliases: ClassVar[tuple[str, ...]] = ()

    def registry(self) -> EngineRegistry:
        registry = EngineRegistry()
        registry.register(self)
        return registry

    def probe(self) -> EngineFacts:
        return msgspec.structs.replace(super().probe(), name=self.name)

    def judge(self, request: Request, machine: Machine) -> Judgement:
        facts = {"onnxruntime": machine.engines[self.name]}
        return OnnxRuntimeEngine().judge(request, msgspec.structs.replace(machine, engines=facts))
