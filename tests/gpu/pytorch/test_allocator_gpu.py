# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`set_allocator` on a CUDA device: whose memory tensors have, in which thread, in graphs, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

import xpuruntime.pytorch as xt
from xpuruntime._core import MemoryManager, MemoryPool
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch.allocator.scope import open_scopes

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
#: PyTorch's own pool, in its snapshots.
NATIVE = (0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    kind = torch.cuda.CUDAGraph
    before = kind.capture_begin, kind.capture_end, torch._C._is_multithreading_enabled()
    yield
    xt.reset_allocator()
    assert open_scopes() == []
    assert (kind.capture_begin, kind.capture_end, torch._C._is_multithreading_enabled()) == before
    assert pool_of(torch.empty(8, device="cuda")) == NATIVE


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> MemoryPool:
    return MemoryPool("cuda:0", name=f"of {request.node.name}")


def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the id of PyTorch's pool that a tensor lies in."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("no segment has this tensor")


def uses_of(pool: MemoryPool) -> list:
    return [use for use in xt.allocator_stats().uses if use.pool == pool.name]


def numbers(size_mib: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((size_mib * MIB // 4,), value, device="cuda")


def test_tensors_come_from_the_pool_and_go_back(pool: MemoryPool) -> None:
    with xt.set_allocator(pool=pool) as scope:
        assert (scope.pool, scope.device, scope.closed) == (pool, "cuda:0", False)
        tensor = numbers(64, 2.0)
        assert pool.stats().requested >= 64 * MIB
        (use,) = uses_of(pool)
        assert use.current == pool.stats().requested
        assert (use.scopes, use.device, use.failures) == (1, "cuda:0", 0)
        assert torch.cuda.memory_allocated() >= 64 * MIB  # PyTorch's own numbers go on working
    assert scope.closed
    # The tensor lives on; what else PyTorch kept is back.
    assert pool.stats().requested == 64 * MIB
    assert float(tensor.sum()) == 2.0 * tensor.numel()
    assert uses_of(pool)[0].scopes == 0
    del tensor
    torch.cuda.empty_cache()
    assert pool.stats().current == 0
    assert uses_of(pool) == []


def test_other_tensors_do_not(pool: MemoryPool) -> None:
    before = numbers(4)
    with xt.set_allocator(pool=pool):
        inside = numbers(4)
    after = numbers(4)
    assert pool_of(inside) != NATIVE
    assert pool_of(before) == pool_of(after) == NATIVE


def test_a_plain_call_lasts_until_it_is_reset() -> None:
    xt.set_allocator(enabled=True)
    default = MemoryManager.instance().default_pool("cuda:0")
    tensor = numbers(32)
    assert pool_of(tensor) != NATIVE
    assert default.stats().requested >= 32 * MIB
    xt.reset_allocator()
    assert pool_of(numbers(32)) == NATIVE
    xt.reset_allocator()
    xt.set_allocator(enabled=True)
    xt.set_allocator(enabled=False)
    assert pool_of(numbers(32)) == NATIVE


def test_a_scope_ends_with_an_exception(pool: MemoryPool) -> None:
    with pytest.raises(KeyError), xt.set_allocator(pool=pool):
        raise KeyError
    assert pool_of(numbers(1)) == NATIVE


def test_the_innermost_scope_counts(pool: MemoryPool) -> None:
    other = MemoryPool("cuda:0", name="inner")
    with xt.set_allocator(pool=pool):
        first = numbers(16)
        with xt.set_allocator(pool=other):
            second = numbers(16)
            assert other.stats().requested >= 16 * MIB
        third = numbers(16)
        assert pool_of(first) == pool_of(third) != pool_of(second)
        assert pool.stats().requested >= 32 * MIB
        with xt.set_allocator(pool=pool):  # the same pool again
            numbers(16)
        xt.set_allocator(pool=other)  # ends with the block around it
    assert open_scopes() == []
    assert second.sum() == first.sum()


def test_a_closed_scope_is_not_entered_again(pool: MemoryPool) -> None:
    scope = xt.set_allocator(pool=pool)
    with scope:
        pass
    scope.close()
    with pytest.raises(UnsupportedOperationError, match="is closed: call set_allocator"), scope:
        pass


def test_results_are_the_same(pool: MemoryPool) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(32, 64, device="cuda")
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = train()
    with xt.set_allocator(pool=pool):
        got = train()
        assert all(pool_of(one) != NATIVE for one in got)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("route", [True, False])
def test_backward_passes_are_routed_as_asked(pool: MemoryPool, route: bool) -> None:
    weight = numbers(8).requires_grad_()
    with xt.set_allocator(pool=pool, route_backward=route):
        here = pool_of(numbers(8))
        (weight * weight).sum().backward()
    assert pool_of(weight.grad) == (here if route else NATIVE)


def test_a_limit_is_out_of_memory_with_the_reason() -> None:
    scope = xt.set_allocator(limit=64 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)from an xpuruntime pool: .*limit 64\.00 MiB"), scope:
        numbers(128)
    assert "'torch@cuda:0' on cuda:0 cannot give" in scope.last_failure
    with xt.set_allocator(limit=64 * MIB) as scope:
        with pytest.raises(torch.OutOfMemoryError):
            numbers(128)
        works = numbers(32, 3.0)
        assert float(works[-1]) == 3.0
        (use,) = [one for one in xt.allocator_stats().uses if one.scopes]
        assert (use.limit, use.failures > 0) == (64 * MIB, True)
        assert "limit 64.00 MiB" in use.last_failure


def test_the_cache_of_a_scope_can_be_emptied(pool: MemoryPool) -> None:
    with xt.set_allocator(pool=pool) as scope:
        kept = numbers(16, 5.0)
        numbers(64)
        assert pool.stats().requested >= 80 * MIB
        assert scope.empty_cache() >= 64 * MIB
        assert 16 * MIB <= pool.stats().requested < 64 * MIB
        more = numbers(8)
        assert pool_of(more) != NATIVE
        assert float(kept.min()) == 5.0


def test_memory_freed_by_one_stream_waits_for_another(pool: MemoryPool) -> None:
    side = torch.cuda.Stream()
    with xt.set_allocator(pool=pool):
        source = numbers(64, 1.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            copy = source.clone()
        source.record_stream(side)
        del source
        for value in range(5):
            numbers(64, float(value + 2))
        side.synchronize()
        assert float(copy.min()) == float(copy.max()) == 1.0


class TestGraphs:
    def capture(self, static: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static * 2 + 1
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static * 2 + 1
        return graph, out

    def test_a_graph_has_memory_of_its_own_from_the_pool(self, pool: MemoryPool) -> None:
        with xt.set_allocator(pool=pool):
            static = numbers(8)
            before = pool.stats().requested
            graph, out = self.capture(static)
            assert pool.stats().requested >= before + 16 * MIB  # the product and the sum
            assert pool_of(out) not in (NATIVE, pool_of(static))
            others = [numbers(8, 9.0) for _ in range(8)]  # would be written over
            static.fill_(3.0)
            graph.replay()
            assert float(out.min()) == float(out.max()) == 7.0
            assert all(float(other.min()) == float(other.max()) == 9.0 for other in others)
        # The graph outlives the scope.
        others = [numbers(8, 9.0) for _ in range(8)]
        static.fill_(5.0)
        graph.replay()
        assert float(out.min()) == float(out.max()) == 11.0
        assert all(float(other.max()) == 9.0 for other in others)
        del graph, out, static, others
        gc.collect()
        torch.cuda.synchronize()
        uses_of(pool)  # lets go of the graph's memory
        torch.cuda.empty_cache()
        until = time.monotonic() + 10  # CUDA tells of a graph's end in its own time
        while uses_of(pool) and time.monotonic() < until:
            time.sleep(0.05)
        assert uses_of(pool) == []
        assert pool.stats().current == 0

    def test_two_graphs_do_not_share_memory(self, pool: MemoryPool) -> None:
        with xt.set_allocator(pool=pool):
            static = numbers(8)
            first, one = self.capture(static)
            second, other = self.capture(static)
            assert pool_of(one) != pool_of(other)
            static.fill_(1.0)
            first.replay()
            static.fill_(2.0)
            second.replay()
            assert (float(one[0]), float(other[0])) == (3.0, 5.0)

    def test_a_named_pool_is_taken(self, pool: MemoryPool) -> None:
        handle = torch.cuda.graph_pool_handle()
        with xt.set_allocator(pool=pool):
            static = numbers(8)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=handle):
                out = static + 1
            assert pool_of(out) == tuple(handle)
            assert pool_of(numbers(8)) == pool_of(static)
            graph.replay()
            assert float(out[0]) == 2.0

    def test_backward_is_captured(self, pool: MemoryPool) -> None:
        with xt.set_allocator(pool=pool):
            weight = numbers(8).requires_grad_()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    weight.grad = None
                    (weight * weight).sum().backward()
            torch.cuda.current_stream().wait_stream(side)
            weight.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                (weight * weight).sum().backward()
            with torch.no_grad():
                weight.fill_(4.0)
            graph.replay()
            assert float(weight.grad.min()) == float(weight.grad.max()) == 8.0

    def test_a_scope_does_not_begin_in_a_capture(self, pool: MemoryPool) -> None:
        static = numbers(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            with pytest.raises(UnsupportedOperationError, match="while a CUDA graph is captured"):
                xt.set_allocator(pool=pool)


class TestThreads:
    def run(self, body: object) -> None:
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    def test_only_the_calling_thread_is_routed(self, pool: MemoryPool) -> None:
        found = []
        with xt.set_allocator(pool=pool):
            self.run(lambda: found.append(pool_of(numbers(8))))
        assert found == [NATIVE]

    def test_each_thread_has_its_own(self, pool: MemoryPool) -> None:
        other = MemoryPool("cuda:0", name="of the thread")
        kept = []

        def body() -> None:
            with xt.set_allocator(pool=other):
                kept.append(numbers(16))
                xt.reset_allocator()

        with xt.set_allocator(pool=pool) as scope:
            self.run(body)
            assert not scope.closed
            mine = numbers(16)
        assert other.stats().requested == 16 * MIB
        assert len({pool_of(kept[0]), pool_of(mine), NATIVE}) == 3

    def test_another_thread_cannot_close_it(self, pool: MemoryPool) -> None:
        with xt.set_allocator(pool=pool) as scope:
            with pytest.raises(UnsupportedOperationError, match="opened by another thread"):
                self.run(scope.close)
            assert not scope.closed

    def test_it_ends_with_its_thread(self, pool: MemoryPool) -> None:
        self.run(lambda: xt.set_allocator(pool=pool))
        gc.collect()
        assert open_scopes() == []
        assert uses_of(pool) == []


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    pools = [MemoryPool(f"cuda:{index}", name=f"device {index}") for index in range(2)]
    with xt.set_allocator(pool=pools[0]), xt.set_allocator(pool=pools[1]):
        tensors = [torch.ones(4 * MIB, device=f"cuda:{index}") for index in range(2)]
        assert all(pool.stats().requested >= 16 * MIB for pool in pools)
    assert float(tensors[0].sum()) == float(tensors[1].sum())


def test_arguments_that_need_the_machine(pool: MemoryPool) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(InputError, match=f"'cuda:{count}' was not found"):
        xt.set_allocator(device=count)
    with pytest.raises(InputError, match="has memory of cuda:0, and device is 'cuda:1'"):
        xt.set_allocator(pool=pool, device="cuda:1")
    with xt.set_allocator(pool=pool, device=torch.device("cuda", 0)):
        pass
