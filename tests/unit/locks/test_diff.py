# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences of two environments: what is planted in one of them is found, with cause and pin, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from planted_interpreters import ANOTHER_VERSION, UNOPTIMISED, interpreter

import xpuruntime as xrt
from xpuruntime.errors import EngineError, InputError
from xpuruntime.evidence import Report
from xpuruntime.locks.diff.diffing import compare_environments as diff
from xpuruntime.locks.diff.result import LEVELS
from xpuruntime.runtime.worker import WorkerFailure

MODEL = Path(__file__).parents[2] / "models" / "convnet.onnx"


@pytest.fixture(scope="module")
def inputs():
    return {"image": np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)}


@pytest.fixture(scope="module")
def feeds():
    from xpuruntime.engines.precision import probe_feeds
    from xpuruntime.engines.registry import read_model

    return probe_feeds(read_model(MODEL))


def test_one_interpreter_is_the_same_as_itself(feeds):
    difference = diff("here", f"py:{sys.executable}", MODEL, inputs=feeds, device="cpu", budget=3, margin=0.5)
    verdicts = {level.name: level.verdict for level in difference.levels}
    assert tuple(verdicts) == LEVELS
    assert verdicts["environment"] == verdicts["plan"] == verdicts["placement"] == verdicts["numerics"] == "same"
    assert verdicts["kernels"] in {"same", "unobservable"}
    assert verdicts["time"] in {"same", "undecided"}, difference
    assert difference.exit_code in {0, 4}
    assert not [row for level in difference.levels for row in level.rows]
    assert difference.speed is not None
    assert difference.conditions is not None


