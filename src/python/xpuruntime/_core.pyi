# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Types and documentation of the C++ core. Users find these classes in `xpuruntime`."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias, final

from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from xpuruntime._core_kernels import *  # noqa: F403 - kernels have a page of their own
from xpuruntime._core_ops import *  # noqa: F403 - so have operations

#: A device name such as ``"cuda:0"``, a CUDA index, or any object whose ``str()`` is such a name.
DeviceLike: TypeAlias = object
#: A `Stream`, a stream of another library, or a ``cudaStream_t``.
StreamLike: TypeAlias = Any

__version__: str

def build_info() -> dict[str, bool | str]:
    """Return what was built into this module.

    ``"cuda"``, ``"cublas"`` and ``"cudnn"`` say whether the CUDA core and the kernels of each library are in it;
    ``"architectures"`` names the GPU architectures that device code was compiled for, as CMake does, and is empty
    without CUDA.
    """

class Stream:
    """An in-order queue of work on one device.

    On the CPU each piece of work is done when the call that asked for it returns, so a CPU stream is always complete,
    and the same program runs on a machine without a GPU. Streams may be used from any thread. Two are equal when they
    are the same stream of the same device. ``__cuda_stream__`` lets other libraries use it.

    Parameters
    ----------
    device : str or Device
        ``"cuda:0"``, ``"cpu"``, ...
    priority : int
        CUDA's numbers: a smaller number is a higher priority. See `priority_range`.
    non_blocking : bool
        Whether its work is independent of the legacy default stream.

    Raises
    ------
    CudaError
        If the device is not there.
    InputError
        If the priority is out of range.
    """

    def __init__(self, device: DeviceLike = "cuda:0", *, priority: int = 0, non_blocking: bool = True) -> None: ...
    @staticmethod
    def wrap(device: DeviceLike, stream: StreamLike, *, owner: object = None) -> Stream:
        """Return a stream that someone else owns and that is never destroyed here.

        Parameters
        ----------
        device : str or Device
            The device that the stream is on.
        stream : int or stream object
            A ``cudaStream_t``, or a stream of PyTorch, CuPy or any library with ``__cuda_stream__``, which is kept.
        owner : object, optional
            What to keep alive instead of `stream`.
        """

    @staticmethod
    def default(device: DeviceLike = "cuda:0") -> Stream:
        """Return the legacy default stream of a device."""

    @staticmethod
    def priority_range(device: DeviceLike = "cuda:0") -> tuple[int, int]:
        """Return the (lowest, highest) priority of a device; ``(0, 0)`` on the CPU."""

    @property
    def device(self) -> str: ...
    @property
    def handle(self) -> int:
        """The ``cudaStream_t`` as an integer; 0 on the CPU."""

    @property
    def owned(self) -> bool:
        """Whether this library made the stream and will destroy it."""

    @property
    def priority(self) -> int: ...
    @property
    def non_blocking(self) -> bool: ...
    @property
    def capturing(self) -> bool:
        """Whether work given to it is being recorded into a graph."""

    def synchronize(self) -> None:
        """Block until all work given so far is done; other Python threads run on."""

    def query(self) -> bool:
        """Return whether all work given so far is done."""

    def wait_event(self, event: Event) -> None:
        """Let later work here start after `event`; the host does not wait.

        Raises
        ------
        UnsupportedOperationError
            If this is a CPU stream and the event is of a CUDA device.
        """

    def wait_stream(self, other: Stream) -> None:
        """Let later work here start after all work given to `other` so far; the host does not wait."""

    def record(self, *, timing: bool = False) -> Event:
        """Return a new event, recorded here. With `timing`, `Event.elapsed_us` takes it."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

class Event:
    """A point in a stream's work; on the CPU, the time at which it was recorded.

    An event that was never recorded counts as complete. Events may be used from any thread.

    Parameters
    ----------
    device : str or Device
    timing : bool
        Whether `elapsed_us` takes it. Timed events cost more to record.
    """

    def __init__(self, device: DeviceLike = "cuda:0", *, timing: bool = False) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def timing(self) -> bool: ...
    @property
    def handle(self) -> int:
        """The ``cudaEvent_t`` as an integer; 0 on the CPU."""

    def record(self, stream: Stream) -> None:
        """Move the event to the end of the work given to `stream` so far."""

    def synchronize(self) -> None:
        """Block until the work before the event is done; other Python threads run on."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def elapsed_us(self, end: Event) -> float:
        """Return the microseconds from this event to `end`.

        Raises
        ------
        InputError
            If one was made without timing, is not recorded, is not complete, or they are on different devices.
        """

