# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime with something planted around each run: a leak, a delay, another result, a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from disguised_engine import DisguisedEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.runtime.machine import Machine

    Run = Callable[[Any], dict[str, Any]]


class PlantedEngine(DisguisedEngine):
    """Calls ``around(run, feeds)`` in place of ``run(feeds)``; `opening` is called before each load."""

    name: ClassVar[str] = "planted"

    def __init__(
        self, around: Callable[[Run, Any], dict[str, Any]], opening: Callable[[], None] = lambda: None
    ) -> None:
        self.around, self.opening = around, opening

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        self.opening()
        loaded = super().load(request, judgement, machine)
        run = loaded.run

        def planted(feeds: Any, stream: Any = None) -> dict[str, Any]:
            return self.around(lambda feed: run(feed, stream), feeds)

        loaded.run = planted  # type: ignore[method-assign]
        loaded.runner = lambda: planted  # type: ignore[method-assign]
        return loaded
