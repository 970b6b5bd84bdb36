# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`inspect_decoder`: a folder of transformers with a decoder in safetensors is checked and read, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.generation import TOKENIZER, ConfigFile, GenerationFolder, decoder_info, files_beside
from xpuruntime.engines.model.file import MODEL_CONFIG, looks_like
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import decode_json, open_regular

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

#: Format of such a model, by which the plan finds engines.
FORMAT = "transformers"
_GENERATION = "generation_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_AGAIN = "save the model again: model.save_pretrained(folder)"
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_LARGEST_HEADER = 100 << 20
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8e4m3fn", "F8_E5M2": "float8e5m2",
}  # fmt: skip
#: Options of a generation of which only one value is run.
_ONLY = {"num_beams": 1, "num_return_sequences": 1, "prompt_lookup_num_tokens": None, "stop_strings": None}


def has_weights(folder: Path) -> bool:
    """Say whether a folder has weights in safetensors."""
    return any(kind_of(folder / name) != "missing" for name in (_WEIGHTS, _INDEX))


def inspect_decoder(folder: Path) -> ModelInfo:
    """Read and check the configuration and the headers of the weights. The model takes token ids and returns logits."""
    file = ConfigFile(folder, MODEL_CONFIG, _AGAIN)
    config = file.values
    for name, source in ((MODEL_CONFIG, config), ("tokenizer_config.json", _values(folder, "tokenizer_config.json"))):
        if "auto_map" in source:
            reason = f"{name} has an auto_map, so that transformers would run code of the folder"
            raise file.refuse(reason, "load it yourself with transformers, and give the module to xpuruntime.pytorch")
    classes = config.get("architectures")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise file.wrong("architectures", "a list of names", classes)
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes) or config.get("is_encoder_decoder"):
        reason = f"it is {', '.join(classes) or 'no class'}, and only decoders (…ForCausalLM) are run"
        raise file.refuse(reason, "give a folder of a text decoder")
    if config.get("quantization_config") is not None:
        reason = "its weights are quantized, which transformers may turn into floats in the first forward"
        raise file.refuse(reason, "give the model in floats, and state execution.weights in the policy")
    if kind_of(folder / _ADAPTER) != "missing":  # transformers would load another model around it
        raise file.refuse(f"it has {_ADAPTER}", "merge the adapter (merge_and_unload) and save the model")
    stated = _values(folder, _GENERATION)
    options = file if not stated else ConfigFile(folder, _GENERATION, _AGAIN)
    options.only(stated, "", _ONLY)
    options.penalty(stated, "repetition_penalty")
    counts, names = _weights(file)
    context = next((name for name in _CONTEXTS if config.get(name) is not None), _CONTEXTS[0])
    ends = options.ends(stated if "eos_token_id" in stated else config, "eos_token_id")
    facts = GenerationFolder(
        folder=str(folder),
        kind=file.text(config, "model_type"),
        vocabulary=file.count(config, "vocab_size"),
        context=file.count(config, context),
        ends=ends,
        search={name: value for name, value in stated.items() if isinstance(value, (bool, int, float))},
    )
    beside = files_beside(folder, (*names, _INDEX, _GENERATION, *TOKENIZER))
    return decoder_info(facts, form=FORMAT, beside=beside, graph_name=classes[0], weights=counts)


def _values(folder: Path, name: str) -> dict[str, Any]:
    return {} if kind_of(folder / name) == "missing" else ConfigFile(folder, name, _AGAIN).values


def _weights(file: ConfigFile) -> tuple[dict[str, int], tuple[str, ...]]:
    names: tuple[str, ...] = (_WEIGHTS,)
    if kind_of(file.folder / _WEIGHTS) == "missing":
        places = ConfigFile(file.folder, _INDEX, _AGAIN)
        listed = places.section(places.values, "weight_map")
        if not listed or not all(isinstance(name, str) for name in listed.values()):
            raise places.wrong("weight_map", "an object of file names", listed)
        names = tuple(sorted({places.file_name(name, "weight_map", "weights") for name in listed.values()}))
    counts: dict[str, int] = {}
    for name in names:
        for kind, count in _tensors(file, name):
            counts[kind] = counts.get(kind, 0) + count
    return dict(sorted(counts.items())), names


def _tensors(file: ConfigFile, name: str) -> Iterator[tuple[str, int]]:
    """Yield type and number of values of each tensor, as the header of a file states them."""
    again = "download it again, or save the model again with model.save_pretrained(folder)"
    try:
        with open_regular(file.folder / name) as opened:
            size = (file.folder / name).stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(_LARGEST_HEADER, size - 8):
                opened.seek(0)
                guess = looks_like(opened.read(512))
                reason = f"{name} is no file of safetensors" + (f"; it looks like {guess[0]}" if guess else "")
                raise file.refuse(reason, again)
            header = decode_json(opened.read(length))
    except OSError as error:
        raise file.refuse(f"{name} cannot be read ({reason_of(error)})", "restore the file") from None
    except msgspec.DecodeError as error:
        raise file.refuse(f"{name} is no file of safetensors: its header is no JSON: {error}", again) from None
    tensors = {key: value for key, value in header.items() if key != "__metadata__"} if isinstance(header, dict) else {}
    for key, stated in tensors.items():
        try:
            begin, end = stated["data_offsets"]
            kind, count = _TYPES.get(stated["dtype"], stated["dtype"]), 1
            for extent in stated["shape"]:
                count *= int(extent)
            fits = 0 <= begin <= end <= size - 8 - length
        except (TypeError, KeyError, ValueError):
            raise file.refuse(f"{name} states no type, shape and place of {key!r:.80}", again) from None
        if not fits:
            needs = f"{end} bytes and {size - 8 - length} are there"
            raise file.refuse(f"{name} is cut off: {key!r:.80} needs {needs}", again)
        yield str(kind), count
    if not tensors:
        raise file.refuse(f"{name} has no weights", again)
