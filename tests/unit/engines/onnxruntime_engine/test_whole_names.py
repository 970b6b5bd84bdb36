# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Profiles of ONNX Runtime whose names of nodes are cut off: attributed to the right node, or not observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h

from xpuruntime.engines.onnxruntime.observing.instrumented_run import assignment, instrument
from xpuruntime.engines.onnxruntime.observing.profile import read_profile
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units

if TYPE_CHECKING:
    from pathlib import Path

#: Operator and name, in the order in which they run: names that begin alike, a name that is the beginning of others,
#: one that ONNX Runtime would make for a node without a name, and one that this package writes behind a name.
NODES = [
    ("Neg", "/model/layers.0/mlp/act"),
    ("Neg", "/model/layers.0/mlp/act_1"),
    ("Abs", "/model/layers.0/mlp/act_2"),
    ("Neg", "/model/layers.10/mlp/act"),
    ("Abs", "/model"),
    ("Neg", "/mod"),
    ("Neg", "Neg_3"),
    ("Abs", "/model/layers.0#1"),
    ("Exp", "head"),
]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model, its executed graph, the events of a run and where nodes were placed."""
    folder: Path = tmp_path_factory.mktemp("profile")
    nodes = [h.make_node(op, [f"t{i}"], [f"t{i + 1}"], name=name) for i, (op, name) in enumerate(NODES)]
    x, y = (h.make_tensor_value_info(f"t{i}", T.FLOAT, [4]) for i in (0, len(NODES)))
    model = h.make_model(h.make_graph(nodes, "g", [x], [y]), opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    instrument(options, str(folder / "profile"), str(folder / "optimized.onnx"))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for _ in range(2):
        session.run(None, {"t0": np.ones(4, np.float32)})
    profile = read_profile(session.end_profiling())
    # A time of its own for each event, by which it is known again.
    events = [msgspec.structs.replace(event, time_us=float(i + 1)) for i, event in enumerate(profile.events)]
    return model, onnx.load(folder / "optimized.onnx"), events, assignment(session)


def times_of(joined: Any) -> dict[str, tuple[str, float | None, str]]:
    return {unit.outputs[0]: (unit.op, unit.time.value if unit.time else None, unit.status) for unit in joined.units
            if unit.source_nodes}  # fmt: skip


def test_names_that_are_whole(profiled: Any) -> None:
    model, graph, events, assigned = profiled
    times = times_of(attribute_units(model, graph, events, assigned))
    assert times == {f"t{i + 1}": (op, float(i + 1), "honoured") for i, (op, _) in enumerate(NODES)}


@pytest.mark.parametrize("length", range(1, 26))
def test_names_that_are_cut_off(profiled: Any, length: int) -> None:
    model, graph, events, assigned = profiled
    cut = [msgspec.structs.replace(event, name=event.name[:length]) for event in events]
    joined = attribute_units(model, graph, cut, assigned)
    times = times_of(joined)
    assert set(times) == {f"t{i + 1}" for i in range(len(NODES))}
    for i, (op, _) in enumerate(NODES):
        told = times[f"t{i + 1}"]
        assert told in ((op, float(i + 1), "honoured"), (op, None, "unobservable")), (length, told)
    assert times[f"t{len(NODES)}"] == ("Exp", float(len(NODES)), "honoured"), "no other node is an Exp"
    lost = [told for told in times.values() if told[2] == "unobservable"]
    assert joined.partial == bool(lost)
