# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TrainingPolicy` in a plain loop of PyTorch: evidence, lock, resumption, ranks, and how it ends."""

from __future__ import annotations

import json
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")

from tiny_training import POLICY, Net, batches, trained, uneven_step  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xrt_torch  # noqa: E402
from xpuruntime.integrations.training import LOCK_FILE, TrainingPolicy  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.*match(ed)? no call")


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if vars(record).get("xpuruntime.event") == event]


def kernels_of(run: TrainingPolicy) -> dict[str, set[str]]:
    assert run.evidence is not None
    kernels: dict[str, set[str]] = {}
    for row in run.evidence.rows:
        if row.op == "matmul":
            kernels.setdefault(row.module, set()).add(row.resolved)
    return kernels


def test_a_step_is_explained_and_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xpuruntime.train")
    net, seen = Net(), []
    with TrainingPolicy(POLICY, net, on_evidence=lambda run: seen.append(run.step)) as run:
        trained(net, 3)
    assert (run.step, seen, xrt_torch.get_kernel_policy()) == (3, [2], None)
    assert kernels_of(run) == {"first": {"cpu.blas"}, "last": {"cpu.reference"}}
    assert [one.partition(" ")[0] for one in run.unmatched] == ["kernels.rules[1]"]
    assert logged(caplog, "unmatched") == list(run.unmatched)
    assert run.metrics["unmatched"] == 1
    (text,) = logged(caplog, "evidence")
    assert text.startswith("step 2: ")
    assert run.save(tmp_path) == tmp_path / LOCK_FILE
    assert xrt.load_lock(tmp_path / LOCK_FILE).digest == run.lock.digest
    assert json.loads((tmp_path / "xpuruntime-evidence.json").read_text())["schema"] == "xpuruntime.explanation/1"


def test_an_accumulated_step_is_one_step() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    with TrainingPolicy(POLICY, net) as run:
        for number, batch in enumerate(batches(6), 1):
            net(batch).square().mean().backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert run.step == 2
    (row,) = (row for row in run.evidence.rows if (row.module, row.op, row.phase) == ("first", "matmul", "train"))
    assert row.count == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_training_that_breaks_off_leaves_nothing_active(error: type[BaseException], steps: int) -> None:
    net = Net()
    run = TrainingPolicy(POLICY, net)
    with pytest.raises(error), run:  # noqa: PT012 - what breaks off is a loop
        trained(net, steps)
        net(batches(1)[0])
        raise error
    assert xrt_torch.get_kernel_policy() is None
    assert (run.evidence is not None) == (steps == 3)
    with xrt_torch.explain():  # which would be refused while another one is open
        trained(net, 1)
    assert run.step == steps


def test_a_training_that_ends_before_the_step_has_no_evidence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with TrainingPolicy(POLICY, net, evidence_step=5) as run:
        trained(net, 4)
    assert logged(caplog, "evidence") == ["there is no evidence: it is of step 5, and the training had 4"]
    assert (run.save(tmp_path), list(tmp_path.iterdir()), run.metrics) == (None, [], {})


def test_a_resumed_training_replays_the_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xpuruntime.train")
    net = Net()
    with TrainingPolicy(POLICY, net) as first:
        trained(net, 2)
    first.save(tmp_path)
    for policy in (POLICY, None):
        with TrainingPolicy(policy, net, resume=tmp_path) as again:
            trained(net, 2)
        assert kernels_of(again) == kernels_of(first)
        assert again.lock.digest == first.lock.digest
    assert f"{tmp_path / LOCK_FILE} holds, and is replayed" in logged(caplog, "lock")


def test_a_lock_that_does_not_hold_is_refused(tmp_path: Path) -> None:
    net = Net()
    with TrainingPolicy(POLICY, net) as first:
        trained(net, 2)
    first.save(tmp_path)
    with pytest.raises(xrt.LockError, match="another policy"):
        TrainingPolicy({"kernels": {"matmul": "torch"}}, net, resume=tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 4))
    with pytest.raises(xrt.LockError, match="does not hold"), TrainingPolicy(None, wider, resume=tmp_path):
        trained(wider, 2)
    assert xrt_torch.get_kernel_policy() is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(xrt.InputError, match="1 or more"):
        TrainingPolicy(POLICY, evidence_step=0)
    with TrainingPolicy(POLICY, Net()) as run, pytest.raises(xrt.InputError, match="entered already"):
        run.__enter__()


def work(rank: int, address: str, folder: Path, found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    with TrainingPolicy(POLICY, net) as run:
        for batch in batches(2):
            uneven_step(net, rank, batch).backward()
            optimizer.step()
    count = run.metrics["rank_differences"]
    if rank == 0:
        run.save(folder)
    torch.distributed.barrier()
    again = TrainingPolicy(None, net, resume=folder)
    try:
        with again:
            for batch in batches(2):
                uneven_step(net, rank, batch).backward()
                optimizer.step()
    except (xrt.LockError, xrt.EngineError) as error:
        found.put((rank, run.rank_differences, count, again.rank_differences, str(error)))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs a build of PyTorch with distributed training")
def test_kernels_that_differ_between_processes_are_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    address = f"file://{tmp_path}/store"
    workers = [context.Process(target=work, args=(rank, address, folder, found)) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=120)
    for _, differences, count, without_lock, error in results:
        assert count == len(differences) > 0
        assert any(
            difference.startswith("matmul") and "fp64" in difference and "rank 0 nothing" in difference
            for difference in differences
        )
        assert "does not hold" in error, "the lock is that of rank 0"
        assert "rank 1 has no lock, so its libraries are not compared" in without_lock
        assert not any("has nothing" in line for line in without_lock)
