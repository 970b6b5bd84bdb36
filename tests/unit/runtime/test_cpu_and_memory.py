# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processors' time and memory that the system allows a process, and the memory that it has."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from xpuruntime.runtime.cpu_and_memory import available_memory, cpu_quota, process_memory, read_status


def test_the_least_of_the_groups_above_a_process(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/pods/one\n")
    (tmp_path / "pods" / "one").mkdir(parents=True)
    assert cpu_quota(tmp_path, groups) is None
    (tmp_path / "pods" / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, groups) == 4
    (tmp_path / "pods" / "one" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, groups) == 1.5
    (tmp_path / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, groups) == 4


def test_the_first_version(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("3:cpu,cpuacct:/one\n2:memory:/two\n")
    folder = tmp_path / "cpu" / "one"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path, groups) is None
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_quota(tmp_path, groups) == 0.5
    assert cpu_quota(tmp_path, tmp_path / "nothing") is None


STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t   512 kB\nVmRSS:\t   300 kB\nThreads:\t3\n"


def test_the_lines_of_status():
    status = read_status(STATUS)
    assert (status.resident, status.most_resident) == (300 * 1024, 512 * 1024)


@pytest.mark.parametrize("text", ["", "VmRSS:\n", "VmRSS:\tmuch kB\n", "VmRSS:\t3 MB\n", "no colon"])
def test_what_is_not_there_is_not_known(text):
    assert (read_status(text).resident, read_status(text).most_resident) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_that_is_touched_is_resident():
    before = process_memory()
    held = np.ones(64 << 20, np.uint8)
    after = process_memory()
    assert after.resident - before.resident > 48 << 20
    assert after.most_resident >= after.resident
    assert held[-1] == 1


def test_available_memory_is_the_least_of_the_system_and_of_each_control_group(tmp_path: Path) -> None:
    (meminfo := tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    groups = tmp_path / "cgroup"
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 8000 * 1024
    assert available_memory(meminfo=groups, groups=groups, root=tmp_path) is None
    groups.write_text("4:memory:/a\n3:cpu:/b\n0::/pod/box\n")
    for folder, limit, used, cache in (("pod/box", "max", 500, 0), ("pod", "9000", 6000, 1000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 12\ninactive_file {cache}\n")
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 4000
    (tmp_path / "memory" / "a").mkdir(parents=True)
    for name, text in (("limit_in_bytes", "3000"), ("usage_in_bytes", "3500"), ("stat", "total_inactive_file 600")):
        (tmp_path / "memory" / "a" / f"memory.{name}").write_text(text)
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 100
