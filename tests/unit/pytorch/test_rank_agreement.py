# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processes over gloo that run the same kernels, and end together with the name of a rank that failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from rank_programs import check_others_end, run_ranks  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xrt_torch  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started by a fork server, and killed"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no distributed training"),
]


def test_one_rank_measures_and_all_run_what_it_chose(tmp_path: Path) -> None:
    ranks = run_ranks("auto", tmp_path, 3)
    assert [rank["code"] for rank in ranks] == [0, 0, 0], ranks
    kernels = ranks[0]["kernels"]
    assert len(kernels) == 4
    assert all(rank["kernels"] == kernels for rank in ranks), ranks
    measured = [key for rank in ranks for key in rank["measured"]]
    assert measured
    assert len(measured) == len(set(measured)), "a kind of call was measured by more than one rank"


def test_no_rank_waits_for_what_nobody_measures(tmp_path: Path) -> None:
    ranks = run_ranks("cancelled", tmp_path, 2)
    assert [rank["code"] for rank in ranks] == [0, 0], ranks
    assert ranks[0]["kernels"] == ranks[1]["kernels"]
    assert set(ranks[0]["kernels"].values()) == {"torch.mm"}
    assert ranks[0]["measured"] == ranks[1]["measured"] == []


def test_a_rank_with_another_library_is_named_by_all(tmp_path: Path) -> None:
    ranks = run_ranks("other_library", tmp_path, 2)
    for number, rank in enumerate(ranks):
        assert "libcudnn.so.77" in rank["error"], ranks
        assert "rank " in rank["error"]
        assert "kernels" not in rank, number


def test_a_rank_with_another_version_is_the_odd_one_on_all(tmp_path: Path) -> None:
    for rank in run_ranks("other_version", tmp_path, 3):
        assert rank["error"].startswith("InputError: rank 2 has xpuruntime '9.9', and rank 0 has"), rank


@pytest.mark.parametrize("count", [2, 8])
def test_a_lock_made_on_one_rank_holds_on_all(count: int, tmp_path: Path) -> None:
    ranks = run_ranks("lock_for_all", tmp_path, count)
    assert len({rank["digest"] for rank in ranks} | {ranks[0]["first"]}) == 1, ranks
    report = ranks[-1]["report"]
    assert (report["odd"], report["differences"]) == ([], [])
    assert [rank["rank"] for rank in report["ranks"]] == list(range(count))
    assert {rank["lock"] for rank in report["ranks"]} == {ranks[0]["digest"]}


def test_the_report_of_all_ranks_names_the_odd_one(tmp_path: Path) -> None:
    for rank in run_ranks("odd_rank", tmp_path, 3):
        assert rank["report"]["odd"] == [2], rank
        (difference,) = rank["report"]["differences"]
        assert difference.startswith("library libscipy_openblas.so.77: rank 2 has "), difference
        assert difference.endswith(", rank 0 nothing")


@pytest.mark.parametrize("program", ["measured_kernel", "tuned_step", "captured_step", "locked_step"])
def test_a_rank_that_fails_ends_the_others_with_its_name(program: str, tmp_path: Path) -> None:
    check_others_end(program, tmp_path, 3)


def test_a_single_process_agrees_with_itself() -> None:
    with xrt_torch.RankAgreement(1.0) as ranks:
        assert (ranks.count, ranks.gather(3), ranks.share(4)) == (1, [3], 4)
    with pytest.raises(xrt.InputError, match="seconds above 0"):
        xrt_torch.RankAgreement(0)
