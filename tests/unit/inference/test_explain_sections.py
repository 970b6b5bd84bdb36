# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory over time, CUDA graphs and shapes in the reports of real sessions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from exported_models import CONVNET, example
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.evidence.cuda_graphs import graph_blockers
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint, observe_checkpoints
from xpuruntime.inference.profiling import MemoryWatch

if TYPE_CHECKING:
    from pathlib import Path

OWN = ["before", "the session's warm-up runs", "the session's timed runs"]
LAST = "after the pass"


def moments(report: xrt.Report) -> list[str]:
    return [one.moment for one in report.memory_over_time]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_moments_of_a_pass_with_a_copy(engine: str) -> None:
    if engine != "onnxruntime":
        pytest.importorskip(engine)
    with xrt.InferenceSession(CONVNET, device="cpu", engine=engine) as session:
        report = session.explain(example("convnet"), runs=2)
    assert moments(report) == [*OWN, LOADED, COLD, COUNTED, LAST]
    times = [one.at_us for one in report.memory_over_time]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    if sys.platform == "linux":
        resident = [one.owners["process: resident"] for one in report.memory_over_time]
        most = [one.owners["process: most resident"] for one in report.memory_over_time]
        assert all(0 < now <= peak for now, peak in zip(resident, most, strict=True))


def test_a_copy_with_large_weights_is_seen_when_it_is_loaded(tmp_path: Path) -> None:
    """The copy of 64 MB of weights is in the process between its loading and its end."""
    weight = np.random.default_rng(0).standard_normal((4096, 4096)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4096])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4096])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "large.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        report = session.explain(runs=1)
    held = {one.moment: one.owners["process: resident"] for one in report.memory_over_time}
    assert held[LOADED] - held[OWN[-1]] > 48 << 20


def test_our_pools_are_owners() -> None:
    pool = xrt.MemoryPool("cpu", name="for the test")
    buffer = pool.allocate(1 << 20)
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
        report = session.explain(runs=1)
    for sample in report.memory_over_time:
        assert sample.owners["pool for the test: in use"] == pool.stats().current >= buffer.nbytes
        assert sample.owners["pool for the test: cached"] == pool.stats().cached