class GraphUpdate:
    """What `Graph.update` did."""

    @property
    def in_place(self) -> bool:
        """Whether the graph was changed in place; if not, it was instantiated anew."""

    @property
    def reason(self) -> str | None:
        """Why it could not be changed in place."""

class GraphCapture:
    """What ``with graph.capture(stream)`` holds."""

    def __enter__(self) -> Graph: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Graph:
    """Work recorded from a CUDA stream, to be launched again as a whole.

    A graph holds addresses, not tensors: keep every buffer that captured work touches for as long as it is replayed.
    Capture is thread-local: it ends on the thread that began it, and what other threads do cannot break it. Nothing
    here synchronises. Dropping a graph while a replay runs is safe.

    Examples
    --------
    ::

        graph = xrt.Graph()
        with graph.capture(stream):
            output.copy_(input, stream=stream)
        graph.replay(stream)
    """

    def __init__(self) -> None: ...
    def capture(self, stream: Stream, *, instantiate: bool = True) -> GraphCapture:
        """Record the work that a ``with`` block gives to `stream`, and make it ready to run.

        An exception in the block ends the capture, drops what was recorded, and goes on. The stream can be used again
        in every case.

        Parameters
        ----------
        stream : Stream
            A CUDA stream that is not a default stream.
        instantiate : bool
            ``False`` for a graph that is only passed to `update`.

        Raises
        ------
        UnsupportedOperationError
            If `stream` is on the CPU.
        InputError
            If the stream is a default stream or is being captured, or if this graph holds work already.
        CudaError
            If something that cannot be captured happened in the block.
        """

    def begin_capture(self, stream: Stream) -> None:
        """Start to record; `capture` does this for a ``with`` block."""

    def end_capture(self) -> None:
        """Stop recording. Raises CudaError when something that cannot be captured happened."""

    def abort_capture(self) -> None:
        """Stop recording and drop what was recorded. Does nothing when there is no capture."""

    def instantiate(self) -> None:
        """Make the graph ready to run. Slow the first time, nothing after."""

    def replay(self, stream: Stream) -> None:
        """Launch all of it, in the order of `stream`.

        Raises
        ------
        InputError
            If the graph is not instantiated, or the stream is on another device.
        """

    def update(self, newer: Graph) -> GraphUpdate:
        """Take over the work of a newly captured graph, in place where the two have the same topology."""

    @property
    def capturing(self) -> bool: ...
    @property
    def captured(self) -> bool: ...
    @property
    def instantiated(self) -> bool: ...
    @property
    def node_count(self) -> int: ...
    @property
    def device(self) -> str | None: ...

class StreamManager:
    """The streams that the parts of a program share."""

    @staticmethod
    def instance() -> StreamManager:
        """Return the process's default manager."""

    def create(self, device: DeviceLike = "cuda:0", *, priority: int = 0, non_blocking: bool = True) -> Stream:
        """Return a stream of your own."""

    def default_stream(self, device: DeviceLike = "cuda:0") -> Stream:
        """Return the legacy default stream of a device."""

    def pooled(self, device: DeviceLike = "cuda:0", *, priority: int = 0) -> Stream:
        """Return one of eight shared streams of that device and priority, in turn."""

    def priority_range(self, device: DeviceLike = "cuda:0") -> tuple[int, int]:
        """Return the (lowest, highest) priority of a device."""

