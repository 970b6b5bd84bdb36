# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A compiled engine on disk: the plan file and xpuruntime's record of it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.compiled import Compiled
from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.tensorrt.building import build
from xpuruntime.engines.tensorrt.messages import logger
from xpuruntime.engines.tensorrt.probing import bindings
from xpuruntime.errors import EngineError, ModelError, UnsupportedOperationError
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.tensorrt.building import Built
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.engines.tensorrt.settings import TensorRtSettings

__all__ = ["PLAN", "RECORD", "Record", "malformed", "read_artifact", "write_artifact"]

PLAN, RECORD = "engine.plan", "record.json"
SCHEMA = "xpuruntime.tensorrt/1"
_AGAIN = "compile the model again: xrt compile MODEL -o FOLDER"
#: `EngineInvalidityDiagnostics.MALFORMED_ENGINE`: found in the header alone, also without a GPU.
_MALFORMED = "MALFORMED_ENGINE"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan was made from; the plan itself says none of it."""

    target: dict[str, str]
    flags: dict[str, str]
    layers: dict[str, tuple[str, ...]]
    regions: dict[str, tuple[str, ...]] = {}
    size: int
    sha256: str
    schema: str = SCHEMA

    @classmethod
    def of(cls, built: Built, target: dict[str, str]) -> Record:
        """Return the record of what was built."""
        digest = hashlib.sha256(built.plan).hexdigest()
        size = len(built.plan)
        return cls(
            target=target, flags=built.flags, layers=built.layers, regions=built.regions, size=size, sha256=digest
        )

    def nodes(self, model: ModelInfo) -> dict[str, tuple[str, ...]]:
        """Return every node that the parser may have seen, with the source nodes that it stands for."""
        return {**{node.name: (node.name,) for node in model.nodes}, **self.regions}


class SerializedEngine(NamedTuple):
    """A plan and its record."""

    plan: bytes
    record: Record


def write_artifact(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], folder: Path
) -> Compiled:
    """Build an engine and write it into `folder`, and read it back."""
    if settings.options.get("strip_plan") == "1":
        msg = "strip_plan leaves the weights out, and an artifact has to have them; leave the option out to compile"
        raise UnsupportedOperationError(msg, engine=product.name, device=request.device)
    log = ConversionLog()
    built = build(request, settings, product, target, log)
    record = Record.of(built, target)
    (folder / PLAN).write_bytes(built.plan)
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    _read(folder, product)
    return Compiled(files=(PLAN, RECORD), node_map=built.layers, notes=log.notes())


def read_artifact(artifact: Artifact, product: TensorRtProduct, target: dict[str, str]) -> SerializedEngine:
    """Read a compiled engine and check it against its record and against what is here."""
    ready = _read(artifact.folder, product)
    made = ready.record.target
    differences = [
        f"{key} {made.get(key)}, and here is {target.get(key)}"
        for key in sorted({*made, *target})
        if made.get(key) != target.get(key)
    ]
    if differences:
        msg = f"the engine in {artifact.folder} was made for {'; for '.join(differences)}. Fix: {_AGAIN}"
        raise EngineError(msg, engine=product.name)
    return ready


def _read(folder: Path, product: TensorRtProduct) -> SerializedEngine:
    def damaged(why: str) -> ModelError:
        return ModelError(f"the engine in {folder} cannot be used: {why}. Fix: {_AGAIN}", engine=product.name)

    try:
        record = decode_json((folder / RECORD).read_bytes(), Record)
        plan = (folder / PLAN).read_bytes()
    except OSError as error:
        raise damaged(f"{error.filename} cannot be read ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise damaged(f"{RECORD} is damaged ({error})") from None
    if record.schema != SCHEMA:
        raise damaged(f"its record has the schema {record.schema}, and this version reads {SCHEMA}")
    if len(plan) != record.size:
        raise damaged(f"{PLAN} has {len(plan)} bytes, and its record says {record.size}")
    if hashlib.sha256(plan).hexdigest() != record.sha256:
        raise damaged(f"{PLAN} was changed after it was written")
    why = malformed(bindings(product), plan)
    if why is not None:
        raise damaged(why)
    return SerializedEngine(plan, record)


def malformed(trt: Any, plan: bytes) -> str | None:
    """Return why the vendor does not take these bytes for a plan at all; ``None`` where it does, or cannot say.

    Everything else that it could say needs a GPU, and is said when the engine is loaded.
    """
    if not hasattr(trt.Runtime, "get_engine_validity"):
        return None
    runtime = trt.Runtime(logger(trt))
    size = int(runtime.engine_header_size)
    if len(plan) < size:
        return f"{PLAN} is shorter than the header of a plan"
    _, diagnostics = runtime.get_engine_validity(plan[:size])
    bit = int(getattr(trt.EngineInvalidityDiagnostics, _MALFORMED))
    return f"the vendor does not take {PLAN} for a plan" if int(diagnostics) & bit else None