def test_what_an_engine_does_otherwise_is_found_with_its_cause(tmp_path, feeds):
    side = interpreter(tmp_path / "new", customize=UNOPTIMISED + ANOTHER_VERSION)
    difference = diff("here", side, MODEL, inputs=feeds, device="cpu", budget=3)
    assert difference.exit_code == 1
    rows = {row.subject: row for row in difference.level("environment").rows}
    name, row = next((name, row) for name, row in rows.items() if name.startswith("packages.onnxruntime"))
    assert row.after == "9.9.9"
    assert row.restore == f"pip install {name.removeprefix('packages.')}=={row.before}"
    placement = difference.level("placement")
    assert placement.verdict == "differs"
    assert {row.code for row in placement.rows} & {"grouping", "folding", "inserted"}
    assert all(name in one.causes and row.restore in one.restore for one in placement.rows)
    # The engine itself, without xpuruntime, says whether the bits are the same.
    import onnxruntime as ort

    bits = []
    for level in (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(str(MODEL), options, providers=["CPUExecutionProvider"])
        bits.append([value.tobytes() for value in session.run(None, feeds)])
    assert (difference.level("numerics").verdict == "same") == (bits[0] == bits[1])


def test_a_variable_of_one_environment_is_named_with_its_pin(tmp_path, feeds):
    side = interpreter(tmp_path / "new", variables="export OMP_NUM_THREADS=1\n")
    difference = diff("here", side, MODEL, inputs=feeds, device="cpu", budget=0)
    rows = {row.subject: row for row in difference.level("environment").rows}
    if os.environ.get("OMP_NUM_THREADS") == "1":
        assert not rows
    else:
        assert rows["variables.OMP_NUM_THREADS"].after == "1"
        assert "OMP_NUM_THREADS" in rows["variables.OMP_NUM_THREADS"].restore


def test_another_result_of_one_node_is_found_at_that_node(tmp_path, feeds):
    """In one environment the weights of the second convolution are read with one value changed."""
    import onnx

    convs = [node for node in onnx.load(MODEL).graph.node if node.op_type == "Conv"]
    target = convs[min(1, len(convs) - 1)]
    customize = f"""
        import onnxruntime as ort
        import onnx
        from onnx import ModelProto, numpy_helper

        own = ort.InferenceSession.__init__

        def opened(self, path, *args, **kwargs):
            model = ModelProto.FromString(path) if isinstance(path, bytes) else onnx.load(path)
            for one in model.graph.initializer:
                if one.name == {target.input[1]!r}:
                    array = numpy_helper.to_array(one).copy()
                    array.flat[0] += 0.5
                    one.CopyFrom(numpy_helper.from_array(array, one.name))
            own(self, model.SerializeToString(), *args, **kwargs)

        ort.InferenceSession.__init__ = opened
    """
    side = interpreter(tmp_path / "new", customize=customize)
    difference = diff("here", side, MODEL, inputs=feeds, device="cpu", budget=0)
    numerics = difference.level("numerics")
    assert numerics.verdict == "differs", difference
    assert numerics.rows[0].subject.startswith("output ")
    first = numerics.rows[-1]
    with xrt.InferenceSession(MODEL, device="cpu") as session:
        names = {node.name: node for node in session.model.named_proto().graph.node}
    assert first.subject.startswith("first node ")
    assert list(names[first.nodes[0]].output) == list(target.output)


def saved(path: Path, change=None) -> str:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
        report = session.explain(runs=2)
    plain = json.loads(report.to_json())
    if change is not None:
        change(plain)
    path.write_text(json.dumps(plain))
    return str(path)


def other_precision(report):
    report["units"][0]["precision_run"] = "fp16"
    report["environment"]["packages"]["onnx"] = "1.0"
    report["libraries"] = [{"name": "libx.so", "path": "/a/site-packages/x/libx.so", "version": None, "origin": "pip"}]


def test_two_reports_are_compared_without_what_only_a_run_can_tell(tmp_path):
    before = saved(tmp_path / "a.json", lambda report: report.update(libraries=[]))
    after = saved(tmp_path / "b.json", other_precision)
    difference = diff(before, after)
    assert difference.exit_code == 1
    kernels = difference.level("kernels")
    assert [row.code for row in kernels.rows] == ["precision"]
    assert (kernels.rows[0].before, kernels.rows[0].after) == ("fp32", "fp16")
    assert "packages.onnx" in kernels.rows[0].causes
    assert "pip install onnx==" in kernels.rows[0].restore
    assert difference.level("numerics").verdict == difference.level("time").verdict == "not compared"
    assert diff(before, before).exit_code == 0
    assert json.loads(difference.to_json())["exit_code"] == 1


def test_libraries_that_lie_in_another_folder_alone_are_no_difference(tmp_path):
    def with_library(folder):
        one = {"name": "liby.so", "path": f"{folder}/site-packages/y/liby.so", "version": None, "origin": "pip"}
        return lambda report: report.update(libraries=[one])

    before, after = (saved(tmp_path / f"{name}.json", with_library(f"/{name}/lib")) for name in ("old", "new"))
    assert diff(before, after).level("environment").verdict == "same"


def test_a_report_is_compared_with_an_interpreter(tmp_path):
    report = saved(tmp_path / "a.json")
    difference = diff(report, "here", xrt.demo_model_path(), device="cpu")
    assert difference.level("placement").verdict == "same"
    assert difference.level("time").verdict == "not compared"
    assert isinstance(msgspec.json.decode(Path(report).read_bytes(), type=Report), Report)


def test_sides_that_are_none_are_refused_with_what_to_give(tmp_path):
    with pytest.raises(InputError, match=r"neither a file nor an interpreter\. Fix: give a report"):
        diff("there", "here", MODEL)
    with pytest.raises(InputError, match=r"runs a model\. Fix: give the model as MODEL"):
        diff("here", "here")
    with pytest.raises(InputError, match="not an executable file"):
        diff("here", f"py:{tmp_path / 'python'}", MODEL)
    with pytest.raises(WorkerFailure, match="ended in starting"):
        diff("here", "py:/bin/false", MODEL)
    report = saved(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"leave '.*' out"):
        diff(report, report, MODEL)


def test_an_interpreter_that_lacks_what_xpuruntime_needs_says_so(tmp_path):
    import venv

    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    with pytest.raises(EngineError, match=r"xpuruntime cannot be used in py:.*ModuleNotFoundError.*Fix: install"):
        diff("here", f"py:{tmp_path / 'bare' / 'bin' / 'python'}", MODEL)


def test_an_interpreter_that_dies_while_it_runs_the_model_is_named(tmp_path, feeds):
    customize = """
        import os
        import onnxruntime as ort

        ort.InferenceSession.__init__ = lambda *args, **kwargs: os.abort()
    """
    side = interpreter(tmp_path / "new", customize=customize)
    with pytest.raises(EngineError, match=r"py:.*new/python: .* by SIGABRT"):
        diff("here", side, MODEL, inputs=feeds, device="cpu")
