# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders of ONNX Runtime GenAI: their configuration, checked and read, and the decoder as an ONNX graph of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from xpuruntime.engines.generation import TOKENIZER, ConfigFile, GenerationFolder, files_beside
from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.facts import TensorInfo, dtype_name
from xpuruntime.engines.model.file import GENERATION_CONFIG as CONFIG
from xpuruntime.engines.model.info import inspect_model
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from xpuruntime.engines.base import Binding, LoadedModel
    from xpuruntime.engines.model import ModelInfo, TensorInfo

#: Format of such a model, by which the plan finds engines.
FORMAT = "genai"
#: Parts of a configuration that make it more than one decoder.
_OTHER_PARTS = ("encoder", "embedding", "vision", "speech", "encoder_decoder_init", "joiner")
#: Search options of which only one value is run. A prompt is one sequence, and prefilled in chunks it would have only
#: the logits of the last chunk.
_ONLY = {"num_beams": 1, "num_return_sequences": 1, "chunk_size": 0}


class GenAiFolder(GenerationFolder, frozen=True, kw_only=True):
    """What `inspect_folder` read: also options and providers that the configuration states, and forms of weights."""

    tokens_name: str
    logits_name: str
    heads: int
    head_size: int
    session_options: dict[str, Any]
    providers: tuple[dict[str, Any], ...]
    weights: dict[str, int]


def inspect_folder(folder: Path) -> ModelInfo:
    """Read and check the configuration and the decoder of a folder. The model takes token ids and returns logits."""
    file = ConfigFile(folder, CONFIG, "build the folder again: python -m onnxruntime_genai.models.builder")
    model = file.section(file.values, "model")
    decoder = file.section(model, "model.decoder")
    search = file.values.get("search", {})
    options = decoder.get("session_options", {})
    for name, value in (("search", search), ("model.decoder.session_options", options)):
        if not isinstance(value, dict):
            raise file.wrong(name, "an object", value)
    others = [name for name in _OTHER_PARTS if name in model]
    others += [f"decoder.{name}" for name in ("pipeline", "run_options") if decoder.get(name)]
    window = decoder.get("sliding_window")
    if window and not (isinstance(window, dict) and window.get("slide_key_value_cache") is False):
        others.append("decoder.sliding_window")
    if others:
        reason = f"its configuration has {', '.join(f'model.{name}' for name in others)}, and one plain decoder is run"
        raise file.refuse(reason, "give a folder of a text decoder, or run it by onnxruntime_genai itself")
    file.only(search, "search.", _ONLY)
    file.penalty(search, "search.repetition_penalty")
    decoder_file = file.text(decoder, "model.decoder.filename")
    info = inspect_model(folder / file.file_name(decoder_file, "model.decoder.filename", "the decoder"))
    providers = options.get("provider_options", [])
    if not isinstance(providers, list) or not all(isinstance(provider, dict) for provider in providers):
        raise file.wrong("model.decoder.session_options.provider_options", "a list of objects", providers)
    vocabulary, ends = file.count(model, "model.vocab_size"), file.ends(model, "model.eos_token_id")
    if ends and max(ends) >= vocabulary:
        raise file.wrong("model.eos_token_id", f"a token below model.vocab_size, {vocabulary}", max(ends))
    facts = GenAiFolder(
        folder=str(folder),
        kind=file.text(model, "model.type"),
        vocabulary=vocabulary,
        context=file.count(model, "model.context_length"),
        ends=ends,
        tokens_name=_names(file, decoder, "inputs")["input_ids"],
        logits_name=_names(file, decoder, "outputs")["logits"],
        heads=file.count(decoder, "model.decoder.num_key_value_heads"),
        head_size=file.count(decoder, "model.decoder.head_size"),
        session_options=options,
        search=search,
        providers=tuple(providers),
        weights=_weights(info),
    )
    facts = _fitted(file, facts, decoder, info)
    beside = files_beside(folder, (CONFIG, *TOKENIZER))
    logits = next(output for output in info.outputs if output.name == facts.logits_name)
    return msgspec.structs.replace(
        info,
        path=str(folder),
        graph_file=Path(info.path).name,
        format=FORMAT,
        inputs=(TensorInfo(name="tokens", dtype="int64", shape=(1, "length")),),
        outputs=(
            TensorInfo(
                name="logits",
                dtype=logits.dtype,
                shape=(1, "length" if facts.every_logit else 1, facts.vocabulary),
            ),
        ),
        external_files=(*info.external_files, *beside),
        source=facts,
    )


