# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: PT017 - assertions of a program that pytest does not run
"""What each rank does: ``nccl_work.py NAME RANK RANKS PORT [...]``, a process of its own, GPU = rank."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import nccl_lost_peers
import torch
from nccl_rank import Rank

import xpuruntime as xrt
from xpuruntime import distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
SIZES = (1, 1000, 1 << 20)


def close_to(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-2 if found.dtype.itemsize == 2 else 1e-6, atol=0)


def check_reductions(here: Rank, comm: distributed.Communicator, size: int, dtype: torch.dtype) -> None:
    inputs = here.all_inputs(size, dtype)
    mine, wide = inputs[here.rank].clone(), inputs.double()
    wanted = {"sum": wide.sum(0), "prod": wide.prod(0), "max": wide.amax(0), "min": wide.amin(0)}
    if dtype.is_floating_point:
        wanted["avg"] = wide.mean(0)
    for op, expected in wanted.items():
        close_to(comm.all_reduce(mine, op), expected)
        reduced = comm.reduce(mine, op, root=here.ranks - 1)
        if here.rank == here.ranks - 1:
            close_to(reduced, expected)
        else:
            assert reduced is None
        parts = inputs.repeat(1, here.ranks)[here.rank].reshape(here.ranks, size)
        close_to(comm.reduce_scatter(parts, op), expected.reshape(1, size))
    assert torch.equal(mine, inputs[here.rank]), "an input was changed"
    place = mine.clone()
    assert comm.all_reduce(place, out=place) is place
    close_to(place, wanted["sum"])
    out = torch.empty_like(mine)
    assert comm.all_reduce(mine, "max", out=out) is out
    close_to(out, wanted["max"])


def check_moves(here: Rank, comm: distributed.Communicator, size: int, dtype: torch.dtype) -> None:
    inputs = here.all_inputs(size, dtype)
    mine = inputs[here.rank].clone()
    assert torch.equal(comm.all_gather(mine), inputs.reshape(-1))
    stacked = torch.empty_like(inputs)
    assert torch.equal(comm.all_gather(mine, out=stacked), inputs)
    stacked.zero_()
    stacked[here.rank] = mine
    assert torch.equal(comm.all_gather(stacked[here.rank], out=stacked), inputs), "in place"
    for root in range(here.ranks):
        assert torch.equal(comm.broadcast(mine, root), inputs[root])
    place = mine.clone()
    comm.broadcast(place, 0, out=place)
    assert torch.equal(place, inputs[0])
    got = torch.empty_like(mine)
    with comm.group():
        comm.send(mine, (here.rank + 1) % here.ranks)
        comm.recv(got, (here.rank - 1) % here.ranks)
    assert torch.equal(got, inputs[(here.rank - 1) % here.ranks])


def collectives(here: Rank) -> None:
    for blocking in (False, True):
        with here.communicator(blocking=blocking) as comm:
            assert (comm.rank, comm.world_size, comm.device) == (here.rank, here.ranks, here.device)
            for dtype in DTYPES:
                for size in SIZES:
                    check_reductions(here, comm, size, dtype)
                    check_moves(here, comm, size, dtype)
            for dtype in (torch.bool, torch.int16, torch.uint8):  # moved, some as bytes
                check_moves(here, comm, 1001, dtype)
            flags = torch.tensor([here.rank == 0, True, False], device=here.device)
            assert comm.all_reduce(flags, "max").tolist() == [True, True, False]
            assert comm.all_reduce(flags, "min").tolist() == [here.ranks == 1, True, False]
            empty = torch.empty(0, 3, device=here.device)
            assert comm.all_reduce(empty).shape == (0, 3)
            comm.check()
            comm.barrier()
            comm.synchronize()
            print("blocking" if blocking else "non-blocking", "ok, NCCL", comm.nccl_version)


def fp8(here: Rank) -> None:
    with here.communicator() as comm:
        if comm.nccl_version < (2, 24):
            print("this NCCL has no fp8")
            return
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            x = torch.full((1024,), 2.0 ** (here.rank + 1), device=here.device).to(dtype)
            assert (comm.all_gather(x).float().reshape(2, -1).mean(1).tolist()) == [2.0, 4.0]
            assert comm.all_reduce(x).float().unique().tolist() == [6.0]
        print("fp8 ok")


def arrays(here: Rank) -> None:
    """CuPy's arrays and ours, groups of several calls, and what is refused here alone."""
    import cupy

    with here.communicator() as comm:
        with cupy.cuda.Device(here.rank):
            x = cupy.full(1000, here.rank + 1, cupy.float32)
            total = comm.all_reduce(x)
            assert isinstance(total, cupy.ndarray)
            assert float(total[7]) == 3.0
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                y = cupy.full(1 << 20, here.rank + 1, cupy.float64)
                assert float(comm.all_gather(y).sum()) == 3.0 * (1 << 20)
        tensor = xrt.Tensor.from_numpy(torch.full((64,), here.rank + 1.0).numpy()).to(here.device)
        summed = comm.all_reduce(tensor, stream=xrt.Stream(here.device))
        assert isinstance(summed, xrt.Tensor)
        assert summed.to("cpu").numpy().tolist() == [3.0] * 64
        many = [torch.full((n,), here.rank + 1.0, device=here.device) for n in (1, 1000, 100000)]
        with comm.group():
            sums = [comm.all_reduce(one) for one in many]
            gathered = comm.all_gather(many[1])
        assert all(bool((sum_ == 3.0).all()) for sum_ in sums)
        assert gathered.shape == (2000,)
        try:
            with comm.group():
                comm.all_reduce(many[0])
                comm.all_reduce(many[1][::2])
        except xrt.InputError as error:
            assert "not contiguous" in str(error)
        else:
            raise AssertionError("a view with holes was taken")
        for wrong in (many[0].cpu(), many[1].reshape(10, 100).T, many[0].to(torch.complex64)):
            try:
                comm.all_reduce(wrong)
            except (xrt.InputError, xrt.UnsupportedOperationError):
                continue
            raise AssertionError(f"{wrong.dtype} on {wrong.device} was taken")
        assert float(comm.all_reduce(many[0])) == 3.0, "it works on after what was refused"
        print("arrays ok")


