# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`memory_report`: who holds what, and what it says where there is no CUDA."""

from __future__ import annotations

import gc
import json

import pytest

import xpuruntime as xrt
from xpuruntime._core import Dispatcher, MemoryPool
from xpuruntime.errors import InputError, XpuRuntimeError

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


def test_what_is_absent_is_said():
    report = xt.memory_report()
    if torch.version.cuda is None:
        assert any("built without CUDA" in reason for reason in report.absent)
    if not torch.cuda.is_available():
        assert [device.device for device in report.devices] == ["cpu"]
        assert any("CUDA devices" in reason for reason in report.absent)
    for reason in report.absent:
        assert f"absent: {reason}" in str(report)


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