def _names(file: ConfigFile, decoder: dict[str, Any], part: str) -> dict[str, str]:
    stated = decoder.get(part, {})
    if not isinstance(stated, dict) or not all(isinstance(name, str) and name for name in stated.values()):
        raise file.wrong(f"model.decoder.{part}", "an object of names", stated)
    for role, name in stated.items():
        # The engine prints the number of a layer into it as C does, and would read memory for other directives.
        if name.count("%") != (role.endswith("_names")) or ("%d" not in name and "%" in name):
            kind = "a name with one %d" if role.endswith("_names") else "a name without %"
            raise file.wrong(f"model.decoder.{part}.{role}", kind, name)
    return {"logits": "logits", "input_ids": "input_ids", "past_key_names": "past_key_values.%d.key", **stated}


def _fitted(file: ConfigFile, facts: GenAiFolder, decoder: dict[str, Any], info: ModelInfo) -> GenAiFolder:
    """Compare names and sizes with the graph: the engine runs fewer layers than there are without an error."""
    shapes = {tensor.name: tensor.shape for tensor in (*info.inputs, *info.outputs)}
    for role, name in (("input", facts.tokens_name), ("output", facts.logits_name)):
        if name not in shapes:
            fix = f"name its {role} in model.decoder.{role}s of {CONFIG}"
            raise file.refuse(f"the graph has no {role} {name!r:.80}", fix)
    shape = shapes[facts.logits_name] or ()
    width = shape[-1] if shape else None
    if isinstance(width, int) and width != facts.vocabulary:
        fix = f"set model.vocab_size to {width} in {CONFIG}"
        raise file.refuse(f"model.vocab_size is {facts.vocabulary}, and the graph gives {width} logits", fix)
    pattern = _names(file, decoder, "inputs")["past_key_names"]
    head, _, tail = pattern.partition("%d")
    layers = sum(name == f"{head}{name[len(head) : len(name) - len(tail)]}{tail}" for name in shapes if head in name)
    stated = file.count(decoder, "model.decoder.num_hidden_layers")
    if "%d" in pattern and layers != stated:
        fix = f"set model.decoder.num_hidden_layers to {layers} in {CONFIG}"
        raise file.refuse(f"num_hidden_layers is {stated}, and the graph has the past of {layers} layers", fix)
    past = shapes.get(pattern.replace("%d", "0")) or ()
    for name, axis in (("num_key_value_heads", 1), ("head_size", 3)):
        size = past[axis] if len(past) == 4 else None
        if isinstance(size, int) and decoder.get(name) != size:
            fix = f"set model.decoder.{name} to {size} in {CONFIG}"
            raise file.refuse(f"{name} is {decoder.get(name)!r:.40}, and the graph has {size}", fix)
    return msgspec.structs.replace(facts, every_logit=len(shape) != 3 or shape[1] != 1)


def _weights(info: ModelInfo) -> dict[str, int]:
    proto = info.named_proto()
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    forms: Counter[str] = Counter()
    for node in proto.graph.node:
        if node.op_type == "MatMulNBits":
            stated = {attribute.name: attribute.i for attribute in node.attribute}
            sizes = (f"{name}={stated.get(name, 0)}" for name in ("bits", "block_size", "accuracy_level"))
            forms[" ".join((node.op_type, *sizes))] += 1
        elif node.op_type in ("MatMul", "Gemm") and any(name in types for name in node.input[:2]):
            forms[f"{node.op_type} {dtype_name(next(types[name] for name in node.input[:2] if name in types))}"] += 1
    return dict(sorted(forms.items()))


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
        del inputs, outputs, stream
        _refused()

    def close(self) -> None:
        loaded = self._handle
        super().close()
        if loaded is not None:
            loaded.close()


def _refused(*_: Any) -> NoReturn:
    raise UnsupportedOperationError("a reference is only run", engine="onnxruntime")
