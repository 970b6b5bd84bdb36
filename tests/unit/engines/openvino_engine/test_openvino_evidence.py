# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What OpenVINO ran, joined to the source nodes, and what is read back of the settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported_models import example, exported, samples
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from xpuruntime.engines.openvino.counters import share_out
from xpuruntime.engines.openvino.execution_graph import Executed, mentions, name_operations, name_without_numbers
from xpuruntime.testing import models

ov = pytest.importorskip("openvino")

VALUE = helper.make_tensor_value_info


def open_(path: Path, **options: Any) -> xrt.InferenceSession:
    return xrt.InferenceSession(path, device="cpu", engine="openvino", **options)


def accounted(session: xrt.InferenceSession, report: xrt.Report) -> bool:
    """Whether every source node is in exactly one unit."""
    told = Counter(name for unit in report.units for name in unit.source_nodes)
    return told == Counter(node.name for node in session.model.nodes)


def built(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: tuple[Any, ...] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def computes_bf16() -> bool:
    """Whether OpenVINO itself says so of this processor."""
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def test_bf16_is_refused_where_the_processor_has_none() -> None:
    if computes_bf16():
        open_(exported("convnet"), precision="bf16", policy={"mode": "auto"}).close()
    else:
        with pytest.raises(xrt.UnsupportedOperationError, match="precision_unsupported: OpenVINO computes in bf16 on"):
            open_(exported("convnet"), precision="bf16")


PRECISIONS = ("fp32", "bf16") if computes_bf16() else ("fp32",)


@pytest.mark.parametrize("name", ["digits", "convnet", "encoder", "conv", "mlp"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_node_is_accounted_for_once(tmp_path: Path, name: str, precision: Any) -> None:
    feeds = None
    if name in ("convnet", "encoder"):
        path, feeds = exported(name), example(name)
    elif name == "digits":
        path = xrt.demo_model_path()
    else:
        path = models.save(getattr(models, name)(), tmp_path)
    with open_(path, precision=precision, policy={"mode": "auto"}) as session:
        report = session.explain(feeds, runs=2)
        assert accounted(session, report)
    assert not report.partial
    kernels = [u.kernel for u in report.units if u.op in ("Convolution", "FullyConnected")]
    assert kernels
    assert all(kernels)
    suffix = {"fp32": "f32", "bf16": "bf16"}[precision]
    assert all(str(kernel).endswith(suffix) for kernel in kernels), kernels
    ran = {u.precision_run for u in report.units if u.precision_requested}
    assert precision in ran
    assert report.honoured == (ran == {precision}), report
    if precision == "fp32":
        assert ran == {"fp32"}
    elif name == "encoder":  # the plugin keeps the sums of a transformer in fp32
        assert ran == {"bf16", "fp32"}
        found = next(o for o in report.observations if o.key == "execution.precision")
        assert found.status == "substituted"
        assert "node_add_9" in found.reason
    assert any(u.time is not None for u in report.units)


def test_what_each_unit_says() -> None:
    with open_(xrt.demo_model_path(), precision="fp32") as session:
        report = session.explain(runs=3)
    by_node = {name: unit for unit in report.units for name in unit.source_nodes}
    conv = by_node["conv1"]
    assert conv.source_nodes == ("conv1", "bn1", "relu1")
    assert (conv.relation, conv.op, conv.kernel_source, conv.layout) == ("fused", "Convolution", "reported", "nhwc")
    assert conv.outputs == ("r1",)
    assert (conv.engine, conv.device, conv.provider) == ("openvino", "cpu", "CPU")
    assert conv.time is not None
    assert (conv.time.unit, conv.time.kind, conv.time.runs) == ("us", "wall", 3)
    assert by_node["pool2"].relation == "exact"
    assert by_node["fc2"].outputs == ("logits",)
    assert not any("xrt" in unit.id for unit in report.units)
    assert any(b.kind == "layout" for b in report.boundaries)
    assert any("not mentioned" in note for note in report.notes)
    inserted = [u for u in report.units if u.relation == "inserted" and u.op == "Reorder"]
    assert inserted
    assert not any(u.source_nodes for u in inserted)


@pytest.mark.skipif(not computes_bf16(), reason="this processor does not compute in bf16")
def test_casts_of_bf16_are_boundaries() -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="bf16 is advisory"):
        session = open_(exported("convnet"), precision="bf16")
    with session:
        report = session.explain(example("convnet"), runs=1)
    casts = [b for b in report.boundaries if b.kind == "cast"]
    assert [b.where for b in casts if b.where.startswith("fp32 -> bf16")]
    assert all(b.count > 0 for b in casts)


def test_float64_is_computed_in_fp32_and_that_is_a_deviation(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    weight = numpy_helper.from_array(np.eye(3), "w")
    value = [VALUE("x", TensorProto.DOUBLE, ["N", 3])], [VALUE("y", TensorProto.DOUBLE, ["N", 3])]
    path = models.save(built([node], *value, (weight,)), tmp_path)
    with pytest.warns(xrt.XpuRuntimeWarning, match="computes fp64 in fp32: 'm'"):
        session = open_(path)
    with session:
        assert "computes float64 as float32" in session.plan.accepted.reason
        report = session.explain({"x": np.ones((2, 3))}, runs=1)
        assert accounted(session, report)
    assert not report.honoured
    assert "fp32" in next(o.observed for o in report.observations if o.key == "execution.precision")


@pytest.mark.parametrize("name", ["convnet", "digits"])
def test_int8_from_samples(name: str) -> None:
    if name == "convnet":
        path, calibration, feeds = exported(name), samples(name, 16), example(name)
    else:
        from xpuruntime.demo.run import demo_images

        images, _ = demo_images()
        path, feeds = xrt.demo_model_path(), {"image": images[:1]}
        calibration = [{"image": images[i : i + 1]} for i in range(16)]
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory"):
        session = open_(path, precision="int8", calibration=calibration)
    with session, open_(path, precision="fp32") as plain:
        report = session.explain(feeds, runs=1)
        assert accounted(session, report)
        got, want = session.run(feeds), plain.run(feeds)
    for key, value in want.items():
        assert np.abs(got[key] - value).max() < 0.1 * np.abs(value).max()
    convs = [u for u in report.units if u.op == "Convolution"]
    assert convs
    assert {u.precision_requested for u in convs} == {"int8"}
    if name == "convnet":
        assert {u.precision_run for u in convs} <= {"int8", "uint8"}
        assert report.honoured, report


def _qdq_conv(weights: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> onnx.ModelProto:
    """Return a convolution with its input, weights and output quantized to uint8 and the type of `weights`."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], name="q_x"),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], name="d_x"),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], name="d_w", axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("QuantizeLinear", ["r", "xs", "xz"], ["rq"], name="q_r"),
        helper.make_node("DequantizeLinear", ["rq", "xs", "xz"], ["y"], name="d_r"),
    ]
    constants = {"xs": np.float32(0.05), "xz": np.uint8(128), "w": weights, "ws": scale, "wz": zero}
    shape = [1, weights.shape[1], 8, 8]
    return built(
        nodes,
        [VALUE("x", TensorProto.FLOAT, shape)],
        [VALUE("y", TensorProto.FLOAT, [1, weights.shape[0], 8, 8])],
        tuple(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()),
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantized_model_that_runs_otherwise_is_told(tmp_path: Path, symmetric: bool) -> None:
    """OpenVINO computes asymmetric 8-bit weights in fp32; what ran is what counts, not that the model is quantized."""
    rng = np.random.default_rng(0)
    if symmetric:
        # 7 bits: without VNNI, larger weights are a known silent error, which warns as well.
        weights, zero = rng.integers(-64, 65, (16, 16, 3, 3), np.int8), np.zeros(16, np.int8)
    else:
        weights, zero = rng.integers(0, 255, (16, 16, 3, 3), np.uint8), np.full(16, 131, np.uint8)
    path = models.save(_qdq_conv(weights, np.full(16, 0.01, np.float32), zero), tmp_path)
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory"):
        session = open_(path, precision="int8")
    with session:
        report = session.explain(runs=1)
        assert accounted(session, report)
        conv = next(u for u in report.units if "conv" in u.source_nodes)
        assert conv.precision_requested == "int8"
        found = next(o for o in report.observations if o.key == "execution.precision")
        if str(conv.kernel).lower().endswith("i8"):
            assert conv.precision_run == "int8"
            assert found.status == "honoured", report
        else:
            assert conv.precision_run == "fp32"
            assert (conv.status, found.status) == ("substituted", "substituted")
            assert "asked for int8, ran otherwise: 'conv'" in found.reason
        if not symmetric:
            assert conv.precision_run == "fp32"
    with open_(path, precision="model") as session:  # what the model asks is int8, too
        conv = next(u for u in session.explain(runs=1).units if "conv" in u.source_nodes)
        assert conv.precision_requested == "int8"


def test_nodes_that_do_nothing_or_are_not_read(tmp_path: Path) -> None:
    shape = ["N", 4]
    nodes = [
        helper.make_node("Identity", ["x"], ["i"], name="identity"),
        helper.make_node("Constant", [], ["k"], name="constant", value=numpy_helper.from_array(np.ones(4, np.float32))),
        helper.make_node("Exp", ["k"], ["e"], name="of constants"),
        helper.make_node("Add", ["i", "e"], ["s"], name="sum"),
        helper.make_node("Tanh", ["s"], ["lost"], name="unused"),
        helper.make_node("Dropout", ["s"], ["d"], name="dropout"),
        helper.make_node("Relu", ["d"], ["y"], name="relu, with a comma"),
    ]
    path = models.save(
        built(nodes, [VALUE("x", TensorProto.FLOAT, shape)], [VALUE("y", TensorProto.FLOAT, shape)]), tmp_path
    )
    with open_(path) as session:
        report = session.explain({"x": np.ones((2, 4), np.float32)}, runs=1)
        assert accounted(session, report)
    by_node = {name: unit for unit in report.units for name in unit.source_nodes}
    folded = {"identity", "constant", "of constants", "unused", "dropout"}
    assert {name for name, unit in by_node.items() if unit.relation == "folded"} == folded
    assert "constants" in str(by_node["of constants"].placement_reason)
    assert by_node["unused"].placement_reason == "removed: nothing reads its result"
    assert "relu, with a comma" in by_node


def test_settings_are_read_back(tmp_path: Path) -> None:
    options = {"NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False, "SCHEDULING_CORE_TYPE": "ANY_CORE"}
    policy = {
        "mode": "strict",
        "execution": {
            "engine": "openvino",
            "device": "cpu",
            "precision": "fp32",
            "threads": 1,
            "provider_options": {"ov": options},
        },
        "accuracy": {"rtol": 1e-3},
    }
    with xrt.InferenceSession(models.save(models.mlp(), tmp_path), policy=policy) as session:
        report = session.explain(runs=1)
    status = {o.key: o.status for o in report.observations}
    assert set(status.values()) == {"honoured"}, report
    for name in options:
        assert f"execution.provider_options.ov.{name}" in status
    assert "execution.threads" in status


class TestNames:
    def test_round_trip(self) -> None:
        graph = ov.Core().read_model(models.conv().SerializeToString())
        from xpuruntime.engines.model import inspect_bytes

        info = inspect_bytes(models.conv().SerializeToString())
        name_operations(graph, info.nodes)
        names = [op.get_friendly_name() for op in graph.get_ordered_ops()]
        numbers = {number for name in names for number, _ in mentions(name)}
        assert numbers == set(range(len(info.nodes)))
        fc = [name for name in names if name_without_numbers(name).startswith("fc:")]
        assert len(fc) > 1, "a Gemm is several operations"
        assert sum(end for name in fc for _, end in mentions(name)) == 1


def test_joining_accounts_for_whatever_openvino_mentions() -> None:
    """No choice of mentions leaves a node out or counts it twice."""
    from xpuruntime.engines.model import inspect_bytes

    info = inspect_bytes(models.conv().SerializeToString())
    rng = np.random.default_rng(0)
    for _ in range(200):
        units = [
            _executed(f"u{i}", [(int(n), bool(rng.integers(2))) for n in rng.integers(0, 9, rng.integers(0, 4))], rng)
            for i in range(rng.integers(0, 6))
        ]
        shares = share_out(info.nodes, units, ["x"], ["logits"])
        told = Counter([i for owned in shares.owned.values() for i in owned] + list(shares.folded))
        assert told == Counter(range(len(info.nodes)))


def _executed(name: str, mentioned: list[tuple[int, bool]], rng: np.random.Generator) -> Executed:
    return Executed(
        name=name,
        kind="Eltwise",
        mentioned=tuple(dict(mentioned).items()),
        kernel=None,
        precision="fp32",
        node_precision="fp32",
        reads="fp32",
        writes="fp32",
        layout=None,
        size=None,
        output_bytes=None,
        time_us=int(rng.integers(9)) if rng.integers(2) else None,
        still=bool(rng.integers(5) == 0),
        above=(),
    )


def test_a_conversion_serves_its_node_whatever_either_took(tmp_path: Path) -> None:
    """Of a unit that took less than a microsecond OpenVINO tells no time; which one that is changes from run to run."""
    node = helper.make_node("Add", ["x", "x"], ["y"], name="add")
    kinds = VALUE("x", TensorProto.INT64, [2]), VALUE("y", TensorProto.INT64, [2])
    with open_(models.save(built([node], [kinds[0]], [kinds[1]]), tmp_path)) as session:
        nodes = session.model.nodes
    rng = np.random.default_rng(0)
    sums, converts = _executed("y", [(0, True)], rng), _executed("y.0", [(0, True)], rng)
    for times in [(None, 1), (1, None), (None, None), (1, 1)]:
        units = [
            replace(sums, kernel="jit_i32", writes="int32", time_us=times[0], still=False),
            replace(converts, kernel="ref_i32", kind="Convert", writes="int64", time_us=times[1], still=False),
        ]
        shares = share_out(nodes, units, ["x"], ["y"])
        assert (shares.owned, shares.serves) == ({0: [0]}, {1: [0]}), times


@pytest.mark.filterwarnings("ignore:.*computes fp64 in fp32")
@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.INT64])
def test_the_units_of_a_short_model_have_the_same_names_in_every_process(tmp_path: Path, kind: int) -> None:
    nodes = [helper.make_node("Abs", ["x"], ["a"], name="abs"), helper.make_node("Neg", ["a"], ["y"], name="neg")]
    path = models.save(built(nodes, [VALUE("x", kind, [2])], [VALUE("y", kind, [2])]), tmp_path)
    for _ in range(3):
        with open_(path) as session:
            report = session.explain(runs=1)
        assert accounted(session, report)
        assert all(unit.op != "Convert" for unit in report.units if unit.source_nodes)
