# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Joining what ONNX Runtime really ran to the source model, however it ordered and numbered what it inserted."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime as ort
import pytest
from observe_models import LEVELS, MODELS, Weights, conv_net, feeds, maker, model, node, random_conv_model, random_model
from onnx import TensorProto, helper, numpy_helper

from xpuruntime.engines.onnxruntime.observing.graph import view
from xpuruntime.engines.onnxruntime.observing.instrumented_run import observe
from xpuruntime.engines.onnxruntime.observing.node_matching import LOST, match, source_facts
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units

RANDOM = {
    f"{make.__name__}{i}": partial(make, 100 + i) for i in range(12) for make in (random_model, random_conv_model)
}


def run(proto, level="ORT_ENABLE_ALL", **keywords):
    return observe(maker(proto, level), feeds(proto), 2, proto, **keywords)


def names(proto):
    return [n.name for n in view(proto).nodes]


def by_source(observed):
    return {name: u for u in observed.units for name in u.source_nodes}


def check(proto, observed):
    """Every source node is in exactly one unit, none is lost, every unit that ran has a time."""
    assert Counter(n for u in observed.units for n in u.source_nodes) == Counter(names(proto))
    assert [u.id for u in observed.units if u.placement_reason == LOST] == []
    assert not observed.partial, observed.notes
    assert len({u.id for u in observed.units}) == len(observed.units)
    for unit in observed.units:
        count = len(unit.source_nodes)
        assert unit.relation == ("inserted" if count == 0 else "folded" if unit.device == "none" else unit.relation)
        assert (count == 1) if unit.relation in ("exact", "folded") else (count != 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_every_source_node_is_accounted_for_once(name, level):
    proto = MODELS[name]()
    check(proto, run(proto, level))


@pytest.mark.parametrize("make", [random_model, random_conv_model])
@pytest.mark.parametrize("seed", range(20))
def test_every_source_node_of_random_graphs_is_accounted_for_once(make, seed):
    proto = make(seed)
    for level in ("ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
        check(proto, run(proto, level))


def values(proto, keys, data):
    """Run a model with nothing optimized away and return the tensors asked for."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    present = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=k) for k in keys if k not in present)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(keys, session.run(keys, data), strict=True))


def compare_values(proto, executed, level, folder, tolerance):
    """Compare the numbers in every executed tensor with those of the source tensor it was matched with."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(executed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(folder / "optimized.onnx")
    source, target = view(proto), view(optimized)
    found = match(source, target, source_facts(source))
    pairs = {k: found[k] for k in target.producers if k in found and found[k] in source.producers}
    assert pairs
    data = feeds(proto)
    ran = values(optimized, list(pairs), data)
    asked = values(proto, sorted(set(pairs.values())), data)
    for key, source_key in pairs.items():
        a = np.sort(ran[key].astype(np.float64).ravel())
        b = np.sort(asked[source_key].astype(np.float64).ravel())
        assert a.shape == b.shape, (key, source_key)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=f"{key} is not {source_key}")


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("name", [*(n for n in MODELS if "control_flow" not in n), *RANDOM])
def test_matched_tensors_hold_the_same_values(name, level, tmp_path):
    proto = RANDOM[name]() if name in RANDOM else MODELS[name]()
    compare_values(proto, proto, level, tmp_path, 2e-2)


@pytest.mark.parametrize("name", ["conv_net", "branching_conv_net", "mlp", "transformer", *list(RANDOM)[:8]])
def test_a_model_converted_to_fp16_is_joined_to_its_source(name, tmp_path):
    """The session runs the converted model; the source is the one the user gave."""
    from xpuruntime.engines.model import inspect_bytes
    from xpuruntime.engines.precision import convert

    proto = RANDOM[name]() if name in RANDOM else MODELS[name]()
    converted = convert(inspect_bytes(proto.SerializeToString()), "fp16").proto
    compare_values(proto, converted, "ORT_ENABLE_ALL", tmp_path, 8e-2)
    for level in LEVELS:
        observed = observe(maker(converted, level), feeds(proto), 1, proto, precision="fp16")
        check(proto, observed)
        assert all(u.precision_requested in (None, "fp16") for u in observed.units)


def test_an_expanded_operator_keeps_its_neighbours_apart():
    """On fp16 ONNX Runtime writes Softmax out as five operators, among them a Div, as is the source node before it."""
    from xpuruntime.engines.model import inspect_bytes
    from xpuruntime.engines.precision import convert

    proto = MODELS["transformer"]()
    converted = convert(inspect_bytes(proto.SerializeToString()), "fp16").proto
    observed = observe(maker(converted), feeds(proto), 1, proto, precision="fp16")
    units = by_source(observed)
    assert units["qk_div"].source_nodes == ("qk_matmul", "qk_div")
    assert units["att_softmax"].source_nodes == ("att_softmax",)
    steps = [u.op for u in observed.units if u.serves == ("att_softmax",)]
    assert steps == ["ReduceMax", "Sub", "Exp", "ReduceSum"]


def test_blocked_layout_is_traced_through():
    units = by_source(run(conv_net()))
    first = units["c1"]
    assert (first.relation, first.source_nodes, first.layout) == ("fused", ("c1", "c1_relu"), "nchwc")
    assert units["add_relu"].source_nodes == ("c2", "bn", "add", "add_relu")
    assert units["gap"].relation == "exact"
    assert units["gap"].outputs == ("gap_y",)
    assert units["matmul"].source_nodes == ("matmul", "bias")
    assert units["identity"].relation == "folded"
    assert "output equals its input" in units["identity"].placement_reason


def test_layout_changes_are_boundaries():
    observed = run(conv_net())
    assert [(b.kind, b.where, b.count, b.bytes) for b in observed.boundaries] == [
        ("layout", "ReorderOutput on cpu", 1, 64)
    ]
    assert observed.boundaries[0].time.value >= 0


def test_transformer_fusions():
    units = by_source(run(MODELS["transformer"]()))
    assert units["gelu_erf"].op == "Gelu"
    assert units["gelu_erf"].source_nodes == ("gelu_div", "gelu_erf", "gelu_add", "gelu_mul", "gelu_half")
    assert units["ln0_sqrt"].op == "LayerNormalization"
    assert len(units["ln0_sqrt"].source_nodes) == 9
    assert units["res2_add"].op == "SkipLayerNormalization"
    assert len(units["res2_add"].source_nodes) == 10
    assert units["q_matmul"].source_nodes == ("q_matmul", "q_add")
    assert units["av_reshape"].relation == "exact"


def test_quantized_nodes_are_fused():
    units = by_source(run(MODELS["quantized"]()))
    assert units["conv"].op == "QLinearConv"
    assert units["conv"].source_nodes == ("dq0", "dq_w", "dq_b", "conv", "q1")
    assert units["conv"].precision_run == "uint8"
    assert units["pool"].source_nodes == ("dq1", "pool", "q2")


def test_control_flow():
    observed = run(MODELS["control_flow"]())
    units = by_source(observed)
    # cond is random: exactly one branch of the open If ran.
    ran = {n for n in ("a", "b") if units[n].time is not None}
    assert len(ran) == 1
    idle = units[({"a", "b"} - ran).pop()]
    assert (idle.status, idle.placement_reason) == ("unobservable", "did not run in the observed runs")
    assert units["c"].relation == "exact"
    assert units["d"].relation == "folded"
    assert "never taken" in units["d"].placement_reason
    assert units["if_fixed"].relation == "folded"
    assert units["body_add"].outputs == ("loop.body/state2",)


def test_duplicates_expansions_and_constants():
    observed = run(MODELS["eliminations"]())
    units = by_source(observed)
    assert units["twin1"].source_nodes == ("twin1", "twin2")
    steps = [u for u in observed.units if u.serves == ("hardswish",)]
    assert [u.op for u in steps] == ["HardSigmoid"]
    assert units["hardswish"].op == "Mul"
    for name in ("shape", "gather", "concat", "const0", "weight_transpose"):
        assert units[name].relation == "folded"
        assert "computed at load time" in units[name].placement_reason
    assert units["times_one"].source_nodes == ("matmul", "times_one")
    plain = by_source(run(MODELS["eliminations"](), "ORT_DISABLE_ALL"))
    assert plain["weight_transpose"].relation == "exact"
    assert plain["twin1"].source_nodes == ("twin1",)
    assert plain["dropout"].relation == "exact"


def test_fp16_on_the_cpu_is_seen_to_run_in_fp32():
    observed = run(MODELS["half"](), precision="fp16")
    units = by_source(observed)
    assert {(u.precision_requested, u.precision_run, u.status) for u in units.values()} == {
        ("fp16", "fp32", "substituted")
    }
    casts = {b.where: b.count for b in observed.boundaries if b.kind == "cast"}
    assert casts == {"fp16 -> fp32 on cpu": 1, "fp32 -> fp16 on cpu": 1}
    assert observed.effective["execution.precision"] == "fp32"
    # The model itself says fp16, so asking for "model" is not honoured either.
    assert by_source(run(MODELS["half"]()))["matmul"].status == "substituted"


def test_unnamed_nodes():
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Exp", ["a"], ["b"], name="named"),
        node("Exp", ["b"], ["c"]),
        node("Exp", ["c"], ["d"]),
        node("Neg", ["d"], ["y"]),
    ]
    proto = model(nodes, [("x", [2])], [("y", [2])], Weights())
    units = by_source(run(proto, "ORT_DISABLE_ALL"))
    assert set(units) == {"(Relu)", "named", "(Exp)", "(Exp)#2", "(Neg)"}
    assert all(u.time is not None for u in units.values())
    assert [units[n].id for n in ("named", "(Exp)", "(Exp)#2")] == ["named", "Exp_2", "Exp_3"]


