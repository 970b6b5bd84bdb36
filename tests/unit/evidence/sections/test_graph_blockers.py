# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Whether a session can be a CUDA graph, from units made by hand: no such device is needed, and none is claimed."""

from __future__ import annotations

import pytest
from evidence_records import BOUNDARY, unit

from xpuruntime.evidence import Boundary, SourceNode
from xpuruntime.evidence.cuda_graphs import graph_blockers, graph_status

CUDA = "cuda:0"


def on_cuda(name, op="MatMul", **more):
    return unit(name, op, CUDA, **more)


def status(units, device=CUDA, stated="prefer", **more):
    return graph_status(device=device, engine="onnxruntime", stated=stated, units=units, **more)


@pytest.mark.parametrize("device", ["cpu", "npu", "rocm:0"])
def test_elsewhere_it_does_not_apply(device):
    found = status([unit("a")], device=device, stated="off")
    assert (found.status, found.reason, found.blockers) == ("not_applicable", f"does not apply: runs on {device}", ())


def test_elsewhere_a_request_is_not_forgotten():
    assert status([unit("a")], device="cpu").reason.startswith("nothing is captured although execution.cuda_graph asks")


def test_a_node_on_the_cpu_is_named():
    units = [on_cuda("conv", "Conv"), unit("det", "Det", "cpu", placement_reason="no CUDA kernel"), on_cuda("relu")]
    found = status(units)
    assert found.status == "blocked"
    assert [(blocker.node, blocker.op, blocker.kind) for blocker in found.blockers] == [("det", "Det", "placement")]
    assert found.blockers[0].reason == "runs on cpu, and a graph holds work of cuda:0 alone: no CUDA kernel"
    assert found.reason.startswith("det (Det) cannot be part of a graph")


def test_all_nodes_of_a_fused_unit_on_the_cpu_are_named_by_their_own_operators():
    graph = [SourceNode(name=name, op=op, inputs=(), outputs=()) for name, op in (("mul", "Mul"), ("det", "Det"))]
    fused = unit("both", "Fused", "cpu", relation="fused", source_nodes=("mul", "det"))
    blockers = graph_blockers(CUDA, [fused], graph=graph)
    assert [(blocker.node, blocker.op) for blocker in blockers] == [("mul", "Mul"), ("det", "Det")]


def test_sizes_on_the_cpu_are_no_obstacle_until_something_is_copied():
    units = [on_cuda("conv", "Conv"), unit("shape", "Shape", "cpu"), unit("gather", "Gather", "cpu")]
    assert status(units).status == "possible"
    copied = status(units, boundaries=[BOUNDARY])
    assert [(blocker.node, blocker.kind) for blocker in copied.blockers] == [
        ("shape", "placement"), ("gather", "placement"), ("cuda:0 -> cpu", "copy"),
    ]  # fmt: skip
    assert copied.blockers[-1].reason == "2 in a run, between host and device"


def test_a_copy_that_the_engine_inserted_is_named_once_and_for_whom():
    copy = on_cuda("Memcpy", "MemcpyToHost", relation="inserted", serves=("det",))
    blockers = graph_blockers(CUDA, [copy], [BOUNDARY])
    assert [(blocker.node, blocker.op, blocker.kind) for blocker in blockers] == [("Memcpy", "MemcpyToHost", "copy")]
    assert blockers[0].reason == "copies a tensor to the host for det in every run"


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("If", "control_flow"),
        ("Loop", "control_flow"),
        ("Scan", "control_flow"),
        ("cond", "control_flow"),
        ("higher_order.while_loop", "control_flow"),
        ("NonZero", "data_dependent"),
        ("aten.nonzero", "data_dependent"),
        ("aten::masked_select", "data_dependent"),
        ("aten.item", "sync"),
        ("aten._local_scalar_dense", "sync"),
    ],
)
def test_operators_that_cannot_be_captured(op, kind):
    blockers = graph_blockers(CUDA, [on_cuda("a"), on_cuda("b", op)])
    assert [(blocker.node, blocker.op, blocker.kind) for blocker in blockers] == [("b", op, kind)]


@pytest.mark.parametrize("op", ["Conv", "IfNot", "aten.scan_sum", "Gather", "LoopVariable"])
def test_names_that_only_look_like_them(op):
    assert graph_blockers(CUDA, [on_cuda("a", op)]) == ()


def test_a_node_inside_of_an_opaque_unit_is_seen_by_the_model():
    graph = [SourceNode(name="find", op="NonZero", inputs=(), outputs=())]
    opaque = on_cuda("engine", "TensorRT", relation="opaque", source_nodes=("find",))
    assert [blocker.node for blocker in graph_blockers(CUDA, [opaque], graph=graph)] == ["find"]


def test_what_was_folded_is_no_obstacle():
    folded = unit("if", "If", "cpu", relation="folded", time=None)
    assert status([on_cuda("a"), folded]).status == "possible"


def test_signals_between_streams_of_the_device_are_no_obstacle():
    assert graph_blockers(CUDA, [on_cuda("a")], [Boundary(kind="sync", where="Signal", count=1)]) == ()


def test_what_a_binding_said_counts_more_than_what_is_suspected():
    units = [on_cuda("find", "NonZero")]
    assert status(units, bound="captured").status == "captured"
    assert status(units, bound="captured").blockers == ()
    found = status(units, bound="operation not permitted\nwhen stream is capturing")
    assert found.status == "refused"
    assert found.reason == (
        "onnxruntime refused: operation not permitted when stream is capturing. Observed blockers: find (NonZero)"
    )
    assert status(units, bound="off").status == "blocked"


def test_a_refusal_at_loading_is_told():
    found = status([on_cuda("a")], refused="This session has control flow nodes")
    assert (found.status, found.reason) == ("refused", "onnxruntime refused: This session has control flow nodes")


@pytest.mark.parametrize("seen", [{"units": []}, {"units": [on_cuda("a")], "partial": True}])
def test_what_was_not_seen_is_not_called_possible(seen):
    found = status(**seen)
    assert (found.status, found.blockers) == ("unknown", ())


def test_open_sizes_are_told_and_fixed_ones_are_not():
    found = status([on_cuda("a")], open_sizes={"x": ["batch", "dimension 2"], "y": []})
    assert len(found.holds_for) == 1
    assert "x leaves batch, dimension 2 open" in found.holds_for[0]


def test_many_are_counted():
    units = [on_cuda(f"n{i}", "NonZero") for i in range(7)]
    assert status(units).reason.startswith("n0 (NonZero), n1 (NonZero), n2 (NonZero), n3 (NonZero) and 3 more cannot")
