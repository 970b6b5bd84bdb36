# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions on other providers, from events and graphs made by hand: no such device is needed, and none is claimed."""

from __future__ import annotations

import numpy as np
import pytest
from observe_models import Weights, model, node

from xpuruntime.engines.onnxruntime.observing.graph import provider_device
from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, TensorSeen
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units
from xpuruntime.engines.onnxruntime.opening import Assigned
from xpuruntime.evidence.cuda_graphs import graph_status

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def event(name, op, provider, order, dtype="float", size=1024, time=5.0):
    tensor = TensorSeen(dtype, (size // 4,))
    return NodeEvent(
        name=name,
        index=order,
        op=op,
        provider=provider,
        inputs=(tensor,),
        outputs=(tensor,),
        output_bytes=size,
        time_us=time,
        runs=3,
        order=order,
    )


def source():
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Det", ["a"], ["b"], name="det"),
        node("Exp", ["b"], ["c"], name="exp"),
        node("Neg", ["c"], ["y"], name="neg"),
    ]
    return model(nodes, [("x", [1, 2, 2])], [("y", [1])], Weights())


def split_session():
    """As ONNX Runtime writes it when the CUDA provider has no Det and Exp: copies around two CPU nodes."""
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("MemcpyToHost", ["a"], ["a_CPUExecutionProvider"], name="Memcpy"),
        node("Det", ["a_CPUExecutionProvider"], ["b"], name="det"),
        node("Exp", ["b"], ["c"], name="exp"),
        node("MemcpyFromHost", ["c"], ["c_CUDAExecutionProvider"], name="Memcpy_token_1"),
        node("Neg", ["c_CUDAExecutionProvider"], ["y"], name="neg"),
    ]
    optimized = source()
    del optimized.graph.node[:]
    optimized.graph.node.extend(nodes)
    events = [
        event("relu", "Relu", CUDA, 0),
        event("Memcpy", "MemcpyToHost", CUDA, 1, size=4096, time=20.0),
        event("det", "Det", CPU, 2),
        event("exp", "Exp", CPU, 3),
        event("Memcpy_token_1", "MemcpyFromHost", CUDA, 4, size=2048, time=10.0),
        event("neg", "Neg", CUDA, 5),
    ]
    return optimized, events


def test_a_cpu_island_in_a_cuda_session():
    optimized, events = split_session()
    joined = attribute_units(source(), optimized, events, None, device="cuda:0")
    units = {n: u for u in joined.units for n in u.source_nodes}
    assert {n: (u.device, u.status) for n, u in units.items()} == {
        "relu": ("cuda:0", "honoured"),
        "det": ("cpu", "substituted"),
        "exp": ("cpu", "substituted"),
        "neg": ("cuda:0", "honoured"),
    }
    assert [u.op for u in joined.units if u.relation == "inserted"] == ["MemcpyToHost", "MemcpyFromHost"]
    counts = {(b.kind, b.where): (b.count, b.bytes, b.time.value) for b in joined.boundaries}
    assert counts == {
        ("copy", "cuda:0 -> cpu"): (1, 4096, 20.0),
        ("copy", "cpu -> cuda:0"): (1, 2048, 10.0),
        ("cpu_island", "det .. exp (Det, Exp)"): (2, 6144, 10.0),
    }


@pytest.mark.parametrize("allowed", [(), ("Det", "Exp")])
def test_what_blocks_a_cuda_graph_is_named(allowed):
    """Permitting an operator on the CPU makes it no part of a graph."""
    optimized, events = split_session()
    joined = attribute_units(source(), optimized, events, None, device="cuda:0", allow_cpu_ops=allowed)
    status = graph_status(
        device="cuda:0", engine="onnxruntime", stated="prefer", units=joined.units, boundaries=joined.boundaries
    )
    assert status.status == "blocked"
    assert [(blocker.node, blocker.op, blocker.kind) for blocker in status.blockers] == [
        ("Memcpy", "MemcpyToHost", "copy"),
        ("det", "Det", "placement"),
        ("exp", "Exp", "placement"),
        ("Memcpy_token_1", "MemcpyFromHost", "copy"),
    ]