def streams(here: Rank) -> None:
    """Work is ordered with what comes before and after it, on whichever streams that is."""
    with here.communicator() as comm:
        side, other = torch.cuda.Stream(), xrt.Stream(here.device)
        for stream in (None, other, torch.cuda.Stream(), torch.cuda.Stream().cuda_stream):
            for turn in range(3):
                with torch.cuda.stream(side):
                    x = torch.zeros(1 << 20, device=here.device)
                    torch.cuda._sleep(20_000_000)  # so that a call that does not wait reads zeros
                    x.fill_(here.rank + 1 + turn)
                    total = comm.all_reduce(x, stream=stream)
                    seen = total.amin()
                    del x, total  # their memory is used again at once
                    torch.zeros(1 << 20, device=here.device).fill_(-1)
                side.synchronize()
                assert float(seen) == 3 + 2 * turn, (stream, turn, float(seen))
        comm.synchronize()
        print("streams ok")


def graphs(here: Rank) -> None:
    blocking = here.arguments[0] == "blocking"
    comm = here.communicator(blocking=blocking)
    x = torch.zeros(1 << 16, device=here.device)
    for _ in range(3):  # connections are made outside of the capture
        comm.all_reduce(x), comm.all_gather(x), comm.reduce_scatter(x)
    comm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = comm.all_reduce(x * 2)
        gathered = comm.all_gather(x)
        part = comm.reduce_scatter(total)
    for turn in range(5):
        x.fill_(here.rank + turn)
        graph.replay()
        torch.cuda.synchronize()
        assert float(total.amin()) == float(total.amax()) == 2 * (1 + 2 * turn)
        assert gathered.reshape(2, -1).amax(1).tolist() == [turn, turn + 1]
        assert float(part.amax()) == 4 * (1 + 2 * turn)
    ours, stream = xrt.Graph(), xrt.Stream(here.device)
    fixed = xrt.Tensor.from_dlpack(x).order_on(stream)
    with ours.capture(stream):
        comm.all_reduce(fixed, out=fixed, stream=stream)
    x.fill_(here.rank + 1)
    torch.cuda.synchronize()
    ours.replay(stream)
    comm.synchronize(stream=stream)
    assert float(x.amin()) == 3.0
    for _ in range(20):
        graph.replay()
    comm.synchronize(stream=torch.cuda.current_stream())
    del graph, ours
    comm.close()
    print("graphs ok")


def graph_kept(here: Rank) -> None:
    """NCCL waits for graphs when a communicator is closed; that is said, and does not hold up the process."""
    comm = here.communicator()
    x = torch.ones(1 << 16, device=here.device)
    comm.all_reduce(x, out=x)
    comm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, out=x)
    graph.replay()
    torch.cuda.synchronize()
    start = time.monotonic()
    try:
        comm.close(timeout=3)
    except xrt.EngineError as error:
        assert "A CUDA graph in which its calls were captured may be alive" in str(error), error
        print("said so:", error)
    else:
        print("this NCCL closes with graphs alive")
    assert time.monotonic() - start < 30
    assert comm.closed
    sys.stdout.flush()
    os._exit(0)


def policies(here: Rank) -> None:
    """Each communicator has its own policy; NCCL's log says what ran."""
    x = torch.ones(1 << 20, device=here.device)
    small = torch.ones(256, device=here.device)
    for fields in (
        {"algorithm": "ring", "protocol": "simple", "max_channels": 2},
        {"algorithm": "tree", "protocol": "ll"},
        {"algorithm": "ring", "protocol": "ll128", "min_channels": 4, "max_channels": 4},
        {},
    ):
        assert "NCCL_ALGO" not in os.environ
        with here.communicator(**fields) as comm:
            assert "NCCL_ALGO" not in os.environ
            assert float(comm.all_reduce(x).amax()) == here.ranks
            assert float(comm.all_gather(small).amax()) == 1
            comm.synchronize()
    if os.environ.get("NCCL_NVLS_ENABLE") == "0":
        try:
            here.communicator(algorithm="nvls")
        except xrt.UnsupportedOperationError as error:
            assert "NCCL_NVLS_ENABLE=0" in str(error)
        else:
            raise AssertionError("nvls was taken where it is switched off")
    print("policies ok")


