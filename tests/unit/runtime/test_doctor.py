# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`doctor`: what it says of a machine as a whole, of its engines and of its environment."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from doctor_facts import GPU, HEALTHY, LAPTOP, facts, lib, only

from xpuruntime.runtime.doctor import CHECKS, examine
from xpuruntime.runtime.doctor.facts import DriverFacts
from xpuruntime.runtime.machine import EngineFacts


def test_a_healthy_gpu_machine_has_no_finding() -> None:
    diagnosis = examine(HEALTHY)
    assert diagnosis.findings == ()
    assert diagnosis.healthy
    assert "no problem found" in str(diagnosis)


def test_a_healthy_laptop_has_information_only() -> None:
    diagnosis = examine(facts(machine=LAPTOP, driver=DriverFacts(), libraries={}))
    assert {finding.severity for finding in diagnosis.findings} == {"info"}
    assert diagnosis.healthy


class TestEnginesAndEnvironment:
    def test_present_but_not_loadable(self) -> None:
        broken = EngineFacts(
            name="openvino",
            version="2026.4.1",
            reason="libtbb.so.12: cannot open",
            fix="pip install --force-reinstall x",
        )
        found = only(facts(machine=msgspec.structs.replace(GPU, engines={"openvino": broken})))
        assert (found.code, found.why, found.fix) == ("engine_broken", broken.reason, broken.fix)

    def test_an_engine_that_is_not_installed_is_no_finding(self) -> None:
        absent = EngineFacts(name="openvino", reason="not installed", fix='pip install "xpuruntime[openvino]"')
        assert examine(facts(machine=msgspec.structs.replace(GPU, engines={"openvino": absent}))).findings == ()

    def test_a_provider_that_cannot_be_loaded(self) -> None:
        ort = EngineFacts(
            name="onnxruntime",
            version="1.31.1",
            loadable=True,
            broken={"CUDAExecutionProvider": "libcublas.so.13 not found"},
            fix='pip install "xpuruntime[cuda]"',
        )
        assert only(facts(machine=msgspec.structs.replace(GPU, engines={"onnxruntime": ort}))).code == "provider_broken"
        laptop = msgspec.structs.replace(LAPTOP, engines={"onnxruntime": ort})
        findings = [
            f for f in examine(facts(machine=laptop, driver=DriverFacts())).findings if f.what.startswith("onnxr")
        ]
        assert [(f.code, f.severity, f.fix) for f in findings] == [("no_device", "info", None)]
        assert "has no device that it can use here" in findings[0].what

    def test_a_processor_is_never_missing(self) -> None:
        engine = EngineFacts(
            name="openvino", version="2026.4.1", loadable=True, broken={"CPU": "no plugin"}, fix="pip install x"
        )
        found = only(facts(machine=msgspec.structs.replace(GPU, engines={"openvino": engine})))
        assert (found.code, found.fix) == ("provider_broken", "pip install x")

    def test_variables_that_override_policies(self) -> None:
        found = only(facts(environment={"NVIDIA_TF32_OVERRIDE": "1", "CUDA_HOME": "/usr/local/cuda"}), "warning")
        assert (found.code, found.fix) == ("environment_override", "unset NVIDIA_TF32_OVERRIDE")


def test_every_check_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a check looked at the machine")

    first = [finding for check in CHECKS for finding in check(facts(libraries={}))]  # and imports what the checks need
    for place in ("os.listdir", "os.path.exists", "os.path.realpath", "pathlib.Path.exists", "builtins.open"):
        monkeypatch.setattr(place, forbidden)
    assert len(CHECKS) >= 9
    second = [finding for check in CHECKS for finding in check(facts(libraries={}))]
    assert first
    assert first == second


def test_worst_first_and_shown_whole() -> None:
    from rich.console import Console

    diagnosis = examine(facts(libraries={}, environment={"ORT_X": "1"}, loaded=(lib("libcudart.so.13", "13.0.1"),)))
    assert [f.severity for f in diagnosis.findings] == sorted(
        (f.severity for f in diagnosis.findings), key=["error", "warning", "info"].index
    )
    assert not diagnosis.healthy
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(diagnosis)
    for text in (str(diagnosis), console.export_text()):
        for finding in diagnosis.findings:
            assert finding.what in text
            assert finding.fix is None or finding.fix in text
        assert "libcudart.so.13" in text
    plain = json.loads(diagnosis.to_json())
    assert plain["schema"] == "xpuruntime.doctor/1"
    assert plain["healthy"] is False
    assert plain["loaded_libraries"][0]["name"] == "libcudart.so.13"
