# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices on any machine: the CPU is always there; what is missing is named together with what exists."""

import pickle
from pathlib import Path

import psutil
import pytest

import xpuruntime as xrt
from xpuruntime._core import DeviceManager
from xpuruntime.errors import CudaError, InputError
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


def test_no_cuda_has_a_reason():
    reason = DeviceManager.instance().cuda_reason()
    assert bool(reason) == no_cuda()


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