def several(here: Rank) -> None:
    """Communicators side by side, and beside one of torch.distributed that uses the same library."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", here.port, here.ranks, here.rank == 0)
    dist.init_process_group("nccl", store=store, rank=here.rank, world_size=here.ranks)
    make = distributed.Communicator.init
    first = make(here.rank, here.ranks, init_method=store, device=here.device)
    second = make(here.rank, here.ranks, init_method=store, device=here.rank)
    third = make(here.rank, here.ranks, init_method=f"tcp://127.0.0.1:{here.arguments[0]}", device=here.device)
    x = torch.full((1000,), here.rank + 1.0, device=here.device)
    for _ in range(3):
        theirs = x.clone()
        dist.all_reduce(theirs)
        for comm in (first, second, third):
            assert torch.equal(comm.all_reduce(x), theirs)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    assert len(loaded) == 1, loaded
    assert os.path.realpath(first.library) == os.path.realpath(loaded.pop())
    for comm in (first, second, third):
        comm.close()
    dist.destroy_process_group()
    print("several ok")


def tuned_step(here: Rank) -> None:
    """A process group ends after a tuned step dropped its graphs: NCCL waits for those that hold its operations."""
    import torch.distributed as dist

    import xpuruntime.pytorch as xt
    from xpuruntime.pytorch.step_tuning.variants import LAUNCHES

    store = dist.TCPStore("127.0.0.1", here.port, here.ranks, here.rank == 0)
    dist.init_process_group("nccl", store=store, rank=here.rank, world_size=here.ranks)
    torch.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256, device=here.device))
    torch.cuda.synchronize()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=here.device), capturable=True)
    batch = (torch.randn(64, 256, device=here.device), torch.randn(64, 256, device=here.device))
    tuned = xt.tune(
        lambda x, y: (model(x) - y).square().mean(), batch, optimizer=optimizer, launches=LAUNCHES,
        rounds=(3, 9), budget=10.0,
    )  # fmt: skip
    codes = {row.name: row.code for row in tuned.candidates}
    assert not {"failed", "infeasible"} & {codes[name] for name in ("capture", "compile:reduce-overhead")}, codes
    with tuned:
        losses = [float(tuned(*batch)) for _ in range(3)]
    assert losses[2] < losses[0], losses
    tuned.reset()
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - start < 30
    print("tuned step ok", tuned.name)


def threads(here: Rank) -> None:
    """Ranks may be threads of one process."""
    from concurrent.futures import ThreadPoolExecutor

    def run(rank: int) -> float:
        torch.cuda.set_device(rank)
        with distributed.Communicator.init(rank, 2, init_method=here.method, device=rank) as comm:
            x = torch.full((1 << 16,), rank + 1.0, device=f"cuda:{rank}")
            for _ in range(10):
                total = comm.all_reduce(x)
            comm.synchronize()
            return float(total.amax())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [3.0, 3.0]
    print("threads ok")


def torchrun_main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(2):
        with distributed.init_from_env() as comm:
            assert (comm.rank, comm.device) == (rank, f"cuda:{os.environ['LOCAL_RANK']}")
            total = comm.all_reduce(torch.full((10,), rank + 1.0, device=comm.device))
            comm.synchronize()
            assert total.tolist() == [3.0] * 10


def other_policy(here: Rank) -> None:
    try:
        here.communicator(timeout=30, **({"algorithm": "tree"} if here.rank else {"algorithm": "ring"}))
    except xrt.EngineError as error:
        assert "asks for CollectivePolicy(algorithm='tree'), and rank 0" in str(error), error
    else:
        raise AssertionError("two policies were taken")


def same_gpu(here: Rank) -> None:
    here.device = "cuda:0"
    try:
        here.communicator(timeout=30)
    except xrt.EngineError as error:
        assert "use the same GPU" in str(error), error
    else:
        raise AssertionError("one GPU for two ranks was taken")


def batch(here: Rank) -> None:
    """Run several one after the other, and say how each went."""
    for words in here.arguments:
        name, *rest = words.split(":")
        start = time.monotonic()
        try:
            globals()[name](Rank(here.rank, here.ranks, here.port, rest))
        except Exception:
            print(f"FAIL {words}\n{traceback.format_exc()}")
        else:
            print(f"PASS {words} in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    if sys.argv[1] == "torchrun_main":
        torchrun_main()
    else:
        _, name, rank, ranks, port, *rest = sys.argv
        work = vars(nccl_lost_peers).get(name) or globals()[name]
        work(Rank(int(rank), int(ranks), int(port), rest))
