# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Meters of energy: RAPL's counters as files, and refusals where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring.conditions import open_meter


def package(folder: Path, name: str, used: int, wraps_at: int = 10_000_000) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "energy_uj").write_text(f"{used}\n")
    (place / "max_energy_range_uj").write_text(f"{wraps_at}\n")
    return place / "energy_uj"


def test_packages_are_added_and_their_parts_left_out(tmp_path):
    first, second = package(tmp_path, "intel-rapl:0", 1_000_000), package(tmp_path, "intel-rapl:1", 5_000_000)
    package(tmp_path, "intel-rapl:0:0", 7)
    meter = open_meter("cpu", tmp_path)
    before = meter.read()
    first.write_text("3000000\n")
    second.write_text("5500000\n")
    assert meter.joules(before, meter.read()) == 2.5


def test_a_counter_may_begin_again(tmp_path):
    counter = package(tmp_path, "intel-rapl:0", 9_000_000)
    meter = open_meter("cpu", tmp_path)
    before = meter.read()
    counter.write_text("500000\n")
    assert meter.joules(before, meter.read()) == 1.5


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UnsupportedOperationError, match=r"shows no RAPL counter in .* Fix: take another objective"):
        open_meter("cpu", tmp_path)
    package(tmp_path, "intel-rapl:0", 1).unlink()
    with pytest.raises(UnsupportedOperationError, match="energy_uj: No such file"):
        open_meter("cpu", tmp_path)
    with pytest.raises(UnsupportedOperationError, match="energy of npu cannot be measured"):
        open_meter("npu")
