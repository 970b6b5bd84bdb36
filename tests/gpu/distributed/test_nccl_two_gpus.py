# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Collectives between two GPUs: right results, CUDA graphs, policies, and peers that die.

Each test starts a process for each rank, gives it a limit, and kills what is left.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from nccl_ranks import WORK, free_port, run_commands, run_ranks

import xpuruntime as xrt
from xpuruntime.distributed import read_choices

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(xrt.get_device_count("cuda") < 2, reason="needs two CUDA devices")


#: What the first pair of processes does, in this order; `policies` is last, because its log is read from the end.
BATCH = (
    "collectives", "fp8", "arrays", "streams", "graphs:non-blocking", "graphs:blocking", "several", "other_policy",
    "same_gpu", "policies",
)  # fmt: skip


class Batch(NamedTuple):
    """What each rank printed, and the folder of NCCL's logs."""

    said: list[str]
    folder: Path


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    folder = tmp_path_factory.mktemp("nccl")
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": str(folder / "%p.log")}
    names = [f"{name}:{free_port()}" if name == "several" else name for name in BATCH]
    return Batch(run_ranks("batch", *names, seconds=280, env=log), folder)


@pytest.mark.parametrize("name", BATCH)
def test_two_ranks_work_together(batch: Batch, name: str) -> None:
    for rank, said in enumerate(batch.said):
        assert f"PASS {name}" in said, f"rank {rank}:\n{said}"


def test_a_policy_is_what_nccl_says_it_ran(batch: Batch) -> None:
    (choices,) = [found for path in batch.folder.glob("*.log") if (found := read_choices(path))]  # rank 0 writes them
    reduced = [choice for choice in choices if choice.collective == "all_reduce" and choice.bytes == 4 << 20][-4:]
    assert [(one.algorithm, one.protocol) for one in reduced[:3]] == [
        ("ring", "simple"),
        ("tree", "ll"),
        ("ring", "ll128"),
    ]
    assert reduced[0].channels is not None
    assert reduced[0].channels <= 2
    assert reduced[2].channels == 4
    gathered = [choice for choice in choices if choice.collective == "all_gather"][-4:]
    assert [one.protocol for one in gathered[:3]] == ["simple", "ll", "ll128"]
    assert gathered[1].algorithm == "ring", "a tree is of all_reduce, and others go on as they can"


def test_closing_while_a_graph_is_alive_says_so() -> None:
    run_ranks("graph_kept")


def test_a_process_group_ends_after_a_tuned_step() -> None:
    run_ranks("tuned_step", seconds=280)


def test_ranks_that_are_threads() -> None:
    run_ranks("threads", ranks=1)


def test_torchrun() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(WORK), "torchrun_main",
    ]  # fmt: skip
    run_commands([command], seconds=150, env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))})


def test_a_peer_that_was_killed() -> None:
    run_ranks("peer_killed", expected=(0, -signal.SIGKILL))


@pytest.mark.parametrize("name", ["peer_stuck", "peer_absent", "peer_lost_on_the_way", "error_in_the_block"])
def test_a_peer_that_does_not_answer(name: str) -> None:
    run_ranks(name)


def test_sharded_steps_run_the_same_kernels_and_hold_one_lock() -> None:
    run_ranks("sharded_lock", seconds=200)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_peer_that_is_lost_between_captured_steps_is_named(how: str) -> None:
    first, _ = run_ranks(
        "captured_peer_lost", how, seconds=100, expected=(1, -signal.SIGKILL if how == "killed" else 1)
    )
    assert "rank 1 failed, so rank 0 stops" in first, first
