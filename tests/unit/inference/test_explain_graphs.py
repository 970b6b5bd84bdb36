# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports of sessions on what is missing: a CUDA device, nodes that were folded, a model file that was replaced."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

import machines
import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from xpuruntime.engines.base import Observed
from xpuruntime.engines.null import NullEngine, NullModel
from xpuruntime.engines.registry import EngineRegistry
from xpuruntime.evidence.records import Boundary, Unit
from xpuruntime.runtime.machine import CpuFacts, EngineFacts, Machine

if TYPE_CHECKING:
    from pathlib import Path

GPU = machines.gpu(name="some GPU", total_memory=1 << 37)
MACHINE = machines.machine(
    python="3.12",
    cpu=CpuFacts(name="cpu", cores=8),
    cuda=(GPU,),
    core_cuda=True,
    engines={"null": EngineFacts(name="null", version="1", loadable=True, providers=("null",))},
)


class PlantedModel(NullModel):
    """Says that one node of the demo model ran on the CPU of a CUDA session, between two copies."""

    refusal: ClassVar[str | None] = None

    def observe(self, feeds: Any, runs: int) -> Observed:
        seen = super().observe(feeds, runs)
        names = [node.name for node in self._info.nodes]
        units = tuple(
            Unit(
                id=name,
                op=node.op,
                relation="exact",
                source_nodes=(name,),
                outputs=node.outputs,
                engine="null",
                device="cpu" if name == "pool2" else "cuda:0",
            )
            for name, node in zip(names, self._info.nodes, strict=True)
        )
        copy = Boundary(kind="copy", where="cuda:0 -> cpu", count=1, bytes=64)
        return msgspec.structs.replace(seen, units=units, boundaries=(copy,))

    def graph_refusal(self) -> str | None:
        return self.refusal


class PlantedEngine(NullEngine):
    def devices(self, machine: Machine) -> tuple[str, ...]:
        return ("cuda:0",) if machine.cuda else ("cpu",)

    def judge(self, request: Any, machine: Machine) -> Any:
        judgement = super().judge(msgspec.structs.replace(request, device="cpu"), machine)
        verdict = msgspec.structs.replace(judgement.verdict, candidate=f"null@{request.device}")
        return msgspec.structs.replace(judgement, verdict=verdict)

    def load(self, request: Any, judgement: Any, machine: Machine) -> Any:
        model = super().load(request, judgement, machine)
        model.__class__ = PlantedModel
        return model


def planted(graph: str = "prefer") -> xrt.InferenceSession:
    registry = EngineRegistry()
    registry.register(PlantedEngine())
    execution = xrt.ExecutionPolicy(engine="null", device="cuda:0", cuda_graph=graph)  # type: ignore[arg-type]
    return xrt.InferenceSession(xrt.demo_model_path(), exec_policy=execution, registry=registry, machine=MACHINE)


@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
class TestPlanted:
    def test_the_node_on_the_cpu_is_named_in_every_form(self) -> None:
        with planted() as session:
            report = session.explain(runs=1)
        status = report.cuda_graph
        assert status is not None
        assert (status.status, status.asked) == ("blocked", "prefer")
        assert [(blocker.node, blocker.op, blocker.kind) for blocker in status.blockers] == [
            ("pool2", "MaxPool", "placement"),
            ("cuda:0 -> cpu", "copy", "copy"),
        ]
        assert status.holds_for[0].startswith("the sizes it was captured with: image leaves N open")
        for text in (str(report), report._repr_html_(), report.to_html()):
            assert "pool2" in text
            assert "runs on cpu, and a graph holds" in " ".join(text.split())

    def test_what_a_binding_said_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with planted() as session:
            session.bind({"image": (1, 1, 8, 8)})
            assert session.explain(runs=1).cuda_graph.status == "blocked"  # type: ignore[union-attr]
            bind = type(session._loaded).bind

            def captured(*given: Any) -> Any:
                binding = bind(*given)
                binding.graph = "captured"
                return binding

            monkeypatch.setattr(PlantedModel, "bind", captured)
            session.bind({"image": (1, 1, 8, 8)})
            assert session.explain(runs=1).cuda_graph.status == "captured"  # type: ignore[union-attr]

    def test_a_required_graph_that_was_refused_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: Any) -> Any:
            raise xrt.EngineError("m.onnx cannot be captured as a CUDA graph: not now", engine="null")

        monkeypatch.setattr(PlantedModel, "bind", refused)
        with planted("require") as session:
            with pytest.raises(xrt.EngineError):
                session.bind()
            status = session.explain(runs=1).cuda_graph
        assert status is not None
        assert status.status == "refused"
        assert "not now" in status.reason
        assert "pool2 (MaxPool)" in status.reason

    def test_a_refusal_at_loading_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PlantedModel, "refusal", "This session has control flow nodes")
        with planted() as session:
            status = session.explain(runs=1).cuda_graph
        assert status is not None
        assert status.reason.startswith("null refused: This session has control flow nodes")


def constant(path: Path) -> Path:
    value = numpy_helper.from_array(np.array([-1, 2], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], name="constant", value=value),
        helper.make_node("Relu", ["k"], ["y"], name="relu"),
    ]
    graph = helper.make_graph(nodes, "constant", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_model_of_constants_is_seen_whole(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"the engine {engine} is not installed")
    with xrt.InferenceSession(constant(tmp_path / "constant.onnx"), device="cpu", engine=engine) as session:
        report = session.explain()
        np.testing.assert_array_equal(session.run({})["y"], [0, 2])
    assert [(unit.relation, unit.source_nodes) for unit in report.units] == [
        ("folded", ("constant",)),
        ("folded", ("relu",)),
    ]
    assert (report.headline, report.partial) == ("policy honoured", False), report.notes
    assert not any("generated" in note for note in report.notes), "there are no inputs"


def write(path: Path, op: str) -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node(op, ["x"], ["y"], name="node")
    sides = [value("x", TensorProto.FLOAT, [4])], [value("y", TensorProto.FLOAT, [4])]
    model = helper.make_model(
        helper.make_graph([node], op, *sides), opset_imports=[helper.make_opsetid("", 17)], ir_version=10
    )
    onnx.save(model, path)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_model_that_was_replaced_is_not_taken_for_the_sessions(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"the engine {engine} is not installed")
    path = tmp_path / "model.onnx"
    write(path, "Exp")
    x = np.zeros(4, np.float32)
    with xrt.InferenceSession(path, device="cpu", engine=engine) as session:
        assert session.explain({"x": x}, runs=1).honoured
        write(path, "HardSwish")
        report = session.explain({"x": x}, runs=1)
        np.testing.assert_array_equal(session.run({"x": x})["y"], np.ones(4, np.float32))
    assert report.partial
    assert (report.headline, report.units) == ("nothing observed", ())
    assert any("the file changed since it was inspected" in note for note in report.notes), report.notes
    assert [node.op for node in report.graph] == ["Exp"]
