# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders with a tiny random decoder, written once; tests that change one copy it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from generation_folders import write_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder in fp32. Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("decoder") / "fp32")


@pytest.fixture(scope="session")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with weights in int4, which computes in int8. Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("decoder") / "int4", level=4)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a copy of a folder that the test may change."""

    def copied(folder: Path) -> Path:
        number = len(list(tmp_path.iterdir()))
        return shutil.copytree(folder, tmp_path / f"copy{number}")

    return copied
