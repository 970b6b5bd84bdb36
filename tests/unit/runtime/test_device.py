# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices on any machine: the CPU is always there; what is missing is named; processors and memory."""

import pickle
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import xpuruntime as xrt
from xpuruntime.errors import CudaError, InputError
from xpuruntime.runtime.cpu_and_memory import available_memory, cpu_quota, process_memory, read_status
from xpuruntime.runtime.device import Device, get_all_devices, get_current_device, get_device_count, synchronize


def no_cuda() -> bool:
    return get_device_count("cuda") == 0


def test_the_cpu_tells_what_it_is():
    cpu = Device("cpu")
    assert (cpu.id, cpu.type, str(cpu)) == (0, "cpu", "cpu")
    assert cpu.name
    assert cpu.cores == psutil.cpu_count(logical=True)
    assert cpu.total_memory == pytest.approx(psutil.virtual_memory().total, rel=0.05)
    assert cpu.total_memory_gb == cpu.total_memory / 2**30
    assert 0 < cpu.free_memory <= cpu.total_memory
    assert {"fp32", "fp64"} <= cpu.dtypes
    assert cpu.compute_capability is cpu.sm_count is cpu.pci_id is cpu.driver_version is cpu.runtime_version is None
    assert not cpu.supports_fp8
    cpu.synchronize()


def test_cpu_features_are_those_the_system_lists():
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), None)
    if flags is None:
        pytest.skip("this system lists no x86 processor flags")
    listed = set(flags.split())
    features = Device("cpu").features
    renamed = {"sse3": "pni", "avx512_vbmi": "avx512vbmi"}
    assert {renamed.get(feature, feature) for feature in features} <= listed
    for flag in ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile"):
        assert (flag in features) == (flag in listed), flag


def test_a_device_is_a_value():
    cpu = Device("cpu")
    assert cpu == Device(cpu)
    assert len({cpu, Device("cpu")}) == 1
    assert cpu != "cpu"
    assert repr(cpu) == "Device('cpu')"
    assert pickle.loads(pickle.dumps(cpu)) == cpu
    with pytest.raises(AttributeError, match="immutable"):
        cpu.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "CPU", "gpu", "npu:0", "cuda:x", "cuda:-1", "cuda:1.0", None, True, 1.5])
def test_unknown_names_are_refused(name):
    with pytest.raises(InputError, match="is not known"):
        Device(name)


@pytest.mark.parametrize("device", ["cuda:99", 99])
def test_a_missing_device_is_refused_with_those_there_are(device):
    with pytest.raises(CudaError, match=r"'cuda:99' does not exist: this machine has 'cpu'") as caught:
        Device(device)
    assert caught.value.device == "cuda:99"


@pytest.mark.parametrize("index", [-1, -99])
def test_a_negative_index_is_refused(index):
    with pytest.raises(InputError, match=f"device index {index} is negative"):
        Device(index)
    with pytest.raises(InputError, match="out of range"):
        Device(2**40)


def test_counting_and_listing_agree():
    devices = get_all_devices()
    assert str(devices[0]) == "cpu"
    assert len(devices) == get_device_count(None) == get_device_count("cpu") + get_device_count("cuda")
    assert get_device_count() == get_device_count("cuda")
    assert get_device_count("cpu") == 1
    with pytest.raises(InputError, match="'tpu' is not known"):
        get_device_count("tpu")


def test_without_cuda_the_cpu_is_current():
    if not no_cuda():
        pytest.skip("this machine has a CUDA device; tests/gpu covers it")
    assert get_current_device() == Device("cpu")
    xrt.set_current_device("cpu")
    with pytest.raises(CudaError):
        xrt.set_current_device(0)


def test_synchronize_takes_the_device_it_is_given():
    synchronize()
    synchronize("cpu")
    synchronize(Device("cpu"))
    if no_cuda():
        with pytest.raises(CudaError, match="cuda:0"):
            synchronize(0)  # index 0 is device 0, not "all" or "none"


def test_the_least_of_the_groups_above_a_process(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/pods/one\n")
    (tmp_path / "pods" / "one").mkdir(parents=True)
    assert cpu_quota(tmp_path, groups) is None
    (tmp_path / "pods" / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, groups) == 4
    (tmp_path / "pods" / "one" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, groups) == 1.5
    (tmp_path / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, groups) == 4


def test_the_first_version(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("3:cpu,cpuacct:/one\n2:memory:/two\n")
    folder = tmp_path / "cpu" / "one"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path, groups) is None
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_quota(tmp_path, groups) == 0.5
    assert cpu_quota(tmp_path, tmp_path / "nothing") is None


STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t   512 kB\nVmRSS:\t   300 kB\nThreads:\t3\n"


def test_the_lines_of_status():
    status = read_status(STATUS)
    assert (status.resident, status.most_resident) == (300 * 1024, 512 * 1024)


@pytest.mark.parametrize("text", ["", "VmRSS:\n", "VmRSS:\tmuch kB\n", "VmRSS:\t3 MB\n", "no colon"])
def test_what_is_not_there_is_not_known(text):
    assert (read_status(text).resident, read_status(text).most_resident) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_that_is_touched_is_resident():
    before = process_memory()
    held = np.ones(64 << 20, np.uint8)
    after = process_memory()
    assert after.resident - before.resident > 48 << 20
    assert after.most_resident >= after.resident
    assert held[-1] == 1


def test_available_memory_is_the_least_of_the_system_and_of_each_control_group(tmp_path: Path) -> None:
    (meminfo := tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    groups = tmp_path / "cgroup"
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 8000 * 1024
    assert available_memory(meminfo=groups, groups=groups, root=tmp_path) is None
    groups.write_text("4:memory:/a\n3:cpu:/b\n0::/pod/box\n")
    for folder, limit, used, cache in (("pod/box", "max", 500, 0), ("pod", "9000", 6000, 1000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 12\ninactive_file {cache}\n")
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 4000
    (tmp_path / "memory" / "a").mkdir(parents=True)
    for name, text in (("limit_in_bytes", "3000"), ("usage_in_bytes", "3500"), ("stat", "total_inactive_file 600")):
        (tmp_path / "memory" / "a" / f"memory.{name}").write_text(text)
    assert available_memory(meminfo=meminfo, groups=groups, root=tmp_path) == 100
