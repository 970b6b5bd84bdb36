# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`decoder_of`: the decoder of a folder as an ONNX graph of its own, run without the engine and without a past."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.info import inspect_model
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.base import Binding, LoadedModel
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.engines.onnxruntime_genai.folder import GenAiFolder

__all__ = ["decoder_of"]


def decoder_of(model: ModelInfo) -> tuple[ModelInfo, Callable[[LoadedModel], LoadedModel]]:
    """Return the decoder of a folder, and what makes of a loaded one a model of tokens and logits.

    It has to itself what the engine prepares in a folder: mask, positions and cache.
    """
    graph = inspect_model(Path(model.file) / str(model.graph_file))
    return graph, lambda loaded: _Decoder(loaded, model, graph)


class _Decoder(HostModel):
    """A decoder that gets all tokens at once, with a cache of length 0."""

    def __init__(self, loaded: LoadedModel, model: ModelInfo, graph: ModelInfo) -> None:
        super().__init__(loaded, model, ["logits"], strict=False, observer=_refused, log=ConversionLog())
        self._folder: GenAiFolder = model.source
        self._graph = graph

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        tokens = ready["tokens"]
        return [
            handle.run({input_.name: self._input(input_, tokens) for input_ in self._graph.inputs})[
                self._folder.logits_name
            ]
        ]

    def _input(self, tensor: TensorInfo, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if tensor.name == self._folder.tokens_name:
            return tokens.astype(tensor.dtype)
        if "mask" in tensor.name:
            return np.ones(tokens.shape, tensor.dtype)
        if "position" in tensor.name:
            return np.arange(tokens.shape[1], dtype=tensor.dtype)[None]
        if len(tensor.shape or ()) != 4:
            msg = f"the decoder has the input {tensor.name!r}, which is not made of tokens alone"
            raise UnsupportedOperationError(msg, fix="leave accuracy and verify.generation out", engine="onnxruntime")
        return np.zeros((1, self._folder.heads, 0, self._folder.head_size), tensor.dtype)

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, Any]) -> NoReturn:
        del handle, tensors
        _refused()

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Refuse."""
        del inputs, outputs, stream
        _refused()

    def close(self) -> None:
        """Release the graph."""
        loaded = self._handle
        super().close()
        if loaded is not None:
            loaded.close()


def _refused(*_: Any) -> NoReturn:
    raise UnsupportedOperationError("a reference is only run", engine="onnxruntime")