def test_what_is_live_around_the_nodes():
    optimized, events = split_session()
    joined = attribute_units(source(), optimized, events, None, device="cuda:0")
    sizes = [("relu", 1024), ("Memcpy", 4096), ("det", 1024), ("exp", 1024), ("Memcpy_token_1", 2048), ("neg", 1024)]
    before = [0, *(size for _, size in sizes[:-1])]  # a chain: what a node reads is gone after it
    expected = [(name, size + held, size) for (name, size), held in zip(sizes, before, strict=True)]
    assert [(one.unit, one.during, one.after) for one in joined.live] == expected


def test_a_reshape_is_a_view_and_what_is_left_out_has_no_size():
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Reshape", ["a", "to"], ["b"], name="reshape"),
        node("Dropout", ["b"], ["c", ""], name="drop"),
        node("Neg", ["c"], ["y"], name="neg"),
    ]
    weights = Weights()
    weights.value("to", np.array([4], np.int64))
    made = model(nodes, [("x", [2, 2])], [("y", [4])], weights)
    events = [event(n.name, n.op_type, CPU, i, size=16) for i, n in enumerate(nodes)]
    live = attribute_units(made, made, events, None).live
    assert [(one.during, one.after) for one in live] == [(16, 16), (16, 16), (16, 16), (32, 16)]


def test_permitted_cpu_operators_are_honoured():
    optimized, events = split_session()
    joined = attribute_units(source(), optimized, events, None, device="cuda:0", allow_cpu_ops=("Det",))
    units = {n: u.status for u in joined.units for n in u.source_nodes}
    assert units == {"relu": "honoured", "det": "honoured", "exp": "substituted", "neg": "honoured"}


def test_a_node_that_did_not_run_is_placed_by_the_assignment():
    optimized, events = split_session()
    assigned = [Assigned(CPU, "exp", "Exp", "")]
    joined = attribute_units(source(), optimized, events[:3], assigned, device="cuda:0")
    exp = next(u for u in joined.units if u.source_nodes == ("exp",))
    assert (exp.device, exp.provider, exp.status, exp.time) == ("cpu", CPU, "unobservable", None)


def test_an_executed_node_that_the_graph_lacks_is_shown():
    optimized, events = split_session()
    joined = attribute_units(source(), optimized, [*events, event("ghost", "Exp", CUDA, 6)], None, device="cuda:0")
    assert joined.partial
    assert "ghost" in joined.notes[0]
    assert next(u for u in joined.units if u.id == "ghost").source_nodes == ()


def test_a_compiled_partition_without_its_graph():
    qnn = "QNNExecutionProvider"
    part = f"{qnn}_QNN_1_0"
    events = [event(part, part, qnn, 0), event("neg", "Neg", CPU, 1)]
    assigned = [Assigned(qnn, n, "?", "") for n in ("relu", "det", "exp")] + [Assigned(CPU, "neg", "Neg", "")]
    joined = attribute_units(source(), None, events, assigned, device="npu")
    units = {u.id: u for u in joined.units}
    assert (units[part].relation, units[part].device) == ("opaque", "npu")
    assert units[part].source_nodes == ("relu", "det", "exp")
    assert (units["neg"].relation, units["neg"].status) == ("exact", "substituted")
    assert joined.partial


def test_several_partitions_are_not_told_apart():
    qnn = "QNNExecutionProvider"
    events = [event(f"{qnn}_{i}", f"{qnn}_{i}", qnn, i) for i in range(2)]
    assigned = [Assigned(qnn, n, "?", "") for n in ("relu", "det", "exp", "neg")]
    joined = attribute_units(source(), None, events, assigned, device="npu")
    assert any("cannot be seen" in n for n in joined.notes)
    assert sorted(n for u in joined.units for n in u.source_nodes) == ["det", "exp", "neg", "relu"]


@pytest.mark.parametrize(
    ("provider", "asked", "device"),
    [
        (CPU, "cpu", "cpu"),
        (CPU, "cuda:1", "cpu"),
        (CUDA, "cuda:1", "cuda:1"),
        (CUDA, "cpu", "cuda:0"),
        ("TensorrtExecutionProvider", "cuda:2", "cuda:2"),
        ("QNNExecutionProvider", "npu", "npu"),
        ("DmlExecutionProvider", "dml", "dml"),
        ("SomeNewExecutionProvider", "npu", "npu"),
        ("SomeNewExecutionProvider", "cpu", "somenew"),
    ],
)
def test_device_of_a_provider(provider, asked, device):
    assert provider_device(provider, asked) == device
