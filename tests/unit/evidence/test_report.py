# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The report as a value: building, saving, loading."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evidence_records import BOUNDARY, CONVERSION, LATENCY, control, unit
from machines import gpu, machine

import xpuruntime as xrt
from xpuruntime.engines.base import Observed
from xpuruntime.errors import InputError
from xpuruntime.evidence import Report, build_report
from xpuruntime.evidence.key_observations import observations
from xpuruntime.evidence.report_building import environment_facts, influential_variables, machine_facts
from xpuruntime.runtime.machine import CpuFacts, Library

PLAN = {"schema": "xpuruntime.plan/1", "engine": "onnxruntime", "device": "cpu", "precision": "fp32", "more": (1, (2,))}


def build(units=(), controls=(), **keywords):
    observed = Observed(units=tuple(units), boundaries=(BOUNDARY,), notes=("times are the host's",))
    return build_report(
        PLAN,
        controls,
        observed,
        conversions=[CONVERSION],
        latency=LATENCY,
        memory={"weights": 1 << 20},
        libraries=[Library(name="libx.so", path="/x/libx.so", version="1.2", origin="pip")],
        **keywords,
    )


def test_an_honoured_policy():
    report = build([unit("a")], [control("execution.fallback", "error")])
    assert report.honoured
    assert report.headline == "policy honoured"
    assert report.deviations == ()
    assert [o.key for o in report.observations] == [
        "execution.engine",
        "execution.device",
        "execution.precision",
        "execution.fallback",
    ]


def test_deviations_are_counted():
    report = build([unit("a", ran="fp16")])
    assert (report.headline, report.honoured) == ("1 deviation", False)
    report = build([unit("a", ran="fp16", device="cuda:0")], [control("kernels.conv", "x", "-", "unsupported")])
    assert report.headline == "3 deviations"
    assert [o.key for o in report.deviations] == ["execution.device", "execution.precision", "kernels.conv"]


def test_what_could_not_be_seen_is_no_deviation_and_is_told():
    report = build([unit("a")], [control("execution.tf32", "true")])
    assert report.honoured
    assert [o.key for o in report.unobservable] == ["execution.tf32"]
    assert "1 of 4 keys could not be observed" in str(report)


def test_a_pass_that_broke_off_does_not_claim_more_than_it_saw():
    report = build_report(PLAN, (), Observed(units=(unit("a"),), partial=True))
    assert report.headline == "policy honoured as far as observed"
    assert "incomplete" in str(report)


def test_a_pass_that_saw_nothing_claims_nothing():
    report = build_report(PLAN, [control("execution.tf32", "true")], Observed(partial=True, notes=("no session",)))
    assert (report.headline, report.honoured, report.deviations) == ("nothing observed", False, ())
    assert len(report.unobservable) == 4


def test_the_round_trip_is_exact(tmp_path):
    report = build([unit("a"), unit("b", relation="inserted", serves=("a",))], [control("execution.tf32", "true")])
    path = report.save(tmp_path / "report.json")
    assert Report.load(path) == report
    assert Report.load(str(path)).to_json() == report.to_json()
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_json_forms():
    report = build([unit("a")])
    plain = report.to_dict()
    assert plain == json.loads(report.to_json()) == json.loads(report.to_json(indent=None))
    assert plain["schema"] == "xpuruntime.report/1"
    assert (plain["honoured"], plain["headline"]) == (True, "policy honoured")
    assert plain["units"][0]["time"] == {"value": 10.0, "unit": "us", "kind": "wall", "runs": 5}
    assert "\n" not in report.to_json(indent=None)
    assert list(plain) == [
        "schema",
        "headline",
        "honoured",
        "fallback",
        *[f for f in Report.__struct_fields__ if f != "schema"],
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not a report"),
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ("{}", "is not a report"),
        ('{"schema": "xpuruntime.plan/1"}', "has the schema 'xpuruntime.plan/1'"),
        ('{"schema": "xpuruntime.report/9"}', "has the schema 'xpuruntime.report/9'"),
        ('{"schema": "xpuruntime.report/1", "units": [{"id": 5}]}', "is not a report"),
        ('{"schema": "xpuruntime.report/1", "observations": [{"key": "a"}]}', "is not a report"),
    ],
)
def test_other_files_are_refused(tmp_path, text, match):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=match):
        Report.load(path)


def test_binary_and_missing_files_are_refused(tmp_path):
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="is not a report"):
        Report.load(tmp_path / "b")
    with pytest.raises(InputError, match="No such file"):
        Report.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot write the report"):
        build().save(tmp_path / "no" / "such" / "folder.json")


