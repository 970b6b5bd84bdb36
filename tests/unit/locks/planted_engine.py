# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime with something planted around each run: a leak, a delay, another result, a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.registry import EngineRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.runtime.machine import EngineFacts, Machine

    Run = Callable[[Any], dict[str, Any]]


class PlantedEngine(OnnxRuntimeEngine):
    """Calls ``around(run, feeds)`` in place of ``run(feeds)``; `opening` is called before each load."""

    name: ClassVar[str] = "planted"
    aliases: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, around: Callable[[Run, Any], dict[str, Any]], opening: Callable[[], None] = lambda: None
    ) -> None:
        self.around, self.opening = around, opening

    def registry(self) -> EngineRegistry:
        registry = EngineRegistry()
        registry.register(self)
        return registry

    def probe(self) -> EngineFacts:
        return msgspec.structs.replace(super().probe(), name=self.name)

    def judge(self, request: Request, machine: Machine) -> Judgement:
        facts = {"onnxruntime": machine.engines[self.name]}
        return OnnxRuntimeEngine().judge(request, msgspec.structs.replace(machine, engines=facts))

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        self.opening()
        loaded = super().load(request, judgement, machine)
        run = loaded.run

        def planted(feeds: Any, stream: Any = None) -> dict[str, Any]:
            return self.around(lambda given: run(given, stream), feeds)

        loaded.run = planted  # type: ignore[method-assign]
        loaded.runner = lambda: planted  # type: ignore[method-assign]
        return loaded
