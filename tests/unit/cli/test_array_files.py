# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files of arrays that unpack to much more than their size, or hold Python objects, are refused."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import numpy as np
import pytest

import xpuruntime
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Result


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 MB that unpacks to 300 MiB."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.npz"
    np.savez_compressed(path, image=np.zeros((300 << 18, 1), np.float32))
    assert path.stat().st_size < 1 << 20
    return path


def test_bombs(xrt: Callable[..., Result], bomb: Path, digits: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (f"@{bomb}", f"image=@{bomb}"):
        result = xrt("run", digits, "--device", "cpu", "--input", value)
        assert result.code == 2
        assert "more than 32 times its size" in result.err
    with pytest.raises(InputError, match="more than 32 times its size"):
        xpuruntime.plan(digits, device="cpu", precision="int8", calibration=bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_compressed_arrays_are_read(xrt: Callable[..., Result], tmp_path: Path, digits: str) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, image=np.zeros((2, 1, 8, 8), np.float32))
    assert xrt("run", digits, "--device", "cpu", "--input", f"@{path}").code == 0


def test_pickles(xrt: Callable[..., Result], tmp_path: Path, digits: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([{}, []], dtype=object), allow_pickle=True)
    result = xrt("run", digits, "--input", f"@{path}")
    assert result.code == 2
    assert "plain arrays" in result.err


def test_headers_of_huge_arrays(xrt: Callable[..., Result], tmp_path: Path, digits: str) -> None:
    path = tmp_path / "x.npy"
    for shape in ((10**13,), (4,) * 99, (2**62, 2**62), (-1,)):
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.write(bytes(16))
        result = xrt("run", digits, "--input", f"@{path}")
        assert result.code == 2, result.err
