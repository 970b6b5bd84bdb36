# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A communicator of one rank, on one GPU: its life, its arrays and its streams."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt
from xpuruntime import distributed

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[False, True], ids=["non-blocking", "blocking"])
def comm(request: pytest.FixtureRequest) -> Iterator[distributed.Communicator]:
    policy = distributed.CollectivePolicy(blocking=request.param)
    with distributed.Communicator.init(0, 1, device="cuda:0", timeout=30, config=policy) as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_rank_keeps_what_it_has(comm: distributed.Communicator, dtype: torch.dtype) -> None:
    x = torch.arange(24, device="cuda").reshape(4, 6).to(dtype)
    for found in (
        comm.all_reduce(x),
        comm.all_reduce(x, "max"),
        comm.reduce(x),
        comm.broadcast(x),
        comm.all_gather(x),
        comm.reduce_scatter(x),
    ):
        assert found.data_ptr() != x.data_ptr()
        assert torch.equal(found, x)
    assert comm.all_gather(x, out=torch.empty(1, 4, 6, device="cuda", dtype=dtype)).shape == (1, 4, 6)
    got = torch.empty_like(x)
    with comm.group():
        comm.send(x, 0)
        comm.recv(got, 0)
    assert torch.equal(got, x)
    comm.barrier()
    comm.check()
    comm.synchronize(timeout=10)


def test_it_says_what_it_is(comm: distributed.Communicator) -> None:
    assert (comm.rank, comm.world_size, comm.device) == (0, 1, "cuda:0")
    assert comm.nccl_version >= (2, 18, 0)
    assert "libnccl.so" in comm.library
    assert repr(comm).startswith("Communicator(rank=0, world_size=1, device='cuda:0', 2.")


def test_results_wait_for_their_stream(comm: distributed.Communicator) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(50_000_000)
    x.fill_(3)
    assert float(comm.all_reduce(x, stream=xrt.Stream("cuda:0")).amin()) == 3


def test_the_current_device_stays(comm: distributed.Communicator) -> None:
    before = torch.cuda.current_device()
    comm.all_reduce(torch.ones(3, device="cuda:0"))
    assert torch.cuda.current_device() == before


def test_empty_arrays(comm: distributed.Communicator) -> None:
    empty = torch.empty(0, 3, device="cuda")
    for found in (comm.all_reduce(empty), comm.all_gather(empty), comm.reduce_scatter(empty), comm.broadcast(empty)):
        assert found.shape == (0, 3)


def test_what_it_refuses(comm: distributed.Communicator) -> None:
    x = torch.ones(4, 6, device="cuda")
    with pytest.raises(xrt.InputError, match="'x' is on cpu, and this communicator is on cuda:0"):
        comm.all_reduce(x.cpu())
    with pytest.raises(xrt.InputError, match=r"not contiguous.*Fix: pass x\.contiguous\(\)"):
        comm.all_reduce(x.T)
    with pytest.raises(xrt.InputError, match="'out' is float64, and the result is float32"):
        comm.all_reduce(x, out=x.double())
    with pytest.raises(xrt.UnsupportedOperationError, match="int16, which NCCL cannot reduce"):
        comm.all_reduce(x.to(torch.int16))
    with pytest.raises(xrt.UnsupportedOperationError, match="requires a gradient"):
        comm.all_reduce(x.clone().requires_grad_())
    assert torch.equal(comm.all_reduce(x), x)


def test_capture(comm: distributed.Communicator) -> None:
    x = torch.zeros(1000, device="cuda")
    comm.all_reduce(x)
    comm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = comm.all_reduce(x + 1)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert float(found.amin()) == value + 1
    del graph


def test_after_close_and_abort() -> None:
    x = torch.ones(3, device="cuda")
    for end in ("close", "abort"):
        made = distributed.Communicator.init(0, 1, device=0)
        made.all_reduce(x)
        getattr(made, end)()
        assert made.closed
        made.close()
        with pytest.raises(
            xrt.EngineError, match=r"all_reduce on rank 0 of 1: this communicator .* Fix: make a new one"
        ):
            made.all_reduce(x)
    assert float(x.sum()) == 3


def test_dropping_one_warns_and_frees_it() -> None:
    made = distributed.Communicator.init(0, 1, device=0)
    made.all_reduce(torch.ones(3, device="cuda"))

    def drop() -> None:
        nonlocal made
        del made
        gc.collect()

    with pytest.warns(ResourceWarning, match="was dropped without close"):
        drop()


def test_the_environment_stays_as_it_was() -> None:
    before = dict(os.environ)
    policy = distributed.CollectivePolicy(algorithm="ring", protocol="simple", max_channels=4)
    with distributed.Communicator.init(0, 1, device=0, config=policy) as made:
        assert dict(os.environ) == before
        assert made.policy == policy


def test_many_one_after_the_other() -> None:
    for _ in range(5):
        with distributed.Communicator.init(0, 1, device=0) as made:
            made.barrier()
