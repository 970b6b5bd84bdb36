# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The processors' time that control groups allow a process, of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

from xpuruntime.runtime.cpu_and_memory import cpu_quota


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
