# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`memory_report` and `set_allocator`: who holds what, and what they say where there is no CUDA."""

from __future__ import annotations

import gc
import json

import pytest

import xpuruntime as xrt
from xpuruntime._core import Dispatcher, MemoryPool, TorchAllocator
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
pytestmark = pytest.mark.torch

MIB = 1 << 20


def host(report):
    (found,) = [device for device in report.devices if device.device == "cpu"]
    return found


def test_our_pools_are_listed_with_what_they_hold():
    pool = MemoryPool("cpu", name="listed by the report")
    buffer = pool.allocate(3 * MIB)
    (holder,) = [one for one in host(xt.memory_report()).holders if one.owner == "listed by the report"]
    assert (holder.kind, holder.in_use) == ("caching", pool.stats().current)
    assert holder.held == pool.stats().reserved >= 3 * MIB
    del buffer
    (holder,) = [one for one in host(xt.memory_report("cpu")).holders if one.owner == "listed by the report"]
    assert holder.in_use == 0
    assert holder.held >= 3 * MIB
    del pool
    assert "listed by the report" not in str(xt.memory_report())


def test_the_host_tells_total_and_free_but_no_rest():
    one = host(xt.memory_report())
    assert 0 < one.free < one.total
    assert one.unexplained is None


def test_the_holders_are_sorted_and_the_text_has_them():
    pools = [MemoryPool("cpu", name=f"sorted {size}") for size in (1, 9, 5)]
    buffers = [pool.allocate(int(pool.name.split()[1]) * 4 * MIB) for pool in pools]
    report = xt.memory_report()
    names = [holder.owner for holder in host(report).holders if holder.owner.startswith("sorted")]
    assert names == ["sorted 9", "sorted 5", "sorted 1"]
    text = str(report)
    assert text.index("sorted 9") < text.index("sorted 5") < text.index("sorted 1")
    assert "36.0 MiB" in text
    assert "workspaces of xpuruntime kernels" in text
    assert len(buffers) == 3


def digits_sessions():
    """Return the open sessions of the demo's model, without those that nobody refers to any more."""
    gc.collect()
    return [session for session in xt.memory_report().sessions if "digits" in session.session]


def test_open_sessions_are_found_and_closed_ones_are_not():
    before = len(digits_sessions())  # of other tests
    session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu")
    found = [one for one in xt.memory_report().sessions if one.session == repr(session)][-1]
    assert found.device == "cpu"
    assert found.memory == session.memory()
    assert repr(session) in str(xt.memory_report())
    session.close()
    assert len(digits_sessions()) == before


def test_a_forgotten_session_is_not_kept():
    session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu")
    before = len(digits_sessions())
    del session
    assert len(digits_sessions()) == before - 1


def test_sessions_can_be_named(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(x)

    program = torch.export.export(Net().eval(), (torch.zeros(2, 8),))
    torch.export.save(program, tmp_path / "net.pt2")
    with xrt.InferenceSession(tmp_path / "net.pt2") as session:
        report = xt.memory_report(sessions=[session])
        assert [one.memory for one in report.sessions] == [{"weights": (8 * 4 + 4) * 4}]
        assert "weights " in str(report)
        assert xt.memory_report(sessions=()).sessions == ()
    with pytest.raises(XpuRuntimeError, match="closed"):
        xt.memory_report(sessions=[session])
    with pytest.raises(InputError, match=r"has no memory\(\): give InferenceSession"):
        xt.memory_report(sessions=["session"])


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="'cuda:99' was not found: this process sees cpu"):
        xt.memory_report("cuda:99")
    with pytest.raises(InputError, match="'disk' was not found"):
        xt.memory_report("disk")
    assert [device.device for device in xt.memory_report(torch.device("cpu")).devices] == ["cpu"]


def test_the_report_is_plain_data():
    report = xt.memory_report()
    told = json.loads(json.dumps(report.to_dict()))
    assert set(told) == {"devices", "sessions", "workspaces", "allocator", "absent"}
    assert told["workspaces"] == Dispatcher.instance().workspace_bytes()
    assert told["allocator"]["scope"] == "none"
    assert told["devices"][0]["device"] == "cpu"


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