def chain(path: Path, batch: Any = 2) -> Path:
    """Four operators that none of the engines fuses: the first result is read again by the last one."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], "soft", axis=1),
        helper.make_node("ReduceSum", ["a"], ["b"], "sum", keepdims=1),
        helper.make_node("CumSum", ["a", "axis"], ["c"], "cum"),
        helper.make_node("TopK", ["c", "k"], ["d", "i"], "top", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 256])],
        [
            helper.make_tensor_value_info("b", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("d", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("i", TensorProto.INT64, None),
        ],
        [
            onnx.numpy_helper.from_array(np.array(1, np.int64), "axis"),
            onnx.numpy_helper.from_array(np.array([16], np.int64), "k"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_live_bytes_of_onnxruntime_are_those_of_its_profile(tmp_path: Path) -> None:
    with xrt.InferenceSession(chain(tmp_path / "m.onnx"), device="cpu", engine="onnxruntime") as session:
        report = session.explain(runs=2)
    row = 2 * 256 * 4
    makes = {"soft": {"a": row}, "sum": {"b": 4}, "cum": {"c": row}, "top": {"d": 2 * 16 * 4, "i": 2 * 16 * 8}}
    readers = {"a": {"sum", "cum"}, "c": {"top"}}
    order = [one.unit for one in report.live]
    assert order[0] == "soft"
    assert sorted(order) == sorted(makes) == sorted(unit.id for unit in report.units)
    held: dict[str, int] = {}
    for index, one in enumerate(report.live):
        held |= makes[one.unit]
        assert one.during == sum(held.values())
        left = set(order[index + 1 :])
        held = {name: size for name, size in held.items() if name not in readers or readers[name] & left}
        assert one.after == sum(held.values())


def test_live_bytes_grow_with_the_batch() -> None:
    for engine in ("onnxruntime", "openvino"):
        if engine == "openvino":
            pytest.importorskip("openvino")
        with xrt.InferenceSession(CONVNET, device="cpu", engine=engine) as session:
            most = [max(one.during for one in session.explain(example("convnet", n), runs=1).live) for n in (1, 4)]
        assert most[0] > 0
        assert most[1] == pytest.approx(4 * most[0], rel=0.05)


@pytest.mark.torch
class TestTorch:
    def module(self) -> Any:
        torch = pytest.importorskip("torch")

        class Net(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.first = torch.nn.Linear(16, 32)

            def forward(self, x: Any) -> Any:
                wide = self.first(x)
                left, right = torch.chunk(wide.view(-1, 2, 16).transpose(1, 2), 2, 1)
                return torch.exp(left).contiguous(), torch.sin(right)

        return Net().eval()

    @pytest.mark.parametrize("form", ["module", "exported"])
    def test_views_share_the_memory_of_what_they_look_at(self, form: str, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        module, x = self.module(), torch.zeros(8, 16)
        model: Any = module
        more: dict[str, Any] = {"example_inputs": [x]}
        if form == "exported":
            model, more = tmp_path / "m.pt2", {}
            torch.export.save(torch.export.export(module, (x,)), model)
        with xrt.InferenceSession(model, device="cpu", **more) as session:
            report = session.explain(runs=2)
        wide, half = 8 * 32 * 4, 8 * 16 * 4
        found = {one.unit.rpartition("/")[2]: one for one in report.live}
        product = found["linear" if form == "exported" else "addmm"]
        assert (product.during, product.after) == (wide, wide)
        for view in ("view", "transpose"):
            assert (found[view].during, found[view].after) == (wide, wide)
        assert found["exp"].during == wide + half
        assert report.live[-1].after == 2 * half
        assert max(one.during for one in report.live) == wide + 2 * half
        assert moments(report) == [*OWN, COLD, COUNTED, LAST]
        assert all(one.owners["session: weights"] == (16 * 32 + 32) * 4 for one in report.memory_over_time)

    def test_a_range_of_an_exported_program(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        batch = torch.export.Dim("batch", min=2, max=64)
        program = torch.export.export(self.module(), (torch.zeros(8, 16),), dynamic_shapes={"x": {0: batch}})
        torch.export.save(program, tmp_path / "m.pt2")
        with xrt.InferenceSession(tmp_path / "m.pt2", device="cpu") as session:
            (row,) = session.explain({"x": torch.zeros(5, 16)}, runs=1).shapes.inputs  # type: ignore[union-attr]
        assert (row.allowed, row.observed, row.covered) == ("2..64 x 16", "5 x 16", "some")
        assert row.reason.endswith("was 5, one of 63 sizes")

    def test_operators_that_no_capture_takes_are_in_the_units(self) -> None:
        """As PyTorch records them, here on the CPU: what would be a blocker on CUDA has the names we look for."""
        torch = pytest.importorskip("torch")

        class Waits(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return torch.masked_select(x, x > 0) * float(x.sum()), torch.nonzero(x)

        with xrt.InferenceSession(Waits().eval(), device="cpu", example_inputs=[torch.eye(4)]) as session:
            report = session.explain({"x": torch.eye(4)}, runs=1)
        blockers = graph_blockers("cpu", report.units, report.boundaries, report.graph)
        assert {(blocker.op.rpartition(".")[2], blocker.kind) for blocker in blockers} == {
            ("masked_select", "data_dependent"),
            ("_local_scalar_dense", "sync"),
            ("nonzero", "data_dependent"),
        }


def test_control_flow_of_onnxruntime_is_in_the_units(tmp_path: Path) -> None:
    """A Loop that no optimizer removes, and NonZero, as ONNX Runtime ran them here on the CPU."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 2]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2]),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["n", "", "x"], ["l"], "loop", body=body),
        helper.make_node("NonZero", ["l"], ["y"], "find"),
    ]
    graph = helper.make_graph(
        nodes,
        "looping",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2]),
            helper.make_tensor_value_info("n", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [2, None])],
    )
    path = tmp_path / "looping.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    feeds = {"x": np.ones((2, 2), np.float32), "n": np.array(3, np.int64)}
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        report = session.explain(feeds, runs=1)
    blockers = graph_blockers("cpu", report.units, report.boundaries, report.graph)
    assert {(blocker.node, blocker.kind) for blocker in blockers} == {
        ("loop", "control_flow"),
        ("find", "data_dependent"),
    }
    assert [one.unit for one in report.live] == ["loop", "find"]
    assert [row.covered for row in report.shapes.inputs] == ["all", "all"]  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_shapes_of_a_session(engine: str) -> None:
    if engine != "onnxruntime":
        pytest.importorskip(engine)
    for sizes, allowed, covered in (
        (None, "any x 3 x 32 x 32", "some"),
        ([2, 3, 32, 32], "2 x 3 x 32 x 32", "all"),
        (["1..8", 3, 32, 32], "1..8 x 3 x 32 x 32", "some"),
    ):
        policy: dict[str, Any] = {"execution": {"engine": engine, "device": "cpu"}}
        if sizes is not None:
            policy["execution"]["shapes"] = {"image": sizes}
        with xrt.InferenceSession(CONVNET, policy=policy) as session:
            coverage = session.explain(example("convnet", 2), runs=1).shapes
        assert coverage is not None
        (row,) = coverage.inputs
        assert (row.allowed, row.observed, row.covered) == (allowed, "2 x 3 x 32 x 32", covered)


def test_a_device_that_cannot_be_read_and_an_engine_that_breaks_are_noted_once() -> None:
    def broken() -> dict[str, int]:
        raise RuntimeError("no such counter")

    watch = MemoryWatch(broken, "cuda:99")
    watch("a")
    watch("b")
    assert [sample.moment for sample in watch.samples] == ["a", "b"]
    assert [note.partition(":")[0] for note in watch.notes] == [
        "the engine does not report what the session holds",
        "the memory of cuda",
    ]
    assert not any(owner.startswith(("session", "cuda")) for sample in watch.samples for owner in sample.owners)


def test_moments_are_told_to_the_one_who_watches_and_to_nobody_else() -> None:
    outer: list[str] = []
    inner: list[str] = []
    checkpoint("nobody")
    with observe_checkpoints(outer.append):
        checkpoint("a")
        with observe_checkpoints(inner.append):
            checkpoint("b")
        checkpoint("c")
    checkpoint("nobody")
    assert (outer, inner) == (["a", "c"], ["b"])


def test_a_pass_that_breaks_off_keeps_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        checkpoint(LOADED)
        raise RuntimeError("the copy died")

    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        monkeypatch.setattr(session._loaded, "_observer", broken)
        report = session.explain(runs=1)
    assert report.partial
    assert moments(report) == [*OWN, LOADED, LAST]
    assert report.live == ()
