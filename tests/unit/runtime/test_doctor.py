# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`doctor`: each check on stated facts, and the gathering of facts on folders made here and on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xpuruntime import _core
from xpuruntime.runtime.doctor import CHECKS, Diagnosis, diagnose, examine
from xpuruntime.runtime.doctor.facts import (
    BuildFacts,
    DriverFacts,
    Facts,
    OrtFacts,
    Package,
    build_facts,
    driver_facts,
    ort_facts,
    packages,
)
from xpuruntime.runtime.doctor.packages import in_range, ort_wheel_for
from xpuruntime.runtime.machine import CpuFacts, CudaFacts, EngineFacts, Library, Machine

H200 = CudaFacts(
    index=0,
    name="NVIDIA H200",
    compute_capability=(9, 0),
    total_memory=150 << 30,
    sm_count=132,
    driver_version=(13, 0),
    runtime_version=(13, 0),
    pci_id="0000:01:00.0",
)
LAPTOP = Machine(
    system="Linux",
    architecture="x86_64",
    python="3.11.7",
    cpu=CpuFacts(name="cpu", cores=2),
    cuda_reason="no NVIDIA driver: libcuda.so.1 was not found",
)
GPU = msgspec.structs.replace(LAPTOP, cuda=(H200,), cuda_reason=None, core_cuda=True)
DRIVER = DriverFacts(
    hardware=("0000:01:00.0",), module="580.65.06", library="/usr/lib/libcuda.so.580.65.06", cuda=(13, 0)
)
LINKED = ("libcublasLt.so.13", "libcublas.so.13", "libcudart.so.13")
ORT = OrtFacts(
    folder="/site/onnxruntime",
    package="onnxruntime-gpu",
    version="1.31.1",
    cuda="13.0",
    linked=LINKED,
    later=("libcudnn.so.9", "libnvrtc.so.13"),
)
ORT_GPU = Package(name="onnxruntime-gpu", version="1.31.1", location="/site", provides_onnxruntime=True)
NUMPY = Package(name="numpy", version="2.4.6", location="/site")
REQUIREMENTS = (
    "numpy>=1.26",
    'onnxruntime-gpu>=1.23; (sys_platform == "linux" and platform_machine == "x86_64")',
    "nvidia-cublas<14,>=13; sys_platform == 'linux' and extra == 'cuda'",
)


def lib(name: str, version: str, origin: str = "wheel", folder: str = "/site/nvidia/lib") -> Library:
    return Library(name=name, path=f"{folder}/{name}", version=version, origin=origin)


FOUND = {
    name.removeprefix("lib").split(".so")[0]: (lib(name, name.rsplit(".", 1)[1] + ".1"),)
    for name in (*ORT.linked, *ORT.later)
}
GPU_CORE = bool(_core.DeviceManager.built_with_cuda())
HEALTHY = Facts(
    machine=GPU,
    packages=(NUMPY, ORT_GPU),
    requirements=REQUIREMENTS,
    ort=ORT,
    driver=DRIVER,
    found=FOUND,
    searched="/site/nvidia/lib (wheel)",
)


def facts(**changes: Any) -> Facts:
    return msgspec.structs.replace(HEALTHY, **changes)


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def only(stated: Facts, severity: str = "error") -> Any:
    """Return the one finding, which must have a reason and a fix."""
    findings = examine(stated).findings
    assert len(findings) == 1, findings
    assert findings[0].severity == severity
    assert findings[0].why
    assert findings[0].fix or severity == "info"
    return findings[0]


def test_a_healthy_gpu_machine_has_no_finding() -> None:
    diagnosis = examine(HEALTHY)
    assert diagnosis.findings == ()
    assert diagnosis.healthy
    assert "no problem found" in str(diagnosis)


def test_a_healthy_laptop_has_information_only() -> None:
    diagnosis = examine(facts(machine=LAPTOP, driver=DriverFacts(), found={}))
    assert {finding.severity for finding in diagnosis.findings} == {"info"}
    assert diagnosis.healthy


