# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks and verification of a folder: each planted change breaks the lock, and no other prompt or length does."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from generation_folders import change_config, write_folder

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")

POLICY = {"execution": {"threads": 1}}


@pytest.fixture(scope="module")
def locked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with its lock beside it."""
    copied = shutil.copytree(folder, tmp_path_factory.mktemp("locked") / "model")
    xrt.lock(copied, POLICY, copied.parent / "model.lock")
    return copied


def lock_of(folder: Path) -> Path:
    return folder.parent / "model.lock"


def test_the_lock_holds_for_other_prompts_lengths_and_places(locked: Path, tmp_path: Path):
    moved = shutil.copytree(locked, tmp_path / "elsewhere" / "renamed")
    (moved / "README.md").write_text("not read by the engine")
    with xrt.GenerationSession(moved, lock=lock_of(locked)) as session:
        for prompt in ([1], [5, 6, 7], list(range(40))):
            assert session.generate(prompt, max_new_tokens=5).tokens
            report = session.explain(prompt, runs=1)
            statuses = {observation.key: observation.status for observation in report.observations}
            assert statuses["execution.lock"] == "honoured", report
    assert not xrt.lock(moved, POLICY, lock_of(locked), check=True).drifts


def test_the_lock_names_phases_files_and_libraries(locked: Path):
    identity = xrt.load_lock(lock_of(locked)).identity
    assert identity.model is not None
    files = {"genai_config.json", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"}
    assert set(identity.model.external) == files
    assert {entry.unit.partition(":")[0] for entry in identity.entries} == {"prefill", "decode"}
    keys = {validator.key.partition(".so")[0] for validator in identity.validators if validator.kind == "library"}
    assert {"libonnxruntime-genai", "libonnxruntime"} <= keys
    assert not any("ORT_LIB_PATH" in str(validator.expect) for validator in identity.validators)


def byte(folder: Path) -> None:
    path = folder / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def graph(folder: Path) -> None:
    import onnx

    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization")
    next(one for one in node.attribute if one.name == "epsilon").f = 1e-4
    (folder / "model.onnx").write_bytes(model.SerializeToString())


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte of a weight": (byte, "external_data model.onnx.data"),
    "epsilon of a norm": (graph, "model model.onnx: the file differs (expected sha256"),
    "another tokenizer": (lambda one: (one / "tokenizer.json").write_text("{}"), "external_data tokenizer.json"),
    "a tokenizer less": (lambda one: (one / "tokenizer_config.json").unlink(), "external_data tokenizer_config.json"),
    "a chat template": (lambda one: (one / "chat_template.jinja").write_text("x"), "external_data chat_template.jinja"),
    "search options": (
        lambda one: change_config(one, lambda config: config["search"].update(top_k=7)),
        "external_data genai_config.json",
    ),
    "other weights": (lambda one: write_folder(one, seed=1), "external_data model.onnx.data"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_breaks_the_lock(locked: Path, tmp_path: Path, name: str):
    change, said = CHANGES[name]
    other = shutil.copytree(locked, tmp_path / "model")
    change(other)
    with pytest.raises(xrt.LockError, match="Fix: ") as caught:
        xrt.GenerationSession(other, lock=lock_of(locked))
    assert said in str(caught.value)


def test_another_thread_count_breaks_the_lock(locked: Path):
    with pytest.raises(xrt.LockError, match=r"execution\.threads 2"):
        xrt.GenerationSession(locked, {"execution": {"threads": 2}}, lock=lock_of(locked))


def test_verify_checks_the_lock_and_the_evidence(locked: Path, tmp_path: Path):
    only = ["evidence", "accuracy"]
    result = xrt.verify(locked, lock=lock_of(locked), only=only)
    verdicts = {claim.id: claim.verdict for claim in result.claims}
    assert verdicts["evidence.lock"] == "pass", result
    assert "fail" not in verdicts.values(), result
    other = shutil.copytree(locked, tmp_path / "model")
    byte(other)
    assert xrt.verify(other, lock=lock_of(locked), only=only).verdict == "fail"
