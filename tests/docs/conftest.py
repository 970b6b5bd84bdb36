# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder as a reader of the documentation has it: a model and a policy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from xpuruntime.demo import demo_model_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(demo_model_path(), tmp_path / "model.onnx")
    shutil.copy(ROOT / "examples/policies/cpu_fp32_strict.yaml", tmp_path / "policy.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path
