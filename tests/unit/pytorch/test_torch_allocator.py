# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `set_allocator` refuses, and what it says where there is no CUDA device."""

from __future__ import annotations

import pytest

from xpuruntime._core import MemoryPool, TorchAllocator
from xpuruntime.errors import InputError, UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
pytestmark = pytest.mark.torch

NO_CUDA = not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enabled": 1}, "enabled is 1: give True or False"),
        ({"route_backward": None}, "route_backward is None: give True or False"),
        ({"scope": "thread"}, r"scope 'thread' is not known: take 'block' .* or 'process'"),
        ({"pool": "cuda:0"}, "pool is of type str: give a xpuruntime MemoryPool"),
        ({"limit": 0}, "limit 0 is no number of bytes"),
        ({"limit": True}, "limit True is no number of bytes"),
        ({"limit": 1.5}, r"limit 1\.5 is no number of bytes"),
        ({"device": "cpu"}, "'cpu' is no CUDA device"),
        ({"device": "nowhere"}, "device 'nowhere' is not one: give 'cuda:0'"),
        ({"device": -1}, "device -1 is not one"),
        ({"device": True}, "device True is not one"),
        ({"enabled": False, "limit": 1 << 20}, "enabled=False goes back .* leave them out"),
        ({"scope": "process", "device": "cuda:0"}, "concerns every CUDA device .* leave device='cuda:0' out"),
        ({"scope": "process", "route_backward": False}, "concerns every thread"),
        ({"scope": "process", "enabled": False}, "cannot be disabled"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        xt.set_allocator(**arguments)


def test_pools_of_host_memory_are_refused():
    pool = MemoryPool("cpu", name="of the host")
    with pytest.raises(InputError, match=r"'of the host' \(caching on cpu\) gives host memory"):
        xt.set_allocator(pool=pool)
    with pytest.raises(InputError, match=r"do not go together: set the limit of the pool, pool\.limit = 5"):
        xt.set_allocator(pool=pool, limit=5)


@pytest.mark.skipif(not NO_CUDA, reason="needs a machine without CUDA")
@pytest.mark.parametrize("scope", ["block", "process"])
def test_without_cuda_it_says_what_is_missing(scope):
    why = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
    with pytest.raises(UnsupportedOperationError, match=f"memory for CUDA tensors, and torch .* {why}. Install"):
        xt.set_allocator(scope=scope)
    assert xt.allocator_stats().scope == "none"


def test_disabling_and_resetting_need_no_cuda():
    xt.reset_allocator()
    with xt.set_allocator(enabled=False) as scope:
        assert scope.closed
        assert scope.pool is None
        assert scope.last_failure is None
    scope.close()
    with pytest.raises(UnsupportedOperationError, match="is closed: call set_allocator"):
        scope.empty_cache()


def test_numbers_without_a_scope():
    stats = xt.allocator_stats()
    assert stats.to_dict() == {"scope": "none", "uses": []}
    assert (stats.current, stats.allocations, stats.failures) == (0, 0, 0)


def test_when_the_allocator_of_the_process_can_be_set():
    from xpuruntime.pytorch.allocator.api import judge

    assert judge(initialised=False, backend="native", active=False) is None
    late = judge(initialised=True, backend="native", active=False)
    assert "has begun to use CUDA with its own allocator (native)" in late
    assert "before the first CUDA tensor" in late
    assert "set already" in judge(initialised=True, backend="pluggable", active=True)


def test_the_process_allocator_cannot_be_left():
    from xpuruntime.pytorch.allocator.api import ProcessAllocator

    with pytest.raises(UnsupportedOperationError, match="promises an end that it cannot have"):
        ProcessAllocator.__enter__(object.__new__(ProcessAllocator))
    error = ProcessAllocator.no_way_back(object.__new__(ProcessAllocator))
    assert "another process" in str(error)


def test_captures_are_seen_only_while_asked():
    from xpuruntime.pytorch.allocator.scope import leave_captures, watch_captures

    kind = torch.cuda.CUDAGraph
    before = kind.capture_begin, kind.capture_end
    watch_captures()
    watch_captures()
    assert kind.capture_begin is not before[0]
    leave_captures()
    leave_captures()
    assert (kind.capture_begin, kind.capture_end) == before


class TestFunctions:
    """What the functions themselves do is in tests/cpp and tests/gpu; here is what Python can reach."""

    def test_refuse_pools_that_pytorch_cannot_use(self):
        with pytest.raises(InputError, match="needs a pool"):
            TorchAllocator([])
        with pytest.raises(InputError, match="gives host memory"):
            TorchAllocator([MemoryPool("cpu")])
        with pytest.raises(InputError):
            TorchAllocator(["cuda:0"])

    def test_a_refusal_takes_no_slot(self):
        before = TorchAllocator.available()
        for _ in range(100):
            with pytest.raises(InputError):
                TorchAllocator([MemoryPool("cpu")])
        assert TorchAllocator.available() == before > 0
