# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for memory."""

from collections.abc import Iterable
from typing import Self, final

from xpuruntime._core import DeviceLike, StreamLike

class MemoryStats:
    """Bytes and counts of one pool, or the sum of several, all of one moment. Immutable.

    Attributes
    ----------
    requested : int
        What callers asked for, over live buffers.
    current, peak : int
        What those buffers occupy after rounding, and the largest that was.
    reserved, peak_reserved : int
        Held from the device, in use or not; this is what a limit bounds.
    cached : int
        ``reserved - current``.
    pending : int
        The part of `cached` that waits for work of other streams.
    largest_free : int
        Longest run of adjacent free bytes that a single allocation could get.
    fragmentation : float
        ``1 - largest_free / cached``: 0 when all cached memory is one run, or nothing is cached.
    allocations, total_allocations : int
        Live buffers, and buffers ever given.
    upstream_allocations : int
        Times the device was asked.
    failures : int
        Times the answer was OutOfMemoryError.
    """

    @property
    def requested(self) -> int: ...
    @property
    def current(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def peak_reserved(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    @property
    def fragmentation(self) -> float: ...
    @property
    def allocations(self) -> int: ...
    @property
    def total_allocations(self) -> int: ...
    @property
    def upstream_allocations(self) -> int: ...
    @property
    def failures(self) -> int: ...
    def to_dict(self) -> dict[str, int | float]:
        """Return the attributes by name."""

@final
class Buffer:
    """Memory from a pool, freed when the last reference goes. Keeps its pool alive. Pools make these.

    Freeing is in stream order: the memory may be used again at once by later work on `stream`. Declare other streams
    with `record_stream`. Memory that the host can read also has the buffer protocol: ``memoryview(buffer)``.
    """

    @property
    def ptr(self) -> int:
        """Address, aligned to 256 bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""

    @property
    def device(self) -> str:
        """Where the memory is: ``"cpu"`` (pinned memory too) or ``"cuda:N"``."""

    @property
    def stream(self) -> int:
        """Handle of the stream in whose order the memory is used."""

    def record_stream(self, stream: StreamLike, /) -> None:
        """Declare that work on another stream uses the memory.

        When the buffer is freed, its memory is not used again before the work that `stream` then has is done.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

class MemoryPool:
    """A counted, limited source of memory on one device. Thread-safe. Buffers keep it alive.

    Parameters
    ----------
    device : str, int or Device
        The device that the memory serves.
    kind : str
        ``"caching"``: keeps freed memory for reuse, by size and stream. ``"direct"``: asks the device every time.
        ``"driver"``: the CUDA driver's stream-ordered pool. ``"pinned"``: host memory that the CUDA device copies
        without staging, cached. On the CPU there are ``"caching"`` and ``"direct"``.
    limit : int, optional
        Most bytes to hold from the device, used or cached.
    name : str, optional
        Who holds the memory, for `memory_report`. Need not be unique. By default ``"<kind>@<device>"``.

    Raises
    ------
    CudaError
        If the CUDA device is not there.
    InputError
        If the kind or the limit is not valid.
    UnsupportedOperationError
        If this device or build has no such kind.

    Notes
    -----
    Memory that captured work uses must stay allocated for as long as its graph may be replayed. A stream of another
    library must be synchronised before it is destroyed while a pool has memory of it.
    """

    def __new__(
        cls, device: DeviceLike = "cuda:0", kind: str = "caching", limit: int | None = None, name: str | None = None
    ) -> Self: ...
    def allocate(self, nbytes: int, stream: StreamLike | None = None) -> Buffer:
        """Return memory for use in the order of a stream, by default the legacy default stream.

        Raises
        ------
        OutOfMemoryError
            If the device or the limit refuses, also after cached memory was given back. The pool works as before.
        InputError
            If the size is negative, or the stream is the per-thread default stream or no stream.
        """

    def stats(self) -> MemoryStats: ...
    def reset_peak(self) -> None:
        """Let the peaks start again from now."""

    def trim(self, keep: int = 0) -> int:
        """Give unused memory back to the device until at most `keep` bytes are cached. Return the bytes given back."""

    def empty_cache(self) -> int:
        """Give all unused memory back to the device. Return the bytes given back."""

    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def limit(self) -> int | None:
        """Most bytes held from the device. Setting it below what is held gives unused memory back."""

    @limit.setter
    def limit(self, value: int | None) -> None: ...

class MemoryManager:
    """Makes pools and knows the live ones. Thread-safe. See `xpuruntime.runtime.memory.memory_report`."""

    @staticmethod
    def instance() -> MemoryManager:
        """Return the process's default one."""

    def default_pool(self, device: DeviceLike) -> MemoryPool:
        """Return the device's shared caching pool, which has no limit and is never destroyed."""

    def pools(self, device: DeviceLike | None = None) -> list[MemoryPool]:
        """Return the live pools of one device, or all, in the order they were made."""

    def get_allocated_size(self, device: DeviceLike | None = None) -> int:
        """Return the bytes in use, over live pools."""

    def get_stats(self, device: DeviceLike | None = None) -> MemoryStats:
        """Return the sums over live pools."""

    def empty_cache(self, device: DeviceLike | None = None) -> int:
        """Give all unused memory back to the devices. Return the bytes given back."""

class EngineAllocatorStats:
    """Numbers of one engine allocator, in bytes and counts."""

    @property
    def current(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def total_allocations(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def foreign_frees(self) -> int:
        """Frees of addresses that this allocator never gave; ignored."""

class EngineAllocator:
    """Lets an engine that takes C allocation functions without user data allocate from a pool.

    There are 64 in a process. Failed allocations return a null pointer to the engine; `take_failure` and
    `raise_failure` tell the reason afterwards.

    Parameters
    ----------
    pool : MemoryPool
    stream : stream or int, optional
        Memory is allocated in the order of this stream.

    Raises
    ------
    UnsupportedOperationError
        If all are taken.
    """

    def __init__(self, pool: MemoryPool, stream: StreamLike | None = None) -> None: ...
    @property
    def alloc_address(self) -> int:
        """Address of ``void* (size_t)``."""

    @property
    def free_address(self) -> int:
        """Address of ``void (void*)``."""

    @property
    def empty_cache_address(self) -> int:
        """Address of ``void ()``."""

    @property
    def pool(self) -> MemoryPool: ...
    @property
    def stream(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def stats(self) -> EngineAllocatorStats: ...
    def take_failure(self) -> str | None:
        """Return why the last allocation failed, and forget it."""

    def raise_failure(self) -> None:
        """Raise OutOfMemoryError when an allocation failed since the last call."""

    def close(self) -> None:
        """Give the slot back. Memory that the engine still holds stays valid until it frees it."""

    @staticmethod
    def available() -> int:
        """Return the number of free slots."""

class TorchAllocatorStats:
    """Numbers of one `TorchAllocator`, in bytes and counts; over several devices, their sums.

    Attributes
    ----------
    current, peak : int
        What PyTorch asked for and has not freed, and the largest that was.
    in_graphs : int
        What PyTorch freed and a CUDA graph that captured it may still write.
    allocations, total_allocations : int
        Live, and ever.
    failures : int
        Allocations that were refused.
    foreign_frees : int
        Frees of addresses that it never gave; ignored.
    """

    @property
    def current(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def in_graphs(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def total_allocations(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def foreign_frees(self) -> int: ...
    def to_dict(self) -> dict[str, int]:
        """Return the attributes by name."""

class TorchAllocator:
    """The functions of a ``torch.cuda.memory.CUDAPluggableAllocator``, over xpuruntime pools, one a device.

    There are 64 different sets of pools in a process; objects over the same pools share functions and numbers.

    Parameters
    ----------
    pools : iterable of MemoryPool
        At most one a CUDA device, and none of host memory.
    throws : bool
        Whether a failed allocation throws; by default it returns a null pointer, as PyTorch expects.

    Raises
    ------
    InputError
        If the pools are not as said.
    UnsupportedOperationError
        If all 64 are taken.
    """

    def __init__(self, pools: Iterable[MemoryPool], *, throws: bool = False) -> None: ...
    @property
    def slot(self) -> int:
        """Which of the 64 it is, from 0."""

    @property
    def alloc_address(self) -> int:
        """Address of ``void* (size_t, int device, cudaStream_t)``."""

    @property
    def free_address(self) -> int:
        """Address of ``void (void*, size_t, int device, cudaStream_t)``."""

    @property
    def record_stream_address(self) -> int:
        """Address of ``void (void*, cudaStream_t)``."""

    @property
    def empty_cache_address(self) -> int:
        """Address of ``void ()``."""

    @property
    def memory_fraction_address(self) -> int:
        """Address of ``void (double fraction, int device)``."""

    @property
    def pools(self) -> list[MemoryPool]: ...
    @property
    def throws(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def stats(self, device: int | None = None) -> TorchAllocatorStats:
        """Return the numbers of all devices, or of the one with this index."""

    def take_failure(self) -> str | None:
        """Return why the last allocation failed, and forget it."""

    def close(self) -> None:
        """Let go of the slot. Memory that PyTorch still holds stays valid until it frees it."""

    @staticmethod
    def available() -> int:
        """Return the number of free slots."""
