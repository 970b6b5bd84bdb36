# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`inspect_pipeline`: a folder of OpenVINO with a language model, its configuration checked and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.generation.folder import TOKENIZER, ConfigFile, GenerationFolder, files_beside
from xpuruntime.engines.model.facts import TensorInfo
from xpuruntime.engines.model.file import MODEL_CONFIG
from xpuruntime.engines.model.info import ModelInfo
from xpuruntime.files.paths import kind_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["inspect_pipeline"]

_ONLY = {"num_beams": 1, "num_return_sequences": 1, "stop_strings": None}
_AGAIN = "export the model again: optimum-cli export openvino"
_GRAPH = "openvino_model.xml"


def inspect_pipeline(folder: Path) -> ModelInfo:
    """Read and check the configuration of a folder of OpenVINO. The model takes tokens and gives logits.

    Raises
    ------
    ModelError
        It is no decoder, or a file is missing or none of its kind.
    """
    file = ConfigFile(folder, MODEL_CONFIG, _AGAIN)
    config, name = file.values, "generation_config.json"
    stated = ConfigFile(folder, name, _AGAIN) if kind_of(folder / name) != "missing" else None
    values = {} if stated is None else stated.values
    if stated is not None:
        stated.only(values, "", _ONLY)
    names = (_GRAPH, "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin")
    beside = files_beside(folder, (*names, "openvino_detokenizer.xml", "openvino_detokenizer.bin", name, *TOKENIZER))
    there = {entry.location for entry in beside}
    missing = next((file_name for file_name in names[:3] if file_name not in there), None)
    if missing is not None:
        raise file.refuse(f"it has no {missing}", _AGAIN)
    vocabulary = file.count(config, "vocab_size")
    written = (folder / MODEL_CONFIG).stat()
    ends = (file if "eos_token_id" not in values else stated or file).ends(
        values if "eos_token_id" in values else config, "eos_token_id"
    )
    return ModelInfo(
        path=str(folder),
        size=written.st_size,
        mtime_ns=written.st_mtime_ns,
        base_dir=str(folder),
        graph_file=MODEL_CONFIG,
        format="openvino-genai",
        inputs=(TensorInfo(name="tokens", dtype="int64", shape=(1, "length")),),
        outputs=(TensorInfo(name="logits", dtype="float32", shape=(1, "length", vocabulary)),),
        nodes=(),
        ops={},
        opsets={},
        ir_version=0,
        external_files=beside,
        source=GenerationFolder(
            folder=str(folder),
            kind=file.text(config, "model_type"),
            vocabulary=vocabulary,
            context=file.count(config, "max_position_embeddings"),
            ends=ends,
            search={key: value for key, value in values.items() if isinstance(value, (bool, int, float))},
        ),
    )
