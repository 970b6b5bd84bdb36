# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Machine`: what a computer has, as a value that planning can be given."""

from __future__ import annotations

import msgspec


class CpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The processor: name, logical cores, ISA features such as ``"avx512f"``, total memory in bytes."""

    name: str
    cores: int
    features: tuple[str, ...] = ()
    total_memory: int = 0


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA device. Bytes of memory, versions as ``(major, minor)``, `dtypes` it computes in like ``"bf16"``."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    sm_count: int
    driver_version: tuple[int, int]
    runtime_version: tuple[int, int]
    pci_id: str
    dtypes: tuple[str, ...] = ()


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library: its soname, its path, and what distinguishes it from other builds, where known.

    Attributes
    ----------
    name, path : str
    version : str or None
    origin : str
        Where it was found, such as ``"wheel"`` or ``"system"``.
    build_id : str or None
        The GNU build ID of an ELF file, in hex: another build of the same version has another one.
    size : int or None
        Bytes of the file.
    """

    name: str
    path: str
    version: str | None = None
    origin: str = "system"
    build_id: str | None = None
    size: int | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe of one engine found. Probing never raises."""

    name: str
    version: str | None = None
    loadable: bool = False
    providers: tuple[str, ...] = ()
    broken: dict[str, str] = {}
    reason: str | None = None
    fix: str | None = None
    detail: dict[str, str] = {}
    libraries: tuple[Library, ...] = ()
    cuda_libraries: tuple[Library, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether a simulator runs the models, as `detail` has it under ``"runs_on"``."""
        return self.detail.get("runs_on") == "simulator"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a computer: planning reads this and touches no device.

    Attributes
    ----------
    system, architecture, python : str
        ``platform.system()``, ``platform.machine()`` and the Python version.
    cpu : CpuFacts
    cuda : tuple of CudaFacts
    cuda_reason : str or None
        Why `cuda` is empty: no driver, no device, driver too old, or a build without CUDA.
    core_cuda : bool
        Whether xpuruntime's core was built with CUDA.
    core : Library or None
        The file of xpuruntime's core.
    engines : dict of str to EngineFacts
    """

    system: str
    architecture: str
    python: str
    cpu: CpuFacts
    cuda: tuple[CudaFacts, ...] = ()
    cuda_reason: str | None = None
    core_cuda: bool = False
    core: Library | None = None
    engines: dict[str, EngineFacts] = {}

    def with_engines(self, facts: dict[str, EngineFacts]) -> Machine:
        """Return a copy that also knows these engines."""
        return msgspec.structs.replace(self, engines={**self.engines, **facts})