def test_two_thousand_nodes_are_joined():
    w, nodes, last = Weights(), [], "x"
    for i in range(500):
        w.normal(f"w{i}", 16, 16), w.normal(f"b{i}", 16)
        nodes += [
            node("MatMul", [last, f"w{i}"], [f"m{i}"], name=f"mm{i}"),
            node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], name=f"add{i}"),
            node("HardSwish", [f"a{i}"], [f"h{i}"], name=f"act{i}"),
            node("Add", [f"h{i}", last], [f"r{i}"], name=f"res{i}"),
        ]
        last = f"r{i}"
    w.value("small", np.float32(1e-3))
    nodes.append(node("Mul", [last, "small"], ["y"], name="out"))
    proto = model(nodes, [("x", [2, 16])], [("y", [2, 16])], w)
    observed = run(proto)
    check(proto, observed)
    assert by_source(observed)["mm3"].source_nodes == ("mm3", "add3")


def branches() -> onnx.ModelProto:
    """Return a model in which two branches read a value whose name the optimizers drop, as detectors have them."""
    count = itertools.count()
    nodes: list[Any] = []
    weights: list[Any] = []
    rng = np.random.default_rng(0)

    def block(given: str) -> str:
        """Add a convolution and x * sigmoid(x)."""
        index = next(count)
        weights.append(numpy_helper.from_array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32), f"w{index}"))
        conv, sigmoid, mul = (f"/b{index}/{name}" for name in ("conv/Conv", "act/Sigmoid", "act/Mul"))
        out = [f"{name}_output_0" for name in (conv, sigmoid, mul)]  # as PyTorch's exporter names them
        nodes.append(helper.make_node("Conv", [given, f"w{index}"], out[:1], conv, pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Sigmoid", out[:1], out[1:2], sigmoid))
        nodes.append(helper.make_node("Mul", out[:2], out[2:], mul))
        return out[2]

    trunk = block(block("x"))
    ends = [block(block(trunk)) for _ in range(3)]
    nodes.append(helper.make_node("Concat", ends, ["y"], "concat", axis=1))
    shape = [1, 16, 8, 8]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("order") / "optimized.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(branches().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(Path(path))


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return the graph with its nodes in another order that runs, and its generated names numbered anew."""
    rng = random.Random(seed)
    text = model.SerializeToString()
    tokens = sorted({match.decode() for match in re.findall(rb"_token_\d+", text)})
    renamed = dict(zip(tokens, rng.sample(tokens, len(tokens)), strict=True))
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    for part in proto.graph.node:
        part.name = re.sub(r"_token_\d+", lambda one: renamed[one[0]], part.name)
        for names in (part.input, part.output):
            names[:] = [re.sub(r"_token_\d+", lambda one: renamed[one[0]], name) for name in names]
    left = list(proto.graph.node)
    made_by = {name for node in left for name in node.output}
    done: set[str] = set()
    order = []
    while left:
        ready = [node for node in left if all(name in done or name not in made_by for name in node.input)]
        node = rng.choice(ready)
        left.remove(node)
        order.append(node)
        done.update(node.output)
    del proto.graph.node[:]
    proto.graph.node.extend(order)
    return proto


def test_the_order_of_the_executed_graph_changes_nothing(optimized: onnx.ModelProto) -> None:
    source = branches()

    def attributed(graph: onnx.ModelProto) -> list[tuple[Any, ...]]:
        units = attribute_units(source, graph, (), None).units
        return sorted((unit.source_nodes, unit.op, unit.relation, unit.serves) for unit in units)

    expected = attributed(optimized)
    assert {names for names, op, *_ in expected if op == "QuickGelu"} == {
        (f"/b{index}/act/Sigmoid", f"/b{index}/act/Mul") for index in range(8)
    }
    for seed in range(20):
        assert attributed(shuffled(optimized, seed)) == expected
