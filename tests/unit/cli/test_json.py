# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Every command under ``--json``: one JSON object on stdout, whatever happens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from xpuruntime.planning import Plan
from xpuruntime.runtime.snapshot import machine_from_json

if TYPE_CHECKING:
    from pathlib import Path

Xrt = Any


def test_devices(xrt: Xrt) -> None:
    result = xrt("devices", "--json")
    assert result.code == 0
    machine = machine_from_json(result.out)
    assert machine.cpu.cores >= 1
    assert machine.cuda or machine.cuda_reason
    assert machine.engines["onnxruntime"].loadable
    assert "CPUExecutionProvider" in machine.engines["onnxruntime"].providers


def test_doctor(xrt: Xrt) -> None:
    result = xrt("doctor", "--json")
    report = result.json()
    assert report["schema"] == "xpuruntime.doctor/1"
    assert result.code == (0 if report["healthy"] else 3)
    assert any(library["name"].startswith("_core") for library in report["loaded_libraries"])
    for finding in report["findings"]:
        assert finding["what"]
        assert finding["why"]
        assert finding["fix"] or finding["severity"] == "info"


def test_doctor_of_kernels(xrt: Xrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    rows = tmp_path / "rows.yaml"
    rows.write_text(
        "advisories: [{id: a, kernels: [cpu.blas], op: matmul, wrong: it is off, reference: here, archs: [cpu]}]"
    )
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(rows))
    findings = xrt("doctor", "--kernels", "--json").json()["findings"]
    assert {finding["code"] for finding in findings} == {"kernel_advisory"}
    assert any("cpu.blas: it is off" in finding["what"] and "{matmul: auto}" in finding["fix"] for finding in findings)


def test_plan(xrt: Xrt, digits: str) -> None:
    result = xrt("plan", digits, "--device", "cpu", "--json")
    assert result.code == 0
    plan = Plan.from_json(result.out)
    assert plan.candidate == "onnxruntime@cpu"
    assert plan.control("execution.device") is not None
    assert result.json()["request_hash"] == plan.request_hash
    assert result.json()["execution_hash"] == plan.execution_hash


