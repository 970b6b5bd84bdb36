# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processes over NCCL, a GPU each: locks that hold on all, and faults of one, in programs that run over gloo, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt

pytest.importorskip("torch")

from rank_programs import check_others_end, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(xrt.get_device_count("cuda") < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("program", ["measured_kernel", "tuned_step", "captured_step", "locked_step"])
def test_a_rank_that_fails_ends_the_other_with_its_name(program: str, tmp_path: Path) -> None:
    check_others_end(program, tmp_path, 2, "nccl")


def test_a_rank_with_another_library_is_named(tmp_path: Path) -> None:
    for rank in run_ranks("other_library", tmp_path, 2, backend="nccl"):
        assert "libcudnn.so.77" in rank["error"], rank


def test_the_report_of_both_ranks_names_the_odd_one(tmp_path: Path) -> None:
    for rank in run_ranks("odd_rank", tmp_path, 2, backend="nccl"):
        assert rank["report"]["odd"] == [1], rank


def test_a_lock_made_on_one_rank_holds_on_both(tmp_path: Path) -> None:
    ranks = run_ranks("lock_for_all", tmp_path, 2, backend="nccl")
    assert len({rank["digest"] for rank in ranks} | {ranks[0]["first"]}) == 1, ranks
    assert all(rank["report"]["odd"] == [] for rank in ranks), ranks
