# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder of OpenVINO with a tiny random decoder that keeps a state, and a tokenizer of bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from generation_folders import BEGIN, CONTEXT, END, VOCABULARY, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

_WIDTH, _HEADS, _HEAD, _LAYERS = 32, 2, 16, 2


def write_openvino_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write a folder, as an exporter of OpenVINO would, and return it. Needs openvino_tokenizers and transformers."""
    import openvino
    import openvino_tokenizers
    from transformers import AutoTokenizer

    folder.mkdir(parents=True)
    openvino.save_model(_decoder(seed), folder / "openvino_model.xml", compress_to_fp16=False)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": _WIDTH}
    ends = {"bos_token_id": BEGIN, "eos_token_id": END}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **ends}
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({**ends, "pad_token_id": END}), encoding="utf-8")
    write_tokenizer(folder)
    found = openvino_tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    for name, made in zip(("openvino_tokenizer", "openvino_detokenizer"), found, strict=True):
        openvino.save_model(made, folder / f"{name}.xml")
    return folder


def _decoder(seed: int) -> Any:
    import openvino
    from openvino import opset13 as ops
    from openvino.op.util import Variable, VariableInfo

    random = np.random.default_rng(seed)

    def whole(values: Any) -> Any:
        return ops.constant(np.array(values, dtype=np.int64))

    def weight(rows: int, columns: int) -> Any:
        return ops.constant((random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32))

    inputs = {}
    for name, rank, kind in (
        ("input_ids", 2, np.int64), ("attention_mask", 2, np.int64), ("position_ids", 2, np.int64),
        ("beam_idx", 1, np.int32),
    ):  # fmt: skip
        inputs[name] = ops.parameter([-1] * rank, kind, name=name)
        inputs[name].output(0).set_names({name})
    ids, mask, positions, beam = inputs.values()
    state = ops.gather(weight(VOCABULARY, _WIDTH), ids, whole(0))
    state = ops.add(state, ops.gather(weight(CONTEXT, _WIDTH), positions, whole(0)))
    shape = ops.shape_of(ids)
    batch = ops.gather(shape, whole([0]), whole(0))
    length, total = (
        ops.squeeze(ops.gather(sizes, whole([1]), whole(0)), whole([0])) for sizes in (shape, ops.shape_of(mask))
    )
    columns = ops.range(whole(0), total, whole(1), output_type="i64")
    rows = ops.add(ops.range(whole(0), length, whole(1), output_type="i64"), ops.subtract(total, length))
    before = ops.less_equal(ops.unsqueeze(columns, whole(0)), ops.unsqueeze(rows, whole(1)))
    seen = ops.unsqueeze(ops.convert(mask, "boolean"), whole([1, 2]))
    kept = ops.logical_and(ops.unsqueeze(before, whole([0, 1])), seen)
    bias = ops.select(kept, ops.constant(np.float32(0)), ops.constant(np.float32(-65504)))
    sinks = []
    for layer in range(_LAYERS):
        queries, *pair = (
            ops.transpose(
                ops.reshape(
                    ops.matmul(state, weight(_WIDTH, _HEADS * _HEAD), False, False), whole([0, 0, _HEADS, _HEAD]), True
                ),
                whole([0, 2, 1, 3]),
            )
            for _ in range(3)
        )
        cache = []
        for tensor, name in zip(pair, ("key", "value"), strict=True):
            info = VariableInfo()
            info.data_shape = openvino.PartialShape([-1, _HEADS, -1, _HEAD])
            info.data_type = openvino.Type.f32
            info.variable_id = f"past_key_values.{layer}.{name}present.{layer}.{name}"
            variable = Variable(info)
            empty = ops.concat([batch, whole([_HEADS]), whole([0]), whole([_HEAD])], 0)
            past = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), empty), variable)
            cache.append(ops.concat([ops.gather(past, beam, whole(0)), tensor], 2))
            sinks.append(ops.assign(cache[-1], variable))
        attended = ops.transpose(ops.scaled_dot_product_attention(queries, *cache, bias), whole([0, 2, 1, 3]))
        attended = ops.reshape(attended, whole([0, 0, _HEADS * _HEAD]), True)
        state = ops.add(state, ops.matmul(attended, weight(_HEADS * _HEAD, _WIDTH), False, False))
    logits = ops.matmul(state, weight(_WIDTH, VOCABULARY), False, False)
    logits.output(0).set_names({"logits"})
    return openvino.Model([ops.result(logits)], sinks, list(inputs.values()), "decoder")
