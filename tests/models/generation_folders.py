# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders of ONNX Runtime GenAI with a tiny random decoder and a tokenizer of bytes, as its model builder writes them.

Written with the package `onnx` alone, so that tests need neither PyTorch nor transformers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT, VOCABULARY, BEGIN, END = 64, 258, 256, 257
_WIDTH, _HEADS, _KV_HEADS, _HEAD, _LAYERS, _BLOCK = 32, 2, 1, 16, 2, 16


def write_folder(folder: Path, *, level: int | None = None, seed: int = 0, pruned: bool = False, **search: Any) -> Path:
    """Write a folder and return it: weights in fp32, or in int4 where `level` gives their ``accuracy_level``.

    A `pruned` graph gives the logits of the last token only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _decoder(np.random.default_rng(seed), level, pruned=pruned)
    onnx.save_model(
        model, str(folder / "model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=64
    )
    config = {
        "model": {
            "type": "llama",
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            "pad_token_id": END,
            "vocab_size": VOCABULARY,
            "context_length": CONTEXT,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": _HEAD,
                "hidden_size": _WIDTH,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": _HEADS,
                "num_hidden_layers": _LAYERS,
                "num_key_value_heads": _KV_HEADS,
            },
        },
        "search": {
            "do_sample": False, "max_length": CONTEXT, "num_beams": 1, "past_present_share_buffer": True,
            "temperature": 1.0, "top_k": 50, "top_p": 1.0, **search,
        },
    }  # fmt: skip
    (folder / "genai_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder)
    return folder


def change_config(folder: Path, change: Any) -> None:
    """Write the configuration of a folder again, as `change` leaves it."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, under the characters that byte-level tokenizers write them as."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + number) for number in range(256 - len(shown)))
    vocabulary = {chr(byte) if byte in shown else next(others): byte for byte in range(256)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": BEGIN, "content": "<s>", **special}, {"id": END, "content": "</s>", **special}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**vocabulary, "<s>": BEGIN, "</s>": END}, "merges": []},
    }
    kind = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")


def _decoder(random: np.random.Generator, level: int | None, *, pruned: bool) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}

    def node(op: str, inputs: list[str], outputs: list[str], domain: str = "", **more: Any) -> str:
        nodes.append(helper.make_node(op, inputs, outputs, name=f"/{outputs[0]}", domain=domain, **more))
        return outputs[0]

    def product(name: str, read: str, rows: int, columns: int) -> str:
        values = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        if level is None:
            weights[f"{name}.weight"] = values
            return node("MatMul", [read, f"{name}.weight"], [name])
        blocks = rows // _BLOCK
        grouped = values.T.reshape(columns, blocks, _BLOCK)
        scales = np.abs(grouped).max(axis=2) / 7
        quantized = np.clip(np.round(grouped / scales[..., None]) + 8, 0, 15).astype(np.uint8)
        weights[f"{name}.weight"] = quantized[..., ::2] | quantized[..., 1::2] << 4
        weights[f"{name}.scales"] = scales.astype(np.float32).reshape(-1)
        sizes = {"K": rows, "N": columns, "bits": 4, "block_size": _BLOCK, "accuracy_level": level}
        inputs = [read, f"{name}.weight", f"{name}.scales"]
        return node("MatMulNBits", inputs, [name], "com.microsoft", **sizes)

    def norm(name: str, read: str) -> str:
        weights[f"{name}.weight"] = np.ones(_WIDTH, np.float32)
        return node("SimplifiedLayerNormalization", [read, f"{name}.weight"], [name], axis=-1, epsilon=1e-6)

    weights["one"] = np.array([1], np.int64)
    weights["axis"] = np.array(1, np.int64)
    weights["embedding"] = random.standard_normal((VOCABULARY, _WIDTH)).astype(np.float32)
    angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(_HEAD // 2) / (_HEAD // 2))
    weights["cos"], weights["sin"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0)
    node("Sub", ["lengths", "one"], ["before"])
    node("Cast", ["before"], ["seqlens"], to=TensorProto.INT32)
    node("Shape", ["attention_mask"], ["mask_shape"])
    node("Gather", ["mask_shape", "axis"], ["total64"], axis=0)
    node("Cast", ["total64"], ["total"], to=TensorProto.INT32)
    node("Gather", ["embedding", "input_ids"], ["embedded"])
    state = node("Identity", ["embedded"], ["state"])  # for optimizers to remove
    for layer in range(_LAYERS):
        packed = (_HEADS + 2 * _KV_HEADS) * _HEAD
        qkv = product(f"layers.{layer}.qkv", norm(f"layers.{layer}.norm", state), _WIDTH, packed)
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        present = [f"present.{layer}.key", f"present.{layer}.value"]
        node(
            "GroupQueryAttention",
            [qkv, "", "", *past, "seqlens", "total", "cos", "sin"],
            [f"layers.{layer}.attention", *present],
            "com.microsoft",
            num_heads=_HEADS,
            kv_num_heads=_KV_HEADS,
            do_rotary=1,
        )
        out = product(f"layers.{layer}.out", f"layers.{layer}.attention", _HEADS * _HEAD, _WIDTH)
        state = node("Add", [state, out], [f"layers.{layer}.sum"])
    if pruned:
        weights["last"] = np.array([-1], np.int64)
        state = node("Gather", [state, "last"], ["last_state"], axis=1)
    product("logits", norm("final", state), _WIDTH, VOCABULARY)

    def value(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    caches = [(f"{layer}.{part}") for layer in range(_LAYERS) for part in ("key", "value")]
    kv: list[int | str] = ["batch", _KV_HEADS]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            value("input_ids", TensorProto.INT64, ["batch", "length"]),
            value("attention_mask", TensorProto.INT64, ["batch", "total_length"]),
            *(value(f"past_key_values.{name}", TensorProto.FLOAT, [*kv, "past_length", _HEAD]) for name in caches),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch", 1 if pruned else "length", VOCABULARY]),
            *(value(f"present.{name}", TensorProto.FLOAT, [*kv, "total_length", _HEAD]) for name in caches),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
