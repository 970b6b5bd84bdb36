# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The facts that `doctor` gathers, from folders made here and from this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from xpuruntime.runtime.doctor import diagnose
from xpuruntime.runtime.doctor.facts import OrtFacts, driver_facts, ort_facts, packages
from xpuruntime.runtime.doctor.packages import ort_wheel_for


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
