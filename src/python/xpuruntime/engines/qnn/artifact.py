# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model compiled for one chip: an ONNX file with one node a partition, a context binary beside it, and the units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.compiled import Compiled
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.qnn.recorded_units import write_units
from xpuruntime.engines.qnn.worker import SessionWorker, WorkerFailed
from xpuruntime.errors import EngineError
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.qnn.settings import QnnSettings

__all__ = ["compile_model"]

_MODEL = "model.onnx"


def compile_model(request: Request, settings: QnnSettings, folder: Path) -> Compiled:
    """Write the compiled model into `folder`, in a process of its own: any chip may be named, whatever runs here.

    Raises
    ------
    XpuRuntimeError
        QNN does not take the model; the nodes and the reasons are named.
    """
    from xpuruntime.engines.qnn.loading import opening_of, refused, source_of, without_layer_fusions
    from xpuruntime.engines.qnn.observing import instrumented, read_records, units_of

    if settings.uncompilable is not None:
        fix = "load the model itself, or compile it without that"
        raise EngineError(settings.uncompilable, fix=fix, engine="qnn", device=request.device)
    log = ConversionLog()
    source = source_of(request, settings, log)
    opening = opening_of(settings, source)

    def compiled() -> Any:
        with ScratchFolder("qnn") as place:
            worker = SessionWorker()
            try:
                worker.compile(source.model, instrumented(opening, Path(place), compiling=True), str(folder / _MODEL))
            except WorkerFailed as error:
                worker.close()
                raise refused(error, source, opening, settings) from None
            finally:
                worker.close()
            return read_records(Path(place))

    recorded = without_layer_fusions(compiled, source, opening, log)
    units, notes, _ = units_of(request, source, recorded, ())
    write_units(folder, units)
    others = sorted(path.name for path in folder.iterdir() if path.name != _MODEL)
    node_map = {unit.id: unit.source_nodes for unit in units if unit.source_nodes}
    return Compiled(files=(_MODEL, *others), node_map=node_map, notes=(*log.notes(), *notes))
