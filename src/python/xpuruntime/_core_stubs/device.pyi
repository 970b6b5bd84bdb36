# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for devices."""

from types import TracebackType

from xpuruntime._core import DeviceLike

class DeviceInfo:
    """Fixed facts of one device. What does not apply is 0 or empty. `xpuruntime.Device` is the friendlier face."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def total_memory(self) -> int:
        """Bytes."""

    @property
    def dtypes(self) -> list[str]:
        """Types it computes in natively."""

    @property
    def cores(self) -> int:
        """Logical cores; CPU only."""

    @property
    def features(self) -> list[str]:
        """Usable instruction set extensions; CPU only."""

    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def driver_version(self) -> tuple[int, int]:
        """Newest CUDA that the driver serves, ``(major, minor)``."""

    @property
    def runtime_version(self) -> tuple[int, int]:
        """CUDA that the core was built with, ``(major, minor)``."""

    @property
    def pci_id(self) -> str: ...

class DeviceScope:
    """A CUDA device made current for the thread of a ``with`` block, and the one before it after. Use it once."""

    def __init__(self, device: DeviceLike) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class DeviceManager:
    """Knows what devices there are. CUDA devices are looked for once, on first use, never at import.

    A device is ``"cpu"``, ``"cuda:N"``, the index N of a CUDA device, or any object whose ``str()`` is such a name.
    Every call but `set_current_device` leaves the current device as it was. Thread-safe.

    Raises
    ------
    CudaError
        If a CUDA device is not there (the message names those that are, or why there is none), or a CUDA call fails.
    InputError
        If a name is not known or an index is negative.
    """

    @staticmethod
    def instance() -> DeviceManager:
        """Return the process's default one."""

    @staticmethod
    def built_with_cuda() -> bool:
        """Whether this build has the CUDA core."""

    def get_device_count(self, type: str | None = None) -> int:
        """Return the number of ``"cpu"`` or ``"cuda"`` devices, or of all."""

    def get_all_devices(self) -> list[DeviceInfo]:
        """Return the CPU, then the CUDA devices by index."""

    def get_device_info(self, device: DeviceLike) -> DeviceInfo: ...
    def cuda_reason(self) -> str:
        """Why there is no CUDA device and what fixes it; empty when there is one."""

    def memory_info(self, device: DeviceLike) -> tuple[int, int]:
        """Return free and total bytes, now. On CUDA this creates the device's context."""

    def get_current_device(self) -> str:
        """Return this thread's current CUDA device; ``"cpu"`` where there is none."""

    def set_current_device(self, device: DeviceLike) -> None:
        """Make a CUDA device current for this thread. Creates its context."""

    def synchronize(self, device: DeviceLike | None = None) -> None:
        """Wait for all work of a device, by default the current one."""
