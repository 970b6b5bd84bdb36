# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conditions of a measurement: files of Linux, counters of energy, and NVML, here of a library that a test compiles."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring import conditions
from xpuruntime.measuring.conditions import GpuClock, Moment, Nvml, NvmlError, between, moment, open_meter


def test_what_this_machine_says_is_read():
    before = moment()
    time.sleep(0.05)
    found = between(before, moment())
    assert found.seconds >= 0.05
    assert found.cores == os.cpu_count()
    if Path("/proc/stat").exists():
        assert found.load is not None
        assert found.load[0] == pytest.approx(os.getloadavg()[0], abs=5)
        assert found.steal is not None
        assert 0 <= found.steal <= 1
    assert msgspec.json.decode(msgspec.json.encode(found), type=conditions.Conditions) == found


def test_counters_are_differences_and_have_words():
    gpu = GpuClock(index=0, sm_mhz=900, max_sm_mhz=1980, throttled_by=("sw_power_cap",))
    before = Moment(
        seconds=1.0, load=0.5, throttled_periods=10, throttled_us=1_000_000, cpu_ticks=(1000, 10), cpu_mhz=3000.0
    )
    after = Moment(
        seconds=3.0, load=999.0, throttled_periods=14, throttled_us=1_500_000, cpu_ticks=(1400, 50), cpu_mhz=2000.0,
        gpus=(gpu,),
    )  # fmt: skip
    found = between(before, after)
    assert (found.throttled_periods, found.throttled_share, found.steal) == (4, 0.25, 0.1)
    text = "; ".join(found.remarks())
    for part in ("the load was 999.0", "throttled in 4 periods", "10% of the processor time was stolen", "to 2000 MHz"):
        assert part in text
    assert "cuda:0 ran at 900 of 1980 MHz: sw_power_cap" in text
    assert between(Moment(seconds=0.0), Moment(seconds=1.0)).remarks() == [], "what is not known is not said"


@pytest.mark.parametrize(
    ("groups", "folder", "text", "expected"),
    [
        ("0::/a/b\n", "a/b", "usage_usec 9\nnr_periods 7\nnr_throttled 3\nthrottled_usec 1234\n", (3, 1234)),
        ("0::/gone\n", ".", "nr_throttled 2\nthrottled_usec 5\n", (2, 5)),
        ("4:cpuacct,cpu:/x\n3:memory:/y\n", "cpu/x", "nr_throttled 1\nthrottled_time 7000\n", (1, 7)),
        ("0::/a\n", "a", "usage_usec 9\n", (None, None)),
        ("0::/a\n", "a", "not a number\nat all", (None, None)),
    ],
)
def test_throttling_is_read_of_both_versions_of_control_groups(tmp_path, groups, folder, text, expected):
    (tmp_path / "groups").write_text(groups)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "cpu.stat").write_text(text)
    assert conditions._throttling(tmp_path, tmp_path / "groups") == expected


def package(folder: Path, name: str, used: int, wraps_at: int = 10_000_000) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "energy_uj").write_text(f"{used}\n")
    (place / "max_energy_range_uj").write_text(f"{wraps_at}\n")
    return place / "energy_uj"


def test_packages_are_added_and_their_parts_left_out(tmp_path):
    first, second = package(tmp_path, "intel-rapl:0", 1_000_000), package(tmp_path, "intel-rapl:1", 5_000_000)
    package(tmp_path, "intel-rapl:0:0", 7)
    meter = open_meter("cpu", tmp_path)
    before = meter.read()
    first.write_text("3000000\n")
    second.write_text("5500000\n")
    assert meter.joules(before, meter.read()) == 2.5


def test_a_counter_may_begin_again(tmp_path):
    counter = package(tmp_path, "intel-rapl:0", 9_000_000)
    meter = open_meter("cpu", tmp_path)
    before = meter.read()
    counter.write_text("500000\n")
    assert meter.joules(before, meter.read()) == 1.5


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UnsupportedOperationError, match=r"shows no RAPL counter in .* Fix: take another objective"):
        open_meter("cpu", tmp_path)
    package(tmp_path, "intel-rapl:0", 1).unlink()
    with pytest.raises(UnsupportedOperationError, match="energy_uj: No such file"):
        open_meter("cpu", tmp_path)
    with pytest.raises(UnsupportedOperationError, match="energy of npu cannot be measured"):
        open_meter("npu")


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
