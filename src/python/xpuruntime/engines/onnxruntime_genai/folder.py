# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`inspect_folder`: a folder of ONNX Runtime GenAI, with configuration, decoder and tokenizer, is checked and read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.external import ExternalFile
from xpuruntime.engines.model.facts import TensorInfo, dtype_name
from xpuruntime.engines.model.file import GENERATION_CONFIG as CONFIG
from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.info import inspect_model
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import decode_json, read_regular

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

__all__ = ["FORMAT", "GenAiFolder", "inspect_folder"]

#: Format of such a model, by which the plan finds engines.
FORMAT = "genai"
_LARGEST_CONFIG = 16 << 20
_INT32 = 2**31 - 1
#: Files beside the graph that the engine's tokenizer reads.
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
#: Parts of a configuration that make it more than one decoder.
_OTHER_PARTS = ("encoder", "embedding", "vision", "speech", "encoder_decoder_init", "joiner")
#: Search options of which only one value is run. A prompt is one sequence, and prefilled in chunks it would have only
#: the logits of the last chunk.
_ONLY = {"num_beams": 1, "num_return_sequences": 1, "chunk_size": 0}


class GenAiFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What `inspect_folder` read: sizes, options and providers that the configuration states, and forms of weights."""

    folder: str
    kind: str
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    every_logit: bool
    tokens_name: str
    logits_name: str
    heads: int
    head_size: int
    session_options: dict[str, Any]
    search: dict[str, Any]
    providers: tuple[dict[str, Any], ...] = ()
    weights: dict[str, int] = {}


def inspect_folder(folder: Path) -> ModelInfo:
    """Read and check the configuration and the decoder of a folder. The model takes tokens and gives logits.

    Raises
    ------
    ModelError
        A file is missing or none of its kind, leads outside of the folder, or the configuration does not fit the graph.
    """
    where = str(folder)
    config = _read_config(folder)
    model = _section(config, "model", where)
    decoder = _section(model, "model.decoder", where)
    search = config.get("search", {})
    options = decoder.get("session_options", {})
    for name, value in (("search", search), ("model.decoder.session_options", options)):
        if not isinstance(value, dict):
            raise _wrong(where, name, "an object", value)
    others = [name for name in _OTHER_PARTS if name in model] + ["decoder.pipeline"] * ("pipeline" in decoder)
    if others:
        reason = f"its configuration has {', '.join(f'model.{name}' for name in others)}, and only one decoder is run"
        raise refuse(where, reason, "give a folder of a text decoder, or run it by onnxruntime_genai itself")
    for name, only in _ONLY.items():
        if search.get(name, only) != only:
            fix = f"set search.{name} to {only} in {folder / CONFIG}"
            raise refuse(where, f"search.{name} is {search[name]!r:.40}, and only {only} is run", fix)
    info = inspect_model(folder / _file_name(decoder, where))
    providers = options.get("provider_options", [])
    if not isinstance(providers, list) or not all(isinstance(provider, dict) for provider in providers):
        raise _wrong(where, "model.decoder.session_options.provider_options", "a list of objects", providers)
    facts = GenAiFolder(
        folder=where,
        kind=_text(model, "type", where),
        vocabulary=_count(model, "model.vocab_size", where),
        context=_count(model, "model.context_length", where),
        ends=_ends(model, where),
        every_logit=True,
        tokens_name=_names(decoder, "inputs", where)["input_ids"],
        logits_name=_names(decoder, "outputs", where)["logits"],
        heads=_count(decoder, "model.decoder.num_key_value_heads", where),
        head_size=_count(decoder, "model.decoder.head_size", where),
        session_options=options,
        search=search,
        providers=tuple(providers),
        weights=_weights(info),
    )
    facts = _fitted(facts, decoder, info, where)
    kinds = {name: kind_of(folder / name) for name in (CONFIG, *_TOKENIZER)}
    for name, kind in kinds.items():
        if kind not in ("file", "missing"):  # the engine would wait for a pipe
            raise refuse(where, f"{name} in it is a {kind}, not a file", "remove it, or put the file there")
    beside = tuple(
        ExternalFile(location=name, size=(folder / name).stat().st_size, tensors=0)
        for name, kind in kinds.items()
        if kind == "file"
    )
    logits = next(output for output in info.outputs if output.name == facts.logits_name)
    return msgspec.structs.replace(
        info,
        path=where,
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


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = decode_json(read_regular(path, _LARGEST_CONFIG))
    except OSError as error:
        raise refuse(str(folder), f"{CONFIG} cannot be read ({reason_of(error)})", "restore the file") from None
    except msgspec.DecodeError as error:
        fix = "build the folder again: python -m onnxruntime_genai.models.builder"
        raise refuse(str(folder), f"{CONFIG} is no JSON: {error}", fix) from None
    if not isinstance(config, dict):
        raise _wrong(str(folder), CONFIG, "an object", config)
    return config


def _wrong(where: str, name: str, kind: str, value: Any) -> Exception:
    return refuse(where, f"{name} is {value!r:.60}, not {kind}", f"correct it in {CONFIG}, or build the folder again")


def _section(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = config.get(name.rpartition(".")[2])
    if not isinstance(value, dict):
        raise _wrong(where, name, "an object", value)
    return value


def _text(section: dict[str, Any], name: str, where: str) -> str:
    value = section.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(where, name, "text", value)
    return value


def _count(section: dict[str, Any], name: str, where: str) -> int:
    value = section.get(name.rpartition(".")[2])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _INT32:
        raise _wrong(where, name, f"a whole number from 1 to {_INT32}", value)
    return value


def _ends(model: dict[str, Any], where: str) -> tuple[int, ...]:
    """Return the tokens that end a text."""
    stated = model.get("eos_token_id", [])
    ends = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end <= _INT32 for end in ends):
        raise _wrong(where, "model.eos_token_id", "a token id or a list of them", stated)
    return tuple(ends)


def _file_name(decoder: dict[str, Any], where: str) -> str:
    name = _text(decoder, "filename", where)
    if name != PurePath(name).name or "\\" in name or "\0" in name or name == "..":
        reason = f"model.decoder.filename is {name!r:.200}, and the decoder must be a file in the folder itself"
        raise refuse(where, reason, f"move the file there and name it alone in {CONFIG}")
    return name


def _names(decoder: dict[str, Any], part: str, where: str) -> dict[str, str]:
    """Return the names of a decoder's inputs or outputs by role; those of the engine where none are stated."""
    stated = decoder.get(part, {})
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
        raise _wrong(where, f"model.decoder.{part}", "an object of names", stated)
    return {"logits": "logits", "input_ids": "input_ids", "past_key_names": "past_key_values.%d.key", **stated}


