# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An engine that is right but for one node: ONNX Runtime on a graph in which that node's result is shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from disguised_engine import DisguisedEngine

from xpuruntime.engines.model import inspect_bytes
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.runtime.machine import Machine


class FaultEngine(DisguisedEngine):
    """ONNX Runtime with a fault.

    Parameters
    ----------
    node : str
        Its output has a constant added, and its first element more; a name that the model has not plants nothing.
    hidden : callable, optional
        Tensors that it refuses to give as outputs.
    alone : bool
        The fault is there only while the model has its own outputs alone, as a fault of a fusion.
    breaks : exception, optional
        Raised by every run.
    by : float
        What is added.
    """

    name: ClassVar[str] = "fault"

    def __init__(
        self,
        node: str,
        hidden: Callable[[str], bool] = lambda name: False,
        *,
        alone: bool = False,
        breaks: Exception | None = None,
        by: float = 3.0,
    ) -> None:
        self.node, self.hidden, self.alone, self.breaks = node, hidden, alone, breaks
        self.by = by
        self.outputs: tuple[str, ...] | None = None
        self.seen: list[dict[str, Any]] = []

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        names = tuple(output.name for output in request.model.outputs)
        if self.outputs is None:
            self.outputs = names
        more = [name for name in names if name not in self.outputs]
        if any(map(self.hidden, more)):
            raise UnsupportedOperationError("one output is all it gives", engine=self.name)
        if not (more and self.alone):
            request = msgspec.structs.replace(request, model=self._planted(request))
        loaded = super().load(request, judgement, machine)
        run = loaded.run

        def watched(feeds: Any, stream: Any = None) -> dict[str, Any]:
            if self.breaks is not None:
                raise self.breaks
            self.seen.append(dict(feeds))
            return run(feeds, stream)

        loaded.run = watched  # type: ignore[method-assign]
        return loaded

    def _planted(self, request: Request) -> Any:
        import numpy as np
        from onnx import helper, numpy_helper

        proto = request.model.named_proto()
        place = next((i for i, node in enumerate(proto.graph.node) if node.name == self.node), None)
        if place is None:
            return request.model
        node = proto.graph.node[place]
        name = node.output[0]
        node.output[0] = f"{name}.right"
        added = helper.make_node("Add", [f"{name}.right", "fault.by"], [name], name="fault.add")
        proto.graph.node.insert(place + 1, added)
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(self.by), "fault.by"))
        return inspect_bytes(proto, request.model.base_dir)
