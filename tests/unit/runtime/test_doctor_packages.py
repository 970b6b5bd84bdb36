# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the doctor gathers, and what it says of a machine as a whole and of packages."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doctor_facts import GPU, HEALTHY, LAPTOP, NUMPY, ORT, ORT_GPU, facts, lib, only

from xpuruntime.runtime.doctor import CHECKS, examine
from xpuruntime.runtime.doctor.checks import in_range, ort_wheel_for
from xpuruntime.runtime.doctor.facts import DriverFacts, OrtFacts, Package, driver_facts, ort_facts, packages
from xpuruntime.runtime.machine import EngineFacts


class TestOnnxRuntime:
    def test_two_wheels_over_each_other(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        found = only(facts(packages=(NUMPY, cpu, ORT_GPU)))
        assert found.code == "ort_clash"
        assert found.fix == (
            'python -m pip uninstall -y onnxruntime onnxruntime-gpu && python -m pip install "onnxruntime-gpu>=1.23"'
        )

    @pytest.mark.parametrize("fork", ["onnxruntime-directml"])
    def test_a_fork_beside_it(self, fork: str) -> None:
        other = Package(name=fork, version="1.24.0", location="/site", provides_onnxruntime=True)
        assert f"uninstall -y {fork} onnxruntime-gpu" in only(facts(packages=(NUMPY, other, ORT_GPU))).fix

    def test_the_qnn_plugin_that_pulled_in_the_cpu_wheel(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        qnn = Package(name="onnxruntime-qnn", version="2.7.0", location="/site")
        assert only(facts(packages=(NUMPY, cpu, ORT_GPU, qnn))).fix.endswith("--no-deps onnxruntime-qnn")

    def test_the_qnn_plugin_beside_the_gpu_wheel_is_right(self) -> None:
        qnn = Package(name="onnxruntime-qnn", version="2.7.0", location="/site")
        assert examine(facts(packages=(NUMPY, ORT_GPU, qnn))).healthy

    def test_the_qnn_plugin_that_came_with_the_cpu_wheel_alone(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        qnn = Package(name="onnxruntime-qnn", version="2.7.0", location="/site")
        ort = msgspec.structs.replace(ORT, package="onnxruntime")
        findings = examine(facts(packages=(NUMPY, cpu, qnn), ort=ort, driver=DriverFacts())).findings
        (told,) = [finding for finding in findings if finding.code == "qnn_pulled_onnxruntime"]
        assert told.severity == "warning"
        assert told.fix is not None
        assert told.fix.startswith("python -m pip uninstall -y onnxruntime && ")
        assert told.fix.endswith("--no-deps onnxruntime-qnn")

    def test_the_qnn_plugin_on_an_onnxruntime_of_before_plugins(self) -> None:
        qnn = Package(name="onnxruntime-qnn", version="2.7.0", location="/site")
        gpu, ort = msgspec.structs.replace(ORT_GPU, version="1.23.2"), msgspec.structs.replace(ORT, version="1.23.2")
        findings = examine(facts(packages=(NUMPY, gpu, qnn), ort=ort)).findings
        (told,) = [finding for finding in findings if finding.code == "qnn_ort_too_old"]
        assert told.fix == 'python -m pip install --upgrade "onnxruntime-gpu>=1.24.2"'

    def test_on_a_platform_without_the_gpu_wheel_the_other_is_kept(self) -> None:
        arm = msgspec.structs.replace(LAPTOP, architecture="aarch64")
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        found = examine(facts(machine=arm, driver=DriverFacts(), packages=(NUMPY, cpu, ORT_GPU)))
        [clash] = [finding for finding in found.findings if finding.code == "ort_clash"]
        assert clash.fix.endswith('install "onnxruntime"')  # type: ignore[union-attr]
        assert ort_wheel_for("Darwin", "arm64") == "onnxruntime"
        assert ort_wheel_for("Windows", "AMD64") == "onnxruntime-gpu"

    def test_missing(self) -> None:
        assert only(facts(ort=None, packages=(NUMPY,))).code == "ort_missing"

    def test_files_gone_after_the_other_wheel_was_removed(self) -> None:
        found = only(facts(ort=None))
        assert found.code == "ort_files_missing"
        assert "--force-reinstall" in found.fix
        assert only(facts(ort=msgspec.structs.replace(ORT, version=None, package=None))).code == "ort_files_missing"

    def test_files_of_another_wheel(self) -> None:
        assert only(facts(ort=msgspec.structs.replace(ORT, version="1.29.0"))).code == "ort_overwritten"
        assert only(facts(ort=msgspec.structs.replace(ORT, package="onnxruntime"))).code == "ort_overwritten"

    def test_a_cpu_wheel_on_a_gpu_machine(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        plain = OrtFacts(folder="/site/onnxruntime", package="onnxruntime", version="1.31.1")
        assert only(facts(packages=(NUMPY, cpu), ort=plain)).code == "ort_cpu_only"


class TestVersions:
    def test_out_of_range(self) -> None:
        old = Package(name="numpy", version="1.24.4", location="/site")
        found = only(facts(packages=(old, ORT_GPU)))
        assert (found.code, found.fix) == ("package_out_of_range", 'python -m pip install "numpy>=1.26"')

    def test_an_extra_out_of_range_is_a_warning(self) -> None:
        new = Package(name="nvidia-cublas", version="14.0.1", location="/site")
        assert "xpuruntime[cuda]" in only(facts(packages=(NUMPY, ORT_GPU, new)), "warning").why

    def test_a_requirement_that_is_missing(self) -> None:
        assert only(facts(packages=(ORT_GPU,))).code == "package_missing"

    def test_two_versions_on_the_path(self) -> None:
        other = Package(name="numpy", version="1.26.0", location="/other")
        assert only(facts(packages=(NUMPY, other, ORT_GPU)), "warning").code == "package_twice"

    @pytest.mark.parametrize(
        ("version", "spec", "fits"),
        [
            ("1.26", ">=1.26", True),
            ("1.26.0", "==1.26", True),
            ("2.0.0rc1", ">=1.26,<2", False),
            ("13.1.0.3", "<14,>=13", True),
            ("12.9.1.4", "<14,>=13", False),
            ("2.11.0+cu130", ">=2.11", True),
            ("1.5", "!=1.5", False),
            ("1.5", "~=1.4", True),
            ("unknown", ">=9", True),
            ("1!2.0", ">1", True),
        ],
    )
    def test_in_range(self, version: str, spec: str, fits: bool) -> None:
        assert in_range(version, spec) is fits


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a distribution as an installer does: its files, and a record of them."""
    meta = site / f"{name.replace('-', '_')}-{version}.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (meta / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def wheel(package: str, version: str) -> dict[str, str]:
    return {
        "onnxruntime/__init__.py": f"__version__ = {version!r}\n",
        "onnxruntime/capi/build_and_package_info.py": (
            f"package_name = {package!r}\n__version__ = {version!r}\ncuda_version = '13.0'\n"
        ),
    }


class TestGathering:
    def test_two_wheels_in_a_real_folder(self, tmp_path: Path) -> None:
        install(tmp_path, "onnxruntime-gpu", "1.31.1", wheel("onnxruntime-gpu", "1.31.1"))
        install(tmp_path, "onnxruntime", "1.31.1", wheel("onnxruntime", "1.31.1"))
        install(tmp_path, "onnxruntime-qnn", "2.7.0", {"onnxruntime_qnn/__init__.py": ""})
        owners = [package.name for package in packages([str(tmp_path)]) if package.provides_onnxruntime]
        assert owners == ["onnxruntime", "onnxruntime-gpu"]
        assert ort_facts([str(tmp_path)]) == OrtFacts(
            folder=str(tmp_path / "onnxruntime"), package="onnxruntime", version="1.31.1", cuda="13.0"
        )

    def test_a_damaged_folder_is_survived(self, tmp_path: Path) -> None:
        install(tmp_path, "onnxruntime", "1.31.1", {"onnxruntime/__init__.py": ""})
        (tmp_path / "onnxruntime/capi").mkdir()
        (tmp_path / "onnxruntime/capi/build_and_package_info.py").write_bytes(b"\xff\x00 = (")
        (tmp_path / "onnxruntime/capi/libonnxruntime_providers_cuda.so").write_bytes(b"\x7fELF")
        assert ort_facts([str(tmp_path)]) == OrtFacts(folder=str(tmp_path / "onnxruntime"))
        assert ort_facts([str(tmp_path / "nothing")]) is None

    def test_hardware_and_module(self, tmp_path: Path) -> None:
        for name, vendor, kind in (
            ("0000:01:00.0", "0x10de", "0x030200"),
            ("0000:01:00.1", "0x10de", "0x040300"),
            ("0000:02:00.0", "0x8086", "0x030000"),
        ):
            (tmp_path / "pci" / name).mkdir(parents=True)
            (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
            (tmp_path / "pci" / name / "class").write_text(kind + "\n")
        version = tmp_path / "version"
        version.write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
        )
        found = driver_facts(version, tmp_path / "pci")
        assert found.hardware == ("0000:01:00.0",)
        assert found.module == "580.65.06"
        version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")
        assert driver_facts(version, tmp_path / "nowhere").module == "535.183.01"

    def test_the_libraries_really_loaded_are_listed(self) -> None:
        code = (
            "from xpuruntime.engines.registry import default_registry;"
            "from xpuruntime.runtime.doctor import diagnose;"
            "print(diagnose(default_registry().engines()).to_json())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        loaded = [library["name"] for library in json.loads(done.stdout)["loaded_libraries"]]
        assert any(name.startswith("onnxruntime_pybind11_state") for name in loaded)
        assert any(name.startswith("_core") for name in loaded)


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
