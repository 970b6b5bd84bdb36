# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder as a reader of the documentation has it: a model, images, policies, and the facts of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from generation_folders import write_folder
from pictures import reader_files

from xpuruntime.demo import demo_images
from xpuruntime.engines.registry import default_registry
from xpuruntime.runtime.snapshot import machine_snapshot, machine_to_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    reader_files(tmp_path)
    shutil.copy(ROOT / "examples/policies/npu_qnn.yaml", tmp_path / "npu.yaml")
    np.save(tmp_path / "image.npy", demo_images()[0][:1])
    write_folder(tmp_path / "llm", level=4)
    (tmp_path / "machine.json").write_text(machine_to_json(machine_snapshot(default_registry().engines())))
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    shutil.copy(ROOT / "docs/examples/machine.json", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path