class Tensor:
    """Typed, shaped bytes on a device.

    A tensor shares memory with what it was made from and with what is made from it; the memory is given back with the
    last of them. Nothing converts, copies or makes contiguous unless asked. Make one with `empty`, `from_numpy`,
    `from_dlpack` or `from_cuda_array_interface`.

    Each memory knows from which point in a stream's work on it is readable, and work that starts here waits for that
    point on the device, never on the host. ``stream`` arguments take a `Stream`, a stream of PyTorch or CuPy, or a
    ``cudaStream_t``; ``None`` is the default stream of the CUDA device concerned. Tensors may be used from any thread.
    """

    @staticmethod
    def empty(
        shape: Sequence[int],
        dtype: str = "float32",
        device: DeviceLike = "cpu",
        *,
        pool: MemoryPool | None = None,
        stream: StreamLike | None = None,
    ) -> Tensor:
        """Return a contiguous tensor with memory of any content.

        Parameters
        ----------
        shape : sequence of int
        dtype : str
            ``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"bool"``, ...
        device : str or Device
        pool : MemoryPool, optional
            By default the device's shared caching pool. A pinned pool gives tensors on ``"cpu"``.
        stream : stream, optional
            On CUDA the memory is for use in the order of this stream.

        Raises
        ------
        OutOfMemoryError
        InputError
            If the shape or dtype makes no sense, or the pool is of another device.
        """

    @staticmethod
    def from_numpy(array: NDArray[Any]) -> Tensor:
        """Share the memory of a NumPy array of any strides. Knows the types of ml_dtypes; keeps read-only read-only.

        Raises
        ------
        InputError
            If `array` is no NumPy array.
        UnsupportedOperationError
            For text, objects, structures and foreign byte orders.
        """

    @staticmethod
    def from_dlpack(array: Any, stream: StreamLike | None = None) -> Tensor:
        """Share the memory of a DLPack array (NumPy, PyTorch, CuPy, JAX, ...) or capsule.

        Parameters
        ----------
        array : object with ``__dlpack__``, or a DLPack capsule
            A capsule can be imported once.
        stream : stream, optional
            On CUDA, the stream in whose order the data is to be readable: it waits for the producer. ``None`` keeps
            the order of the producer's current stream where it says which that is, as PyTorch does, else it is the
            legacy default stream.
        """

    @staticmethod
    def from_cuda_array_interface(array: Any, *, stream: StreamLike | None = None) -> Tensor:
        """Share the memory of an array with ``__cuda_array_interface__``. `stream` is as in `from_dlpack`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, not bytes."""

    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def is_contiguous(self) -> bool: ...
    @property
    def ready_event(self) -> Event | None:
        """The event after which the memory is readable; ``None`` when no device works on it."""

    def numpy(self) -> NDArray[Any]:
        """Return a NumPy array on the same memory.

        bfloat16 and the 8-bit floating-point types need the package ml_dtypes.

        Raises
        ------
        UnsupportedOperationError
            If the tensor is on a device (copy it with ``.to("cpu")``), a copy to it is still on its way, or NumPy has
            no such type.
        """

    def to(self, device: DeviceLike, *, stream: StreamLike | None = None) -> Tensor:
        """Return this tensor where it is on `device` already, else a copy there.

        A copy to pageable host memory is complete on return. Nothing else blocks. Keep a source in pinned memory until
        the stream has done the copy.
        """

    def copy(self, *, stream: StreamLike | None = None) -> Tensor:
        """Return a contiguous copy on the same device."""

    def contiguous(self, *, stream: StreamLike | None = None) -> Tensor:
        """Return this tensor where it is contiguous, else a contiguous copy."""

    def copy_(self, source: Tensor, *, stream: StreamLike | None = None) -> Tensor:
        """Overwrite with the bytes of `source`, of the same shape and dtype, on any device. Returns this tensor."""

    def record(self, stream: StreamLike) -> None:
        """Say that work given to `stream` so far writes this memory."""

    def record_use(self, stream: StreamLike) -> None:
        """Say that work given to `stream` uses this memory: nobody else gets it before that work is done."""

    def make_wait(self, stream: StreamLike) -> None:
        """Let later work on `stream` start when the memory is readable; the host does not wait."""

    def order_on(self, stream: StreamLike) -> Tensor:
        """Make the memory readable in the order of `stream`, which waits until it is. Returns this tensor.

        Needed before `stream` is captured into a graph, when another stream made the memory ready.
        """

    def synchronize(self) -> None:
        """Block until the memory is readable; other Python threads run on."""

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

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
        """Why there is no CUDA device and what mends it; empty when there is one."""

    def memory_info(self, device: DeviceLike) -> tuple[int, int]:
        """Return free and total bytes, now. On CUDA this creates the device's context."""

    def get_current_device(self) -> str:
        """Return this thread's current CUDA device; ``"cpu"`` where there is none."""

    def set_current_device(self, device: DeviceLike) -> None:
        """Make a CUDA device current for this thread. Creates its context."""

    def synchronize(self, device: DeviceLike | None = None) -> None:
        """Wait for all work of a device, by default the current one."""

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

def copy_to_contiguous(
    device: DeviceLike,
    source: int,
    destination: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    stream: StreamLike | None = None,
) -> None:
    """Copy a strided array to a contiguous one on the same device, by address.

    Parameters
    ----------
    source, destination : int
        Address of element (0, ..., 0), and of the contiguous array. They must not overlap.
    shape, strides : sequence of int
        Up to 8 dimensions. Strides count elements, not bytes, and may be 0 or negative.
    itemsize : int
        1, 2, 4, 8 or 16 bytes.
    stream : stream or int, optional
        On CUDA the copy is enqueued here and the call returns.
    """
