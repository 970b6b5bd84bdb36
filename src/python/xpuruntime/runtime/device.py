# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices: what there is, what it can do, and waiting for it.

Listing devices and reading their facts creates no CUDA context. `Device.free_memory`, `set_current_device` and
`synchronize` do, since CUDA offers no other way.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from xpuruntime._core import DeviceInfo, DeviceManager


class Device:
    """One device. An immutable value: equal and hashed by type and index; ``str(device)`` is its name.

    Parameters
    ----------
    device : str, int or Device
        ``"cpu"``, ``"cuda"`` (the same as ``"cuda:0"``), ``"cuda:N"``, or the index N of a CUDA device.

    Raises
    ------
    CudaError
        If the CUDA device is missing. The message names those that are, or why there is none.
    InputError
        If the name is not known or the index is negative.

    Examples
    --------
    >>> Device("cpu").type
    'cpu'
    """

    __slots__ = ("_info",)
    _info: DeviceInfo

    def __init__(self, device: DeviceLike = 0) -> None:
        info = device._info if isinstance(device, Device) else DeviceManager.instance().get_device_info(device)
        object.__setattr__(self, "_info", info)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: a device is a value."""
        msg = f"Device is immutable: cannot set {name!r}"
        raise AttributeError(msg)

    @property
    def id(self) -> int:
        """Index among the devices of its type; 0 for the CPU."""
        return self._info.index

    @property
    def type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self._info.device.partition(":")[0]

    @property
    def name(self) -> str:
        """The product's name."""
        return self._info.name

    @property
    def total_memory(self) -> int:
        """Memory in bytes."""
        return self._info.total_memory

    @property
    def total_memory_gb(self) -> float:
        """Memory in GiB (1024³ bytes)."""
        return self._info.total_memory / 1024**3

    @property
    def free_memory(self) -> int:
        """Free memory in bytes, now. On CUDA this creates the device's context if there is none yet.

        A context takes some hundred MiB of the device and tens of milliseconds. On the CPU: what the system can give
        without swapping.
        """
        return DeviceManager.instance().memory_info(self._info.device)[0]

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """``(major, minor)``; ``None`` on the CPU."""
        return self._cuda(self._info.compute_capability)

    @property
    def sm_count(self) -> int | None:
        """Number of streaming multiprocessors; ``None`` on the CPU."""
        return self._info.sm_count if self.type == "cuda" else None

    @property
    def driver_version(self) -> tuple[int, int] | None:
        """Newest CUDA version that the driver serves, ``(major, minor)``; ``None`` on the CPU."""
        return self._cuda(self._info.driver_version)

    @property
    def runtime_version(self) -> tuple[int, int] | None:
        """CUDA version that the core was built with, ``(major, minor)``; ``None`` on the CPU."""
        return self._cuda(self._info.runtime_version)

    @property
    def pci_id(self) -> str | None:
        """Such as ``"0000:65:00.0"``; ``None`` on the CPU."""
        return self._info.pci_id or None

    @property
    def cores(self) -> int | None:
        """Number of logical cores; ``None`` on CUDA."""
        return self._info.cores if self.type == "cpu" else None

    @property
    def features(self) -> frozenset[str]:
        """Instruction set extensions of the CPU that are usable here, such as ``"avx512f"``; empty on CUDA."""
        return frozenset(self._info.features)

    @property
    def dtypes(self) -> frozenset[str]:
        """Types it computes in natively, such as ``"bf16"``, ``"tf32"``, ``"fp8_e4m3"``."""
        return frozenset(self._info.dtypes)

    @property
    def supports_fp16(self) -> bool:
        """Whether it computes in fp16 natively."""
        return "fp16" in self._info.dtypes

    @property
    def supports_bf16(self) -> bool:
        """Whether it computes in bf16 natively."""
        return "bf16" in self._info.dtypes

    @property
    def supports_int8(self) -> bool:
        """Whether it computes in int8 natively."""
        return "int8" in self._info.dtypes

    @property
    def supports_fp8(self) -> bool:
        """Whether it computes in fp8 (e4m3) natively."""
        return "fp8_e4m3" in self._info.dtypes

    @property
    def supports_int4(self) -> bool:
        """Whether it computes in int4 natively: CUDA devices of compute capability 7.5 to 8.9."""
        return "int4" in self._info.dtypes

    def synchronize(self) -> None:
        """Wait for all work of the device. On the CPU there is nothing to wait for."""
        DeviceManager.instance().synchronize(self._info.device)

    def _cuda(self, version: tuple[int, int]) -> tuple[int, int] | None:
        return version if self.type == "cuda" else None

    def __eq__(self, other: object) -> bool:
        return self._info.device == other._info.device if isinstance(other, Device) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._info.device)

    def __str__(self) -> str:
        return self._info.device

    def __repr__(self) -> str:
        return f"Device({self._info.device!r})"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Device, (self._info.device,)


#: What names a device: ``"cpu"``, ``"cuda:N"``, the index N of a CUDA device, or a `Device`.
DeviceLike: TypeAlias = "str | int | Device"


def get_device_count(type: str | None = "cuda") -> int:
    """Return the number of accelerators, so that ``Device(i)`` exists for each ``i`` below it.

    Parameters
    ----------
    type : str or None
        ``"cuda"``, ``"cpu"``, or ``None`` for all devices, the CPU included, as `get_all_devices` lists them.
    """
    return DeviceManager.instance().get_device_count(type)


def get_all_devices() -> list[Device]:
    """Return the devices that the core runs on: the CPU, then the CUDA devices by index.

    NPUs and other devices that only an engine reaches are not among them: ``xrt devices`` and
    `xpuruntime.runtime.machine_snapshot` list the engines that reach one, and ``device="npu"`` of a session or policy
    chooses it.
    """
    return [Device(info.device) for info in DeviceManager.instance().get_all_devices()]


def get_current_device() -> Device:
    """Return this thread's current CUDA device; the CPU where there is none."""
    return Device(DeviceManager.instance().get_current_device())


def set_current_device(device: DeviceLike) -> None:
    """Make a CUDA device current for this thread. This creates its context.

    Parameters
    ----------
    device : str, int or Device
        ``"cpu"`` is accepted only where there is no CUDA device.

    Raises
    ------
    CudaError
        If the device is missing.
    InputError
        If the name is not known, the index is negative, or the CPU is named on a machine with a CUDA device.
    """
    DeviceManager.instance().set_current_device(device)


def synchronize(device: DeviceLike | None = None) -> None:
    """Wait for all work of a device.

    Parameters
    ----------
    device : str, int or Device, optional
        By default the current one. Index 0 is device 0.
    """
    DeviceManager.instance().synchronize(device)
