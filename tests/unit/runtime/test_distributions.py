# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Installed distributions, read from folder names, compared with the standard library's own list."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING

import pytest

from xpuruntime.runtime.packages import distributions

if TYPE_CHECKING:
    from pathlib import Path


def test_this_environment_agrees_with_the_standard_library() -> None:
    ours = {distribution.name: distribution.version for distribution in reversed(list(distributions()))}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in ("numpy", "onnx", "msgspec", "onnxruntime-gpu", "onnxruntime", "rich", "pyyaml"):
            assert ours[name] == importlib.metadata.version(name)


@pytest.mark.parametrize(
    ("folder", "name", "version"),
    [
        ("onnxruntime_gpu-1.31.1.dist-info", "onnxruntime-gpu", "1.31.1"),
        ("nvidia_cudnn_cu13-9.19.0.56.dist-info", "nvidia-cudnn-cu13", "9.19.0.56"),
        ("PyYAML-6.0.1.egg-info", "pyyaml", "6.0.1"),
        ("numpy-1.24.2-py3.11.egg-info", "numpy", "1.24.2"),
        ("ort-nightly-1.20.0.dev20241001.dist-info", "ort-nightly", "1.20.0.dev20241001"),
        ("torch-2.11.0+cu130.dist-info", "torch", "2.11.0+cu130"),
        ("jaraco.text-3.7.0.dist-info", "jaraco-text", "3.7.0"),
    ],
)
def test_folder_names(tmp_path: Path, folder: str, name: str, version: str) -> None:
    (tmp_path / folder).mkdir()
    [one] = distributions([str(tmp_path)])
    assert (one.name, one.version, one.location) == (name, version, str(tmp_path))
    assert one.files() is None


def test_other_folders_and_files(tmp_path: Path) -> None:
    for name in ("numpy", "numpy.libs", "broken.dist-info", "__pycache__"):
        (tmp_path / name).mkdir()
    assert list(distributions([str(tmp_path), str(tmp_path / "missing"), str(tmp_path)])) == []


def test_the_list_of_files(tmp_path: Path) -> None:
    record = tmp_path / "x-1.0.dist-info"
    record.mkdir()
    (record / "RECORD").write_text('x/__init__.py,sha256=a,1\n"x/a,b.so",,\n')
    [one] = distributions([str(tmp_path)])
    assert one.files() == ("x/__init__.py", "x/a,b.so")
    (record / "RECORD").write_bytes(b"\xff\xfe")
    assert one.files() is None