class TestOnnxRuntime:
    def test_two_wheels_over_each_other(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        found = only(facts(packages=(NUMPY, cpu, ORT_GPU)))
        assert found.code == "ort_clash"
        assert found.fix == (
            'python -m pip uninstall -y onnxruntime onnxruntime-gpu && python -m pip install "onnxruntime-gpu>=1.23"'
        )

    @pytest.mark.parametrize("fork", ["onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn"])
    def test_a_fork_beside_it(self, fork: str) -> None:
        other = Package(name=fork, version="1.24.0", location="/site", provides_onnxruntime=True)
        assert f"uninstall -y {fork} onnxruntime-gpu" in only(facts(packages=(NUMPY, other, ORT_GPU))).fix

    def test_the_qnn_plugin_that_pulled_in_the_cpu_wheel(self) -> None:
        cpu = Package(name="onnxruntime", version="1.31.1", location="/site", provides_onnxruntime=True)
        qnn = Package(name="onnxruntime-qnn", version="2.7.0", location="/site")
        assert only(facts(packages=(NUMPY, cpu, ORT_GPU, qnn))).fix.endswith("--no-deps onnxruntime-qnn")

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


class TestDriver:
    def test_hardware_without_a_driver(self) -> None:
        bare = msgspec.structs.replace(LAPTOP, core_cuda=True)
        found = only(facts(machine=bare, driver=DriverFacts(hardware=("0000:01:00.0",))))
        assert found.code == "driver_missing"
        assert "--gpus all" in found.fix

    def test_the_module_is_not_loaded(self) -> None:
        bare = msgspec.structs.replace(LAPTOP, core_cuda=True)
        found = only(facts(machine=bare, driver=msgspec.structs.replace(DRIVER, module=None)))
        assert found.code == "driver_not_loaded"
        assert "modprobe nvidia" in found.fix

    def test_library_and_module_differ_after_an_update(self) -> None:
        found = only(facts(driver=msgspec.structs.replace(DRIVER, module="575.51.03")))
        assert (found.code, found.fix) == ("driver_mismatch", "sudo reboot")

    def test_too_old_for_the_wheel(self) -> None:
        found = only(facts(driver=msgspec.structs.replace(DRIVER, cuda=(12, 4))))
        assert found.code == "driver_too_old"
        assert "CUDA 12.4 at most" in found.what
        assert "580 or newer" in found.fix

    def test_an_older_minor_version_is_fine(self) -> None:
        newer = msgspec.structs.replace(ORT, cuda="13.2")
        assert examine(facts(ort=newer)).findings == ()

    def test_devices_hidden_by_the_environment(self) -> None:
        hidden = msgspec.structs.replace(GPU, cuda=(), cuda_reason="no device")
        found = only(facts(machine=hidden, environment={"CUDA_VISIBLE_DEVICES": ""}), "warning")
        assert (found.code, found.fix) == ("devices_hidden", "unset CUDA_VISIBLE_DEVICES")

    def test_core_without_cuda_on_a_gpu_machine(self) -> None:
        found = only(facts(machine=msgspec.structs.replace(GPU, core_cuda=False, cuda=())), "warning")
        assert found.code == "core_without_cuda"
        assert "CUDACXX=" in found.fix

    @pytest.mark.parametrize(("left_out", "header"), [("cublas", "cublasLt.h"), ("cudnn", "cudnn_frontend.h")])
    def test_a_core_without_the_kernels_of_a_library(self, left_out: str, header: str) -> None:
        whole = BuildFacts(cuda=True, cublas=True, cudnn=True, architectures="80-real 90-real")
        assert examine(facts(build=whole)).findings == ()
        part = msgspec.structs.replace(whole, **{left_out: False})
        found = only(facts(build=part), "warning")
        assert found.code == "core_without_backend"
        assert left_out in found.what.lower()
        assert header in found.why
        assert "nvidia-cublas" in found.fix
        assert "make cuda-headers" in found.fix
        laptop = facts(machine=LAPTOP, driver=DriverFacts(), found={}, build=part)
        assert {finding.severity for finding in examine(laptop).findings} == {"info"}

    def test_what_was_built_is_shown(self) -> None:
        build = BuildFacts(cuda=True, cublas=True, architectures="80-real 90-real")
        assert "built with CUDA for 80-real 90-real, with kernels of cuBLAS" in str(examine(facts(build=build)))
        assert "built without CUDA" in str(examine(facts(build=BuildFacts())))
        assert examine(facts(build=build)).to_dict()["build"]["cublas"] is True

    def test_the_core_says_what_was_built(self) -> None:
        build = build_facts()
        assert bool(build.architectures) == build.cuda == GPU_CORE
        assert build.cuda or not (build.cublas or build.cudnn)

    def test_core_that_does_not_import(self) -> None:
        found = only(facts(core_error="undefined symbol: x"))
        assert (found.code, found.why) == ("core_missing", "undefined symbol: x")


class TestLibraries:
    def test_missing(self) -> None:
        found = only(facts(found={**FOUND, "cudnn": ()}))
        assert (found.code, found.fix) == ("library_missing", 'python -m pip install "xpuruntime[cuda]"')
        assert "libcudnn.so.9" in found.what
        assert "/site/nvidia/lib (wheel)" in found.why
        assert only(facts(found={**FOUND, "nvrtc": ()}), "warning").code == "library_missing"
        assert "does not load without it" in only(facts(found={**FOUND, "cublasLt": ()})).why

    def test_the_wrong_cuda_major(self) -> None:
        found = only(facts(found={**FOUND, "cublasLt": (lib("libcublasLt.so.12", "12.8.4.1"),)}))
        assert found.code == "cuda_major_mismatch"
        assert "libcublasLt.so.13 is not there, only" in found.what
        assert "built for CUDA 13.0" in found.why

    def test_not_looked_at_without_a_gpu(self) -> None:
        stated = facts(machine=LAPTOP, driver=DriverFacts(), found=dict.fromkeys(FOUND, ()))
        assert "library_missing" not in codes(examine(stated))

    def test_found_twice_with_different_versions(self) -> None:
        other = lib("libcudnn.so.9.1.0", "9.1.0", "ldconfig", "/usr/lib")
        found = only(facts(found={**FOUND, "cudnn": (*FOUND["cudnn"], other)}), "info")
        assert found.code == "library_shadowed"
        assert "/usr/lib/libcudnn.so.9.1.0 (9.1.0, ldconfig)" in found.what
        first = lib("libcudnn.so.9", "9.5.0", "CUDA_HOME", "/usr/local/cuda/lib64")
        assert "xpuruntime[cuda]" in only(facts(found={**FOUND, "cudnn": (first, other)}), "warning").fix

    def test_twice_with_one_version_is_fine(self) -> None:
        other = lib("libcudnn.so.9", FOUND["cudnn"][0].version or "", "CUDA_HOME", "/usr/local/cuda/lib64")
        assert examine(facts(found={**FOUND, "cudnn": (*FOUND["cudnn"], other)})).findings == ()

    @pytest.mark.parametrize(
        ("path", "fix"),
        [
            ("/opt/old", "unset LD_LIBRARY_PATH"),
            ("/opt/old/:/opt/mine", "export LD_LIBRARY_PATH=/opt/mine"),
        ],
    )
    def test_the_path_variable_before_the_wheel(self, path: str, fix: str) -> None:
        other = lib("libcudnn.so.9.1.0", "9.1.0", "LD_LIBRARY_PATH", "/opt/old")
        stated = facts(found={**FOUND, "cudnn": (*FOUND["cudnn"], other)}, environment={"LD_LIBRARY_PATH": path})
        found = only(stated, "warning")
        assert (found.code, found.fix) == ("library_path_shadows_wheel", fix)

    def test_loaded_twice(self) -> None:
        two = (lib("libcudnn.so.9", "9.7"), lib("libcudnn.so.9.1.0", "9.1.0", "system", "/usr/lib"))
        assert only(facts(loaded=two), "warning").code == "library_loaded_twice"


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
        assert examine(facts(machine=laptop, driver=DriverFacts())).healthy

    def test_variables_that_override_policies(self) -> None:
        found = only(facts(environment={"NVIDIA_TF32_OVERRIDE": "1", "CUDA_HOME": "/usr/local/cuda"}), "warning")
        assert (found.code, found.fix) == ("environment_override", "unset NVIDIA_TF32_OVERRIDE")


def test_every_check_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a check looked at the machine")

    for place in ("os.listdir", "os.path.exists", "os.path.realpath", "pathlib.Path.exists", "builtins.open"):
        monkeypatch.setattr(place, forbidden)
    assert len(CHECKS) >= 9
    first = [finding for check in CHECKS for finding in check(facts(found={}))]
    second = [finding for check in CHECKS for finding in check(facts(found={}))]
    assert first
    assert first == second


def test_worst_first_and_shown_whole() -> None:
    from rich.console import Console

    diagnosis = examine(facts(found={}, environment={"ORT_X": "1"}, loaded=(lib("libcudart.so.13", "13.0.1"),)))
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

    def test_the_command_finds_them_in_a_new_process(self, tmp_path: Path) -> None:
        install(tmp_path, "onnxruntime", "1.29.0", wheel("onnxruntime", "1.29.0"))
        install(tmp_path, "onnxruntime-directml", "1.29.0", wheel("onnxruntime-directml", "1.29.0"))
        code = "from xpuruntime.runtime.doctor import diagnose; print(diagnose().to_json())"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        [clash] = [f for f in json.loads(done.stdout)["findings"] if f["code"] == "ort_clash"]
        assert "onnxruntime 1.29.0" in clash["what"]
        assert "onnxruntime-directml 1.29.0" in clash["what"]

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

    def test_this_machine(self) -> None:
        diagnosis = diagnose()
        installed = {package.name: package.version for package in diagnosis.facts.packages}
        assert "numpy" in installed
        assert diagnosis.facts.ort is not None
        assert (
            diagnosis.facts.ort.version
            == installed[ort_wheel_for(diagnosis.facts.machine.system, diagnosis.facts.machine.architecture)]
        )
        assert json.loads(diagnosis.to_json())["machine"]["cpu"]["cores"] >= 1

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
