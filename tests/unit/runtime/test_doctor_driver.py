# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the doctor says of drivers, devices and CUDA's libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from doctor_facts import DRIVER, FOUND, GPU, LAPTOP, ORT, codes, facts, lib, only

from xpuruntime import _core
from xpuruntime.runtime.doctor import examine
from xpuruntime.runtime.doctor.facts import BuildFacts, DriverFacts, TorchFacts, build_facts
from xpuruntime.runtime.packages import install_command

if TYPE_CHECKING:
    from pathlib import Path


GPU_CORE = bool(_core.DeviceManager.built_with_cuda())


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
        whole = BuildFacts(cuda=True, cublas=True, cudnn=True, cupti=True, architectures="80-real 90-real")
        assert examine(facts(build=whole)).findings == ()
        part = msgspec.structs.replace(whole, **{left_out: False})
        found = only(facts(build=part), "warning")
        assert found.code == "core_without_backend"
        assert left_out in found.what.lower()
        assert header in found.why
        assert "nvidia-cublas" in found.fix
        assert "pip install --force-reinstall --no-deps" in found.fix.partition(" && ")[2]
        laptop = facts(machine=LAPTOP, driver=DriverFacts(), libraries={}, build=part)
        assert {finding.severity for finding in examine(laptop).findings} == {"info"}

    def test_a_core_that_cannot_trace_devices(self) -> None:
        build = BuildFacts(cuda=True, cublas=True, cudnn=True, architectures="90-real")
        found = only(facts(build=build), "info")
        assert found.code == "core_without_cupti"
        assert "CUDA events" in found.why

    def test_the_core_says_what_was_built(self) -> None:
        build = build_facts()
        assert bool(build.architectures) == build.cuda == GPU_CORE
        assert build.cuda or not (build.cublas or build.cudnn)

    def test_core_that_does_not_import(self) -> None:
        found = only(facts(core_error="undefined symbol: x"))
        assert (found.code, found.why) == ("core_missing", "undefined symbol: x")


class TestAdvisories:
    def test_kernels_that_are_known_to_be_wrong(self) -> None:
        torch = TorchFacts(version="2.13.0+cu130", route="addon", cudnn=(9, 20, 0))
        findings = examine(facts(torch=torch)).findings
        assert {(finding.code, finding.severity) for finding in findings} == {("kernel_advisory", "warning")}
        assert any(
            "cudnn.sdpa" in finding.what and "issues/196678" in finding.why and "H200" in finding.why
            for finding in findings
        )
        assert all("attention: auto" in str(finding.fix) for finding in findings)

    def test_package_that_the_program_calls_by_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        torch = TorchFacts(version="2.14.0+cu130", route="addon", cudnn=(9, 26, 0))
        texts = []
        for version in ("0.8.1", "0.8.6"):
            folder = tmp_path / "liger_kernel-1.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {version}\n")
            texts.append({str(finding.fix) for finding in examine(facts(torch=torch)).of_kernels().findings})
        assert texts[0] - texts[1] >= {'pip install "liger-kernel>=0.8.2"'}
        assert not any("liger" in fix for fix in texts[1])

    def test_none_without_cudnn_or_its_devices(self) -> None:
        torch = TorchFacts(version="2.14.0", route="addon", cudnn=(9, 26, 0))
        ampere = msgspec.structs.replace(GPU.cuda[0], compute_capability=(8, 0))
        assert not examine(facts(torch=TorchFacts(version="2.13.0+cpu", route="addon"))).findings
        assert not examine(facts(torch=torch, machine=msgspec.structs.replace(GPU, cuda=(ampere,)))).findings


class TestLibraries:
    def test_missing(self) -> None:
        found = only(facts(libraries={**FOUND, "cudnn": ()}))
        assert (found.code, found.fix) == ("library_missing", f"`python -m {install_command('cuda')[1:]}")
        assert "libcudnn.so.9" in found.what
        assert "/site/nvidia/lib (wheel)" in found.why
        assert only(facts(libraries={**FOUND, "nvrtc": ()}), "warning").code == "library_missing"
        assert "does not load without it" in only(facts(libraries={**FOUND, "cublasLt": ()})).why

    def test_the_wrong_cuda_major(self) -> None:
        found = only(facts(libraries={**FOUND, "cublasLt": (lib("libcublasLt.so.12", "12.8.4.1"),)}))
        assert found.code == "cuda_major_mismatch"
        assert "libcublasLt.so.13 was not found, only" in found.what
        assert "built for CUDA 13.0" in found.why

    def test_not_looked_at_without_a_gpu(self) -> None:
        stated = facts(machine=LAPTOP, driver=DriverFacts(), libraries=dict.fromkeys(FOUND, ()))
        assert "library_missing" not in codes(examine(stated))

    def test_found_twice_with_different_versions(self) -> None:
        other = lib("libcudnn.so.9.1.0", "9.1.0", "ldconfig", "/usr/lib")
        found = only(facts(libraries={**FOUND, "cudnn": (*FOUND["cudnn"], other)}), "info")
        assert found.code == "library_shadowed"
        assert "/usr/lib/libcudnn.so.9.1.0 (9.1.0, ldconfig)" in found.what
        first = lib("libcudnn.so.9", "9.5.0", "CUDA_HOME", "/usr/local/cuda/lib64")
        assert "xpuruntime[cuda]" in only(facts(libraries={**FOUND, "cudnn": (first, other)}), "warning").fix

    def test_twice_with_one_version_is_fine(self) -> None:
        other = lib("libcudnn.so.9", FOUND["cudnn"][0].version or "", "CUDA_HOME", "/usr/local/cuda/lib64")
        assert examine(facts(libraries={**FOUND, "cudnn": (*FOUND["cudnn"], other)})).findings == ()

    @pytest.mark.parametrize(
        ("path", "fix"),
        [
            ("/opt/old", "unset LD_LIBRARY_PATH"),
            ("/opt/old/:/opt/mine", "export LD_LIBRARY_PATH=/opt/mine"),
        ],
    )
    def test_the_path_variable_before_the_wheel(self, path: str, fix: str) -> None:
        other = lib("libcudnn.so.9.1.0", "9.1.0", "LD_LIBRARY_PATH", "/opt/old")
        stated = facts(libraries={**FOUND, "cudnn": (*FOUND["cudnn"], other)}, environment={"LD_LIBRARY_PATH": path})
        found = only(stated, "warning")
        assert (found.code, found.fix) == ("library_path_shadows_wheel", fix)

    def test_loaded_twice(self) -> None:
        two = (lib("libcudnn.so.9", "9.7"), lib("libcudnn.so.9.1.0", "9.1.0", "system", "/usr/lib"))
        assert only(facts(loaded=two), "warning").code == "library_loaded_twice"
