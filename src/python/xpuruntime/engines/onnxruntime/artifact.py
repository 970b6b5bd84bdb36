# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Side files of ONNX Runtime's compiled model, read back: the source graph, and what was quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model_source import ModelSource
from xpuruntime.errors import ModelError
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact

__all__ = ["QUANTISED", "SOURCE", "artifact_source", "source_graph"]

#: The graph before any optimiser saw it, without its weights: evidence is joined to it.
SOURCE = "source.onnx"
#: What was quantised, where it was quantised here.
QUANTISED = "quantised.json"


def artifact_source(artifact: Artifact, label: str) -> ModelSource:
    """Return the compiled model as ONNX Runtime opens it."""
    quantised = None
    if QUANTISED in artifact.manifest.files:
        from xpuruntime.engines.quantisation import QuantisedModel

        try:
            told = decode_json((artifact.folder / QUANTISED).read_bytes(), QuantisedModel)
            data = (artifact.folder / SOURCE).read_bytes()
        except (OSError, msgspec.MsgspecError) as error:
            msg = f"the artifact {artifact.folder} cannot be read: {error}. Fix: compile the model again"
            raise ModelError(msg) from None
        quantised = msgspec.structs.replace(told, data=data)
    return ModelSource(str(artifact.entry), None, label, quantised=quantised)


def source_graph(artifact: Artifact) -> Any:
    """Return the graph that an artifact was compiled from, without its weights."""
    import onnx
    from google.protobuf.message import DecodeError

    path = artifact.folder / SOURCE
    try:
        return onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError, ValueError) as error:
        msg = f"the graph {path} of the artifact cannot be read: {error}. Fix: compile the model again"
        raise ModelError(msg) from None
