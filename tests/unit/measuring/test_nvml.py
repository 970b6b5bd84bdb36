# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NVML through the functions that its library exports, here of one that is compiled for the test."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring import conditions
from xpuruntime.measuring.conditions import Nvml, NvmlError, open_meter

FIRST, SECOND = "0000:17:00.0", "0000:ca:00.0"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NVML_COUNTERS", str(tmp_path))
    (tmp_path / "0").write_text("1000\n")
    (tmp_path / "1").write_text("5000\n")
    return tmp_path


@pytest.fixture
def installed(built: str, counters: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Nvml.__init__, "__defaults__", (built,))
    return counters


def test_gpus_have_the_address_that_cuda_writes(built: str) -> None:
    with Nvml(built) as opened:
        gpus = opened.gpus()
        assert list(gpus) == [FIRST, SECOND]
        assert opened.sm_mhz(gpus[SECOND]) == (911, 1980)
        assert opened.throttled_by(gpus[FIRST]) == ()
        assert opened.throttled_by(gpus[SECOND]) == ("sw_power_cap",)
        opened.close()
    assert ctypes.CDLL(built).opened_times() == 0, "it is given back once"


def test_the_counter_is_that_of_the_address_and_not_of_the_index(installed: Path) -> None:
    meter = open_meter("cuda:0", pci_id=SECOND.upper())
    before = meter.read()
    (installed / "0").write_text("999999\n")
    (installed / "1").write_text("7500\n")
    assert meter.joules(before, meter.read()) == 2.5


def test_what_nvml_does_not_tell_is_refused_by_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedOperationError, match=r"energy of cuda:0 .* NVML shows no GPU at 0000:99:00\.0\. Fix"
    ):
        open_meter("cuda:0", pci_id="0000:99:00.0")
    (installed / "0").unlink()
    with pytest.raises(UnsupportedOperationError, match=r"nvmlDeviceGetTotalEnergyConsumption returned 3"):
        open_meter("cuda:0", pci_id=FIRST)
    monkeypatch.setenv("NVML_BROKEN", "1")
    with pytest.raises(UnsupportedOperationError, match=r"nvmlInit_v2 returned 9"):
        open_meter("cuda:0", pci_id=FIRST)
    monkeypatch.setattr(conditions, "_pci_id", lambda index: None)
    with pytest.raises(UnsupportedOperationError, match=r"energy of cuda:7 cannot be measured: CUDA shows no such"):
        open_meter("cuda:7")


def test_a_library_that_is_not_there_or_is_another_one(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"nothing\.so cannot be loaded"):
        Nvml(str(tmp_path / "nothing.so"))
    with pytest.raises(NvmlError, match="has no nvmlInit_v2"):
        Nvml("libc.so.6")
