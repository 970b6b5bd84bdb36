# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processes over gloo that run the same kernels, and end together with the name of a rank that failed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from rank_programs import check_others_end, run_ranks  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xrt_torch  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path
pytest.importorskip("torch")

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


def test_a_lock_made_on_one_rank_holds_on_all(tmp_path: Path) -> None:
    count = 3
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


# Tuned steps have tests of their own below; on GPUs each program fails in each way.
@pytest.mark.parametrize(
    ("program", "kind"),
    [("measured_kernel", "hangs"), ("captured_step", "out_of_memory"), ("locked_step", "killed")],
)
def test_a_rank_that_fails_ends_the_others_with_its_name(program: str, kind: str, tmp_path: Path) -> None:
    check_others_end(program, tmp_path, 3, kinds=(kind,))


def test_a_single_process_agrees_with_itself() -> None:
    with xrt_torch.RankAgreement(1.0) as ranks:
        assert (ranks.count, ranks.gather(3), ranks.share(4)) == (1, [3], 4)
    with pytest.raises(xrt.InputError, match="seconds above 0"):
        xrt_torch.RankAgreement(0)


#: Each case is done by both ranks, one after the other in one pair of processes. The last one kills rank 1.
RANKS = """
    import datetime, json, os, platform, signal, sys, time
    import torch
    import xpuruntime
    import xpuruntime.pytorch as xrt_torch
    from xpuruntime.policies import KernelPolicy

    rank, where, second = int(sys.argv[1]), sys.argv[2], int(sys.argv[1]) == 1
    torch.distributed.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
    )
    x, y = torch.full((4, 8), float(rank + 1)), torch.ones(4, 1)

    def case(name, fault=None, *, at=10**9, ddp=False, kernel="cpu.reference", **options):
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 1)
        model = torch.nn.parallel.DistributedDataParallel(net) if ddp else net
        sgd, count = torch.optim.SGD(model.parameters(), 0.01), [0]

        def loss(x, y):
            count[0] += 1
            if count[0] == at and second:
                fault()
            return (model(x) - y).square().mean()

        try:
            tuned = xrt_torch.tune(loss, (x, y), optimizer=sgd, kernels={"k": KernelPolicy(matmul=kernel)}, **{
                "launches": ["eager"], "rounds": (3, 3), "budget": 2.0, "rank_timeout": 15.0, **options
            })
            with tuned:
                tuned(x, y)
            said = [tuned.name, [row.code for row in tuned.candidates], [float(p.sum()) for p in net.parameters()]]
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([name, said]), flush=True)

    def fail():
        raise ValueError("planted")

    def interrupt(*_):
        raise KeyboardInterrupt

    case("same", ddp=True)
    case("variants", launches=["eager", "capture"] if second else ["eager"])
    case("policy", kernel="cpu.blas" if second else "cpu.reference")
    case("argument", rounds=(1, 2) if second else (3, 3))
    real, platform.machine = platform.machine, (lambda: "riscv64") if second else platform.machine
    case("device")
    platform.machine = real
    version = xpuruntime.__version__
    xpuruntime.__version__ = "9.9" if second else version
    case("version")
    xpuruntime.__version__ = version
    case("eager step", fail, at=1)
    case("race", fail, at=40)
    case("callback", progress=(lambda _: fail()) if not second else None)
    case("interrupted first", progress=interrupt if not second else None)
    case("interrupted second", interrupt, at=40)
    case("silent", lambda: time.sleep(6), at=40, rank_timeout=4.0)
    case("killed", lambda: os.kill(os.getpid(), signal.SIGKILL), at=40, rank_timeout=4.0)
    os._exit(0)
"""


LOST = "EngineError: rank {} failed, so rank {} stops. Rank {}: "


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return what each rank said of each case."""
    where = f"file://{tmp_path_factory.mktemp('ranks') / 'meeting'}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANKS), str(rank), where],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, -9], ended
    rows = [[json.loads(line) for line in out.splitlines() if line.startswith("[")] for out, _ in ended]
    return [dict(rank) for rank in rows]


def test_ranks_decide_the_same(ranks: list[dict[str, object]]) -> None:
    first, second = ranks
    assert first["same"] == second["same"]
    assert first["same"][0] == "eager"  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "fact", "value"),
    [
        ("variants", "variants", "eager+k, capture"),
        ("policy", "for eager+k", "cpu.blas"),
        ("device", "device", "riscv64"),
        ("version", "xpuruntime", "9.9"),
    ],
)
def test_ranks_that_differ_are_refused_on_all(ranks: list[dict[str, object]], name: str, fact: str, value: str) -> None:
    for rank, said in enumerate(ranks):
        assert str(said[name]).startswith(f"InputError: rank 1 has {fact} '"), (rank, said[name])
        assert value in str(said[name])


@pytest.mark.parametrize(
    ("name", "failing", "what", "own"),
    [
        ("argument", 1, "its arguments", "InputError: tune: rounds is (1, 2)"),
        ("eager step", 1, "the eager step", "ValueError: planted"),
        ("race", 1, "steps of 'eager", "ValueError: planted"),
    ],
)
def test_what_fails_on_one_rank_is_named_on_the_other(
    ranks: list[dict[str, object]], name: str, failing: int, what: str, own: str
) -> None:
    assert str(ranks[failing][name]).startswith(own), ranks[failing][name]
    said = str(ranks[1 - failing][name])
    assert said.startswith(f"EngineError: tune: failed in {what}"), said
    assert f"so rank {1 - failing} stops. rank {failing}: {own}" in said


def test_a_rank_that_leaves_or_is_silent_is_named_on_the_other(ranks: list[dict[str, object]]) -> None:
    first, second = ranks
    assert (first["interrupted first"], second["interrupted second"]) == ("KeyboardInterrupt: ",) * 2
    assert str(first["callback"]).startswith("ValueError: planted")
    for name, reason in (("interrupted first", "KeyboardInterrupt"), ("callback", "ValueError: planted")):
        assert str(second[name]).startswith(LOST.format(0, 1, 0) + reason), second
    for name, reason in (
        ("interrupted second", "KeyboardInterrupt"),
        ("silent", "was silent for"),
        ("killed", "gave no sign of life"),
    ):
        assert str(first[name]).startswith(LOST.format(1, 0, 1) + reason), first[name]
    assert "killed" not in second
