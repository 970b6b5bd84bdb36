# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The checks of `doctor` for libraries of vendors, on stated facts."""

from __future__ import annotations

import pytest
from doctor_facts import FOUND, LAPTOP, codes, facts, lib, only

from xpuruntime.runtime.doctor import examine
from xpuruntime.runtime.doctor.facts import DriverFacts
from xpuruntime.runtime.packages import install_command


class TestLibraries:
    def test_missing(self) -> None:
        found = only(facts(found={**FOUND, "cudnn": ()}))
        assert (found.code, found.fix) == ("library_missing", f"python -m {install_command('cuda')}")
        assert "libcudnn.so.9" in found.what
        assert "/site/nvidia/lib (wheel)" in found.why
        assert only(facts(found={**FOUND, "nvrtc": ()}), "warning").code == "library_missing"
        assert "does not load without it" in only(facts(found={**FOUND, "cublasLt": ()})).why

    def test_the_wrong_cuda_major(self) -> None:
        found = only(facts(found={**FOUND, "cublasLt": (lib("libcublasLt.so.12", "12.8.4.1"),)}))
        assert found.code == "cuda_major_mismatch"
        assert "libcublasLt.so.13 was not found, only" in found.what
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
