# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for tensors."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from xpuruntime._core import DeviceLike, Event, MemoryPool, StreamLike

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
