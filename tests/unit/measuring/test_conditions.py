# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conditions of a measurement: read from the files of Linux, and put into words."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from xpuruntime.measuring import conditions
from xpuruntime.measuring.conditions import GpuClock, Moment, between, moment


def test_what_this_machine_says_is_read():
    before = moment()
    time.sleep(0.05)
    found = between(before, moment())
    assert found.seconds >= 0.05
    assert found.cores == os.cpu_count()
    if Path("/proc/stat").exists():
        assert found.load is not None
        assert found.load[0] == pytest.approx(os.getloadavg()[0], abs=5)
        assert found.steal is not None
        assert 0 <= found.steal <= 1
    assert msgspec.json.decode(msgspec.json.encode(found), type=conditions.Conditions) == found


def test_counters_are_differences_and_have_words():
    gpu = GpuClock(index=0, sm_mhz=900, max_sm_mhz=1980, throttled_by=("sw_power_cap",))
    before = Moment(
        seconds=1.0, load=0.5, throttled_periods=10, throttled_us=1_000_000, cpu_ticks=(1000, 10), cpu_mhz=3000.0
    )
    after = Moment(
        seconds=3.0, load=999.0, throttled_periods=14, throttled_us=1_500_000, cpu_ticks=(1400, 50), cpu_mhz=2000.0,
        gpus=(gpu,),
    )  # fmt: skip
    found = between(before, after)
    assert (found.throttled_periods, found.throttled_share, found.steal) == (4, 0.25, 0.1)
    text = "; ".join(found.remarks())
    for part in ("the load was 999.0", "throttled in 4 periods", "10% of the processor time was stolen", "to 2000 MHz"):
        assert part in text
    assert "cuda:0 ran at 900 of 1980 MHz: sw_power_cap" in text
    assert between(Moment(seconds=0.0), Moment(seconds=1.0)).remarks() == [], "what is not known is not said"


@pytest.mark.parametrize(
    ("groups", "folder", "text", "expected"),
    [
        ("0::/a/b\n", "a/b", "usage_usec 9\nnr_periods 7\nnr_throttled 3\nthrottled_usec 1234\n", (3, 1234)),
        ("0::/gone\n", ".", "nr_throttled 2\nthrottled_usec 5\n", (2, 5)),
        ("4:cpuacct,cpu:/x\n3:memory:/y\n", "cpu/x", "nr_throttled 1\nthrottled_time 7000\n", (1, 7)),
        ("0::/a\n", "a", "usage_usec 9\n", (None, None)),
        ("0::/a\n", "a", "not a number\nat all", (None, None)),
    ],
)
def test_throttling_is_read_of_both_versions_of_control_groups(tmp_path, groups, folder, text, expected):
    (tmp_path / "groups").write_text(groups)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "cpu.stat").write_text(text)
    assert conditions._throttling(tmp_path, tmp_path / "groups") == expected


def test_files_that_are_missing_say_nothing(tmp_path):
    assert conditions._throttling(tmp_path, tmp_path / "none") == (None, None)
    assert conditions._ticks(tmp_path / "none") is None
    assert conditions._cpu_mhz(tmp_path) is None
