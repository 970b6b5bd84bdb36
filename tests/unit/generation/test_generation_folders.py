# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders with missing, foreign and hostile files, which are refused before the engine reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from generation_folders import change_config

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")

HUGE = 10**30


def decoder(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["model"]["decoder"].update(more)


def model(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["model"].update(more)


def search(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["search"].update(more)


CHANGES = {
    "no model": lambda config: config.pop("model"),
    "model a list": lambda config: config.update(model=[]),
    "no decoder": lambda config: config["model"].pop("decoder"),
    "search a list": lambda config: config.update(search=[1]),
    "options a text": decoder(session_options="fast"),
    "providers a text": decoder(session_options={"provider_options": "cuda"}),
    "providers of text": decoder(session_options={"provider_options": ["cuda"]}),
    "type a number": model(type=3),
    "type unknown": model(type="nonsense"),
    "vocabulary a text": model(vocab_size="258"),
    "vocabulary huge": model(vocab_size=HUGE),
    "vocabulary of another graph": model(vocab_size=300),
    "vocabulary negative": model(vocab_size=-1),
    "context a float": model(context_length=1.5),
    "context huge": model(context_length=2**31),
    "context true": model(context_length=True),
    "end a float": model(eos_token_id=3.5),
    "end negative": model(eos_token_id=[-1]),
    "end beyond the vocabulary": model(eos_token_id=[257, 258]),
    "a cache that slides": decoder(sliding_window={"window_size": 4}),
    "options of runs": decoder(run_options={"terminate": "1"}),
    "penalty of nothing": search(repetition_penalty=0),
    "penalty a text": search(repetition_penalty="1.1"),
    "layers a text": decoder(num_hidden_layers="2"),
    "layers huge": decoder(num_hidden_layers=HUGE),
    "fewer layers": decoder(num_hidden_layers=1),
    "more layers": decoder(num_hidden_layers=3),
    "other heads": decoder(num_key_value_heads=2),
    "other head size": decoder(head_size=17),
    "head size a text": decoder(head_size="16"),
    "file above": decoder(filename="../model.onnx"),
    "file absolute": decoder(filename="/etc/passwd"),
    "file in a folder": decoder(filename="sub/model.onnx"),
    "file on Windows": decoder(filename="..\\model.onnx"),
    "file with a NUL": decoder(filename="model.onnx\0"),
    "file empty": decoder(filename=""),
    "file a dot": decoder(filename=".."),
    "file a number": decoder(filename=7),
    "file not there": decoder(filename="other.onnx"),
    "file no graph": decoder(filename="tokenizer.json"),
    "names a list": decoder(inputs=["input_ids"]),
    "a name of nothing": decoder(inputs={"attention_mask": ""}),
    "other input": decoder(inputs={"input_ids": "ids"}),
    "other output": decoder(outputs={"logits": "scores"}),
    "a name printed as text": decoder(inputs={"past_key_names": "past_key_values.%s.key"}),
    "a name printed twice": decoder(outputs={"present_key_names": "present.%d.%d.key"}),
    "a name of all layers": decoder(inputs={"past_value_names": "past_key_values.0.value"}),
    "a name that is printed": decoder(inputs={"attention_mask": "attention_mask%n"}),
    "beams": search(num_beams=4),
    "sequences": search(num_return_sequences=2),
    "prefill in chunks": search(chunk_size=4),
    "an encoder": model(encoder={"filename": "encoder.onnx"}),
    "a pipeline": decoder(pipeline=[{"a": {"filename": "model.onnx"}}]),
    "unknown search option": search(nonsense=1),
    "unknown key": model(nonsense=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_configuration_is_refused_with_a_fix(folder: Path, copy_of: Callable[[Path], Path], name: str):
    other = copy_of(folder)
    change_config(other, CHANGES[name])
    with pytest.raises(xrt.ModelError, match="Fix: "):
        xrt.GenerationSession(other)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '"model"', "{\xff}", '{"model": NaN}'], ids=range(8)
)
def test_a_configuration_that_is_no_object_is_refused(folder: Path, copy_of: Callable[[Path], Path], text: str):
    other = copy_of(folder)
    (other / "genai_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(xrt.ModelError, match=r"genai_config\.json.*Fix: "):
        xrt.GenerationSession(other)


@pytest.mark.parametrize(
    ("section", "first"),
    [
        ("session_options", '{"custom_ops_library": "other.so"}'),
        ("search", '{"repetition_penalty": 5.0}'),
        ("decoder", '{"session_options": {"enable_profiling": "other"}}'),
    ],
)
def test_a_section_that_is_stated_twice_is_refused(
    folder: Path, copy_of: Callable[[Path], Path], section: str, first: str
):
    other = copy_of(folder)
    path = other / "genai_config.json"
    path.write_text(path.read_text().replace(f'"{section}":', f'"{section}": {first}, "{section}":', 1))
    with pytest.raises(xrt.ModelError, match=rf"'{section}' more than once.*Fix: "):
        xrt.GenerationSession(other)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_missing_file_is_named(folder: Path, copy_of: Callable[[Path], Path], name: str):
    other = copy_of(folder)
    (other / name).unlink()
    with pytest.raises(xrt.ModelError, match=f"{name}.*Fix: "):
        xrt.GenerationSession(other)


def test_special_files_are_not_waited_for(folder: Path, copy_of: Callable[[Path], Path]):
    other = copy_of(folder)
    (other / "genai_config.json").unlink()
    os.mkfifo(other / "genai_config.json")
    with pytest.raises(xrt.ModelError, match="pipe"):
        xrt.GenerationSession(other)
    tokenizer = copy_of(folder)
    (tokenizer / "tokenizer.json").unlink()
    os.mkfifo(tokenizer / "tokenizer.json")
    with pytest.raises(xrt.ModelError, match=r"tokenizer\.json in it is a pipe.*Fix: "):
        xrt.GenerationSession(tokenizer)


def test_what_is_no_such_folder(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "absent", xrt.demo_model_path(), "", b"bytes", 3, None):
        with pytest.raises(xrt.ModelError, match=r"it is no folder with genai_config\.json.*Fix: "):
            xrt.GenerationSession(wrong)  # type: ignore[arg-type]


def test_a_folder_that_changes_after_the_plan_is_noticed(folder: Path, copy_of: Callable[[Path], Path]):
    other = copy_of(folder)
    plan = xrt.plan(other)
    with xrt.GenerationSession(other, plan=plan) as session:
        assert session.plan == plan
    change_config(other, search(top_k=7))
    with pytest.raises(xrt.PlanError):
        xrt.GenerationSession(other, plan=plan)
