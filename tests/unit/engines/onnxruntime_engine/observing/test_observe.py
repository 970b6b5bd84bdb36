# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The observing pass itself: what it needs, what it leaves behind, what it says when things break."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnxruntime
import pytest
from observe_models import conv_net, feeds, maker, transformer

from xpuruntime.engines.base import Observed
from xpuruntime.engines.onnxruntime.observing import instrumented_run as module
from xpuruntime.engines.onnxruntime.observing.instrumented_run import observe
from xpuruntime.engines.onnxruntime.opening import assignment


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A temporary folder of the test's own; whatever happens, nothing may be left in it."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    assert list(path.iterdir()) == []


#: Python 3.10 gets an ONNX Runtime that is too old for it; what is said then has a test of its own below.
records_assignment = pytest.mark.skipif(
    not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason=f"ONNX Runtime {onnxruntime.__version__} does not record which provider each node is assigned to",
)


@records_assignment
def test_a_whole_pass():
    proto = conv_net()
    observed = observe(maker(proto), feeds(proto), 5, proto)
    assert isinstance(observed, Observed)
    assert not observed.partial
    assert observed.notes == ()
    assert observed.effective == {
        "execution.engine": "onnxruntime",
        "execution.device": "cpu",
        "execution.precision": "fp32",
        "execution.layout": "nchwc",
    }
    assert {u.time.runs for u in observed.units if u.time} == {5}
    assert len(observed.run_us) == len(observed.units_us) == 5
    assert all(0 < inside <= whole for inside, whole in zip(observed.units_us, observed.run_us, strict=True))


def test_no_weights_are_read_back(monkeypatch):
    seen = []
    load = module._load
    monkeypatch.setattr(module, "_load", lambda *a: seen.append(load(*a)) or seen[-1])
    proto = transformer(width=64)
    observe(maker(proto), feeds(proto), 1, proto)
    big = [i for i in seen[0].graph.initializer if i.data_location != 1 and i.ByteSize() > 4096]
    assert big == []


def test_assignment_of_a_session_that_does_not_record_it():
    proto = conv_net()
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert assignment(session) is None
    assert assignment(object()) is None


def test_an_older_onnxruntime_is_noted():
    proto = conv_net()

    class Older:
        def __init__(self, session):
            self.run, self.end_profiling = session.run, session.end_profiling

    observed = observe(lambda *a: Older(maker(proto)(*a)), feeds(proto), 1, proto)
    assert "does not say which provider" in observed.notes[0]
    assert len(observed.units) == 7


def test_wrong_feeds_give_a_partial_pass():
    proto = conv_net()
    observed = observe(maker(proto), {"nothing": feeds(proto)["x"]}, 3, proto)
    assert observed.partial
    assert "run 1 of 4 failed" in observed.notes[0]
    assert {u.status for u in observed.units if u.relation != "folded" and u.source_nodes} == {"unobservable"}


def test_a_crash_in_mid_pass_keeps_what_was_seen():
    proto = conv_net()
    count = iter(range(10))

    def run(session, data):
        if next(count) == 2:
            raise RuntimeError("the device fell off the bus\nwith a trace")
        session.run(None, data)

    observed = observe(maker(proto), feeds(proto), 5, proto, run=run)
    assert observed.partial
    assert observed.notes[0] == "instrumented run 3 of 6 failed: the device fell off the bus"
    assert [u for u in observed.units if u.time is not None]
    assert {u.time.runs for u in observed.units if u.time} == {1}


def test_a_keyboard_interrupt_passes_through():
    proto = conv_net()

    def run(session, data):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(maker(proto), feeds(proto), 1, proto, run=run)


def test_no_session_at_all():
    def make(prefix, path):
        raise RuntimeError("no such model")

    observed = observe(make, {}, 1, conv_net())
    assert observed.partial
    assert observed.units == ()
    assert "no such model" in observed.notes[-1]


def test_a_provider_that_cannot_write_its_graph():
    proto = conv_net()

    def make(prefix, path):
        if path is not None:
            raise RuntimeError("Unable to serialize model as it contains compiled nodes.")
        return maker(proto, "ORT_DISABLE_ALL")(prefix, None)

    observed = observe(make, feeds(proto), 2, proto)
    assert observed.partial
    assert "compiled nodes" in observed.notes[0]
    assert any("matched by name only" in n for n in observed.notes)
    assert sorted(n for u in observed.units for n in u.source_nodes) == sorted(n.name for n in proto.graph.node)
    assert {u.relation for u in observed.units} == {"exact"}


@pytest.mark.parametrize("damage", [b"", b"\x08", b"not a model at all"])
def test_a_damaged_optimised_graph(damage):
    proto = conv_net()
    make = maker(proto)

    def broken(prefix, path):
        session = make(prefix, path)
        if path is not None:
            Path(path).write_bytes(damage)
        return session

    observed = observe(broken, feeds(proto), 2, proto)
    assert observed.partial
    assert any("optimized graph" in note for note in observed.notes)
    names = [n for u in observed.units for n in u.source_nodes]
    assert sorted(names) == sorted(n.name for n in proto.graph.node)


def with_profile(make, change):
    """Return what opens sessions whose profile is changed before it is read; `change` gets its path."""

    class Changed:
        def __init__(self, session):
            self.run, self._session = session.run, session

        def end_profiling(self):
            path = Path(self._session.end_profiling())
            change(path)
            return str(path)

    return lambda *arguments: Changed(make(*arguments))


def test_a_full_disk_from_the_start(monkeypatch):
    def refuse(*args, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    observed = observe(maker(conv_net()), {}, 1, conv_net())
    assert observed.partial
    assert "no temporary folder" in observed.notes[0]


def test_a_profile_that_was_cut_off():
    def cut(path):
        text = path.read_text()
        path.write_text(text[: len(text) * 2 // 3])

    proto = conv_net()
    observed = observe(with_profile(maker(proto), cut), feeds(proto), 4, proto)
    assert observed.partial
    assert any("cut off" in note for note in observed.notes)
    assert [u for u in observed.units if u.time is not None]


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '[{"name": "x", "ph": "X"}]', "<html>", "[1, 2]"])
def test_a_profile_of_somebody_else(text):
    proto = conv_net()
    change = with_profile(maker(proto), lambda path: path.write_text(text))
    observed = observe(change, feeds(proto), 2, proto)
    assert observed.partial
    assert any("is not a profile of ONNX Runtime" in note for note in observed.notes)
    assert sorted(n for u in observed.units for n in u.source_nodes) == sorted(n.name for n in proto.graph.node)
    assert not [u for u in observed.units if u.time is not None]
