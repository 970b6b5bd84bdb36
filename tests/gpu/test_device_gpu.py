# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices on a machine with a CUDA device."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import xpuruntime as xrt
from xpuruntime._core import DeviceManager, copy_to_contiguous
from xpuruntime.errors import CudaError, InputError

# Says whether the primary context of device 0 exists, by asking the driver itself.
ACTIVE = """
import ctypes
def context_exists():
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
"""


def in_new_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", ACTIVE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_facts() -> None:
    device = xrt.Device("cuda:0")
    assert device == xrt.Device(0) == xrt.Device("cuda")
    assert (device.type, device.id) == ("cuda", 0)
    assert device.name
    assert device.compute_capability is not None
    assert device.compute_capability >= (7, 0)
    assert device.sm_count is not None
    assert device.sm_count > 0
    assert device.total_memory > 1 << 30
    assert 0 < device.free_memory <= device.total_memory
    assert device.driver_version is not None
    assert device.runtime_version is not None
    assert device.driver_version >= (device.runtime_version[0], 0)
    assert device.pci_id is not None
    assert device.pci_id.count(":") == 2
    assert {"fp64", "fp32", "fp16", "int8"} <= device.dtypes
    assert device.supports_bf16 == (device.compute_capability >= (8, 0))
    assert device.supports_fp8 == (device.compute_capability >= (8, 9))
    assert device.features == frozenset()
    assert DeviceManager.instance().cuda_reason() == ""


def test_listing_devices_creates_no_context() -> None:
    in_new_process(
        "import xpuruntime as xrt\n"
        "assert not context_exists()\n"
        "for device in xrt.get_all_devices():\n"
        "    device.name, device.total_memory, device.compute_capability, device.pci_id, device.dtypes\n"
        "xrt.get_current_device()\n"
        "assert not context_exists(), 'a context after listing'\n"
        "xrt.Device(0).free_memory\n"
        "assert context_exists()\n"
    )


def test_a_pool_creates_no_context_before_its_first_allocation() -> None:
    in_new_process(
        "import xpuruntime as xrt\n"
        "pool = xrt.MemoryPool('cuda:0')\n"
        "assert not context_exists(), 'a context without memory'\n"
        "pool.allocate(1)\n"
        "assert context_exists()\n"
    )


def test_current_device() -> None:
    assert xrt.get_current_device() == xrt.Device(0)
    xrt.set_current_device(0)
    xrt.set_current_device("cuda:0")
    with pytest.raises(InputError, match="cannot be 'cpu'"):
        xrt.set_current_device("cpu")


def test_missing_devices_are_named_with_those_there_are() -> None:
    with pytest.raises(CudaError, match="'cuda:99' does not exist: this machine has 'cpu' and 'cuda:0'"):
        xrt.Device("cuda:99")
    with pytest.raises(CudaError, match="cuda:99"):
        xrt.synchronize(99)
    with pytest.raises(InputError, match="negative"):
        xrt.set_current_device(-1)


def test_synchronize_waits_for_device_0() -> None:
    pool = xrt.MemoryPool("cuda:0", name="synchronize")
    stream = xrt.Stream("cuda:0")
    source, target = pool.allocate(1 << 30, stream), pool.allocate(1 << 30, stream)
    for call in (lambda: xrt.synchronize(0), lambda: xrt.synchronize(), xrt.Device(0).synchronize):
        for _ in range(100):
            copy_to_contiguous(0, source.ptr, target.ptr, [1 << 28], [1], 4, stream)
        assert not stream.query()
        call()
        assert stream.query()


def test_other_devices_leave_the_current_one_alone() -> None:
    if xrt.get_device_count("cuda") < 2:
        return  # one device: nothing to leave
    xrt.set_current_device(0)
    xrt.MemoryPool("cuda:1").allocate(1 << 20)
    xrt.synchronize(1)
    assert xrt.Device(1).free_memory > 0
    assert xrt.get_current_device() == xrt.Device(0)
    seen = []
    thread = threading.Thread(target=lambda: (xrt.set_current_device(1), seen.append(xrt.get_current_device())))
    thread.start()
    thread.join()
    assert seen == [xrt.Device(1)]
    assert xrt.get_current_device() == xrt.Device(0)