def test_the_command_and_the_time():
    report = build()
    assert sys.orig_argv[0] in report.command
    assert build(command="xrt explain model.onnx").command == "xrt explain model.onnx"
    assert report.created.endswith("+00:00")


def test_the_plan_is_kept_as_json_gives_it_back():
    assert build().plan["more"] == [1, [2]]
    assert build().latency.detail == {"warmup": [1, 2]}


def test_environment(monkeypatch):
    monkeypatch.setenv("ORT_DISABLE_FLASH_ATTENTION", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("ORT_API_TOKEN", "do not tell")
    monkeypatch.setenv("HARMLESS", "x")
    facts = environment_facts()
    assert facts["variables"]["ORT_DISABLE_FLASH_ATTENTION"] == "1"
    assert facts["variables"]["OMP_NUM_THREADS"] == "3"
    assert not {"ORT_API_TOKEN", "HARMLESS"} & set(facts["variables"])
    assert facts["packages"]["numpy"]
    assert facts["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert msgspec.json.decode(msgspec.json.encode(facts)) == facts


def test_the_driver_and_the_devices():
    here = machine(python="3.11", cpu=CpuFacts(name="EPYC", cores=4))
    assert machine_facts(here) == {"cpu": "EPYC, 4 cores"}
    card = gpu(1, name="H200", total_memory=1 << 37, runtime_version=(12, 9))
    facts = machine_facts(msgspec.structs.replace(here, cuda=(card,)))
    assert facts["driver"] == "CUDA 13.0"
    assert facts["devices"] == {"cuda:1": "H200, sm90, 137438953472 bytes"}


def test_variables_of_another_process():
    given = {"NVIDIA_TF32_OVERRIDE": "0", "LD_PRELOAD": "/x.so", "HOME": "/", "CUDA_VISIBLE_DEVICES": "1"}
    assert list(influential_variables(given)) == ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE"]


def test_the_timeline_of_a_session_has_each_unit_at_its_time(tmp_path) -> None:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        report = session.explain(runs=2)
    spans = report.timeline.spans
    assert {span.unit for span in spans} == {unit.id for unit in report.units if unit.time is not None}
    assert {span.lane for span in spans} == {"thread 1"}
    starts = [span.start_us for span in spans]
    assert starts == sorted(starts)
    assert all(span.start_us + span.us <= report.timeline.run_us for span in spans)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").timeline == report.timeline


MODEL = xrt.demo_model_path()


@pytest.fixture
def report() -> Any:
    pytest.importorskip("openvino")
    policy = {"execution": {"engine": "qnn", "device": "npu", "fallback": ["openvino@cpu"], "precision": "fp32"}}
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"execution\.fallback was used"):
        session = xrt.InferenceSession(MODEL, policy=policy)
    with session:
        return session.explain(runs=1)


def test_a_fallback_is_in_the_headline_and_has_its_status(report: Any, tmp_path: Path) -> None:
    statuses = {observation.key: observation.status for observation in report.observations}
    assert {key for key, status in statuses.items() if status == "fallback"} == {
        "execution.engine",
        "execution.device",
        "execution.fallback",
    }
    assert (report.headline, report.fallback) == ("policy honoured by fallback openvino@cpu", "openvino@cpu")
    assert report.honoured
    assert not report.deviations
    plain = json.loads(report.to_json())
    assert (plain["headline"], plain["fallback"]) == (report.headline, "openvino@cpu")
    again = xrt.Report.load(report.save(tmp_path / "report.json"))
    assert again.headline == report.headline
    assert str(report).startswith("policy honoured by fallback openvino@cpu")
    assert "by fallback openvino@cpu" in report.to_html()


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [
        ("qnn", "npu", ("fallback", "fallback")),
        ("[qnn, onnxruntime]", "npu", ("honoured", "fallback")),
        ("onnxruntime", "cuda:0", ("honoured", "fallback")),
        ("qnn", "cpu", ("fallback", "honoured")),
        ("qnn", "auto", ("fallback", "honoured")),
        ("auto", "npu", ("honoured", "fallback")),
    ],
)
def test_which_keys_a_fallback_changes(engine: str, device: str, expected: tuple[str, str]) -> None:
    controls = [
        control("execution.engine", engine, "onnxruntime"),
        control("execution.device", device, "cpu"),
        control("execution.fallback", "onnxruntime@cpu", "used: onnxruntime@cpu"),
    ]
    found = observations(controls, {}, [unit("a")], engine="onnxruntime", device="cpu")
    assert tuple(one.status for one in found[:2]) == expected
    assert found[-1].status == "fallback"