def test_run(xrt: Xrt, two_inputs: str) -> None:
    result = xrt("run", two_inputs, "-i", "a=[[1, 2, 3]]", "-i", "b=[[0.5, 0.5, 0.5]]", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    outputs = result.json()["outputs"]
    assert outputs["sum"] == {
        "dtype": "float32",
        "shape": [1, 3],
        "min": 1.5,
        "max": 3.5,
        "mean": 2.5,
        "not_finite": 0,
        "first": [1.5, 2.5, 3.5],
        "values": [[1.5, 2.5, 3.5]],
    }
    assert outputs["count"]["values"] == [[1, 2, 3]]
    assert result.json()["probe_inputs"] == []


def test_not_finite_numbers_are_still_json(xrt: Xrt, two_inputs: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.full((1, 3), 1, np.float32), b=np.array([[np.nan, np.inf, 1]], np.float32))
    result = xrt("run", two_inputs, "-i", f"@{tmp_path / 'x.npz'}", "--device", "cpu", "--json")
    found = result.json()["outputs"]["sum"]
    assert (found["not_finite"], found["max"], found["values"]) == (2, 2.0, [[None, None, 2.0]])


def test_profile(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = xrt("profile", digits, "-n", 7, "--warmup", 2, "--device", "cpu", "--trace", trace, "--nodes", "--json")
    assert result.code == 0
    told = result.json()
    assert told["schema"] == "xpuruntime.profile/1"
    [run] = [share for share in told["shares"] if share["what"] == "range"]
    assert run["times"] >= 7
    assert run["us"] > 0
    tracks = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"run", "nodes of ONNX Runtime"} <= tracks


def test_bench(xrt: Xrt, digits: str) -> None:
    result = xrt("bench", digits, "-n", 7, "--warmup", 2, "--dim", "N=4", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    found = result.json()
    assert found["shapes"] == {"image": [4, 1, 8, 8]}
    for call in ("run", "bind"):
        row, samples = found["latency"][call], found["samples_us"][call]
        assert row["runs"] == len(samples) == 7
        assert row["min_us"] == min(samples)
        assert 0 < row["min_us"] <= row["median_us"] <= row["p90_us"] <= max(samples)


def test_demo(xrt: Xrt) -> None:
    result = xrt("demo", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    found = result.json()
    assert found["accuracy"] >= 0.98
    assert found["plan"]["engine"] == "onnxruntime"


def test_the_files_of_the_demo_are_not_overwritten(xrt: Xrt, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    assert xrt("demo", "--files", str(folder), "--json").code == 0
    assert xrt("plan", str(folder / "model.onnx"), "--policy", str(folder / "policy.yaml")).code == 0
    again = xrt("demo", "--files", str(folder))
    assert again.code == 2
    assert "model.onnx exists" in again.err


class TestPolicy:
    def test_schema_accepts_a_valid_policy_and_refuses_a_wrong_one(self, xrt: Xrt) -> None:
        schema = xrt("policy", "schema", "--json").json()
        jsonschema.validate({"mode": "strict", "execution": {"device": "cuda:0"}}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"execution": {"devise": "cpu"}}, schema)

    def test_check_show_convert(self, xrt: Xrt, tmp_path: Path) -> None:
        source, target = tmp_path / "p.yaml", tmp_path / "p.json"
        source.write_text("mode: strict # comment\nexecution: {device: cpu, precision: fp32}\n")
        checked = xrt("policy", "check", source, "--json").json()
        assert checked["valid"] is True
        assert set(checked["stated"]) >= {"execution.device", "execution.precision"}
        shown = xrt("policy", "show", source, "--json").json()
        assert shown["execution"] == {"device": "cpu", "precision": "fp32"}
        written = xrt("policy", "convert", source, target, "--json").json()
        assert written["written"] == str(target)
        assert xrt("policy", "show", target, "--json").json() == shown

    def test_a_wrong_one(self, xrt: Xrt, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text("mode: strict\nexecution: {engne: onnxruntime}\n")
        result = xrt("policy", "check", tmp_path / "bad.yaml", "--json")
        assert result.code == 2
        error = result.json()["error"]
        assert error["type"] == "PolicyError"
        assert "bad.yaml:2:" in error["message"]
        assert "did you mean 'engine'" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("plan", "nope.onnx"), 2, "ModelError"),
        (("profile", "MODEL", "--trace", "trace.txt"), 2, "InputError"),
        (("profile", "MODEL", "--trace", "missing/trace.json"), 2, "InputError"),
        (("plan", "MODEL", "--policy", "nope.yaml"), 2, "PolicyError"),
        (("plan", "MODEL", "--machine", "nope.json"), 2, "InputError"),
        (("plan", "MODEL", "--device", "cuda:-1"), 2, "PolicyError"),
        (("plan", "MODEL", "--engine", "onnxruntme"), 2, "PolicyError"),
        (("plan", "MODEL", "--engine", "tensorrt"), 3, "EngineUnavailable"),
        (("run", "MODEL", "--engine", "ort", "--precision", "bf16", "-d", "cpu"), 1, "UnsupportedOperationError"),
        (("run", "MODEL", "--input", "imge=[1]"), 2, "InputError"),
        (("demo", "--policy", "nope.yaml"), 2, "PolicyError"),
        (("doctor", "--fast"), 2, "UsageError"),
        (("kernels", "matmull"), 2, "InputError"),
        (("plan",), 2, "UsageError"),
    ],
)
def test_errors_are_json_too(xrt: Xrt, digits: str, arguments: tuple[str, ...], code: int, kind: str) -> None:
    result = xrt(*(digits if argument == "MODEL" else argument for argument in arguments), "--json")
    error = result.json()["error"]
    assert (result.code, error["type"], error["exit_code"]) == (code, kind, code)
    assert error["message"] in result.err.replace("\n\n", "\n") or kind == "UsageError"


def test_a_benchmark_is_a_page_beside_earlier_ones(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    words = ("bench", digits, "-n", 40, "--device", "cpu")
    before, page = tmp_path / "before.json", tmp_path / "bench.html"
    before.write_text(xrt(*words, "--json").out)
    assert xrt(*words, "--html", page, "--against", before).code == 0
    assert str(before) in page.read_text(encoding="utf-8")
    for found, why in (
        (xrt(*words, "--against", before), "--html"),
        (xrt(*words, "--html", page, "--against", digits), "this is no result of a benchmark"),
        (xrt(*words, "--html", page, "--against", tmp_path / "nowhere"), "No such file"),
        (xrt(*words, "--html", before, "--against", before), "would replace a file that is not an HTML page"),
    ):
        assert found.code == 2
        assert why in found.err