def _fitted(facts: GenAiFolder, decoder: dict[str, Any], info: ModelInfo, where: str) -> GenAiFolder:
    """Compare names and sizes with the graph: the engine runs fewer layers than there are without an error."""
    shapes = {tensor.name: tensor.shape for tensor in (*info.inputs, *info.outputs)}
    for role, name in (("input", facts.tokens_name), ("output", facts.logits_name)):
        if name not in shapes:
            fix = f"name its {role} in model.decoder.{role}s of {CONFIG}"
            raise refuse(where, f"the graph has no {role} {name!r:.80}", fix)
    shape = shapes[facts.logits_name] or ()
    width = shape[-1] if shape else None
    if isinstance(width, int) and width != facts.vocabulary:
        fix = f"set model.vocab_size to {width} in {CONFIG}"
        raise refuse(where, f"model.vocab_size is {facts.vocabulary}, and the graph gives {width} logits", fix)
    pattern = _names(decoder, "inputs", where)["past_key_names"]
    head, _, tail = pattern.partition("%d")
    layers = sum(name == f"{head}{name[len(head) : len(name) - len(tail)]}{tail}" for name in shapes if head in name)
    stated = _count(decoder, "model.decoder.num_hidden_layers", where)
    if "%d" in pattern and layers != stated:
        fix = f"set model.decoder.num_hidden_layers to {layers} in {CONFIG}"
        raise refuse(where, f"num_hidden_layers is {stated}, and the graph has the past of {layers} layers", fix)
    past = shapes.get(pattern.replace("%d", "0")) or ()
    for name, axis in (("num_key_value_heads", 1), ("head_size", 3)):
        size = past[axis] if len(past) == 4 else None
        if isinstance(size, int) and decoder.get(name) != size:
            fix = f"set model.decoder.{name} to {size} in {CONFIG}"
            raise refuse(where, f"{name} is {decoder.get(name)!r:.40}, and the graph has {size}", fix)
    return msgspec.structs.replace(facts, every_logit=len(shape) != 3 or shape[1] != 1)


def _weights(info: ModelInfo) -> dict[str, int]:
    """Return how many products have constant weights in which form: the operator and what it states of them."""
    proto = info.named_proto()
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    forms: Counter[str] = Counter()
    for node in proto.graph.node:
        if node.op_type == "MatMulNBits":
            stated = {one.name: one.i for one in node.attribute}
            sizes = (f"{name}={stated.get(name, 0)}" for name in ("bits", "block_size", "accuracy_level"))
            forms[" ".join((node.op_type, *sizes))] += 1
        elif node.op_type in ("MatMul", "Gemm") and any(name in types for name in node.input[:2]):
            forms[f"{node.op_type} {dtype_name(next(types[name] for name in node.input[:2] if name in types))}"] += 1
    return dict(sorted(forms.items()))
