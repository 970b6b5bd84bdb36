# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Slot`: an execution context with a stream of its own; `Slots`: as many as the policy allows."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import closed
from xpuruntime.engines.tensorrt.memory import make_output_memory
from xpuruntime.engines.tensorrt.messages import Listener
from xpuruntime.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Generator

    from xpuruntime.engines.cuda_arrays import DeviceArray
    from xpuruntime.engines.tensorrt.handle import Handle

__all__ = ["ALIGNMENT", "Slot", "Slots", "unfit"]

#: The vendor asks for it of every address.
ALIGNMENT = 256


class Slot:
    """One execution context. For one thread at a time; what it enqueues is ordered by its stream."""

    def __init__(self, handle: Handle) -> None:
        from xpuruntime import _core

        self._handle = handle
        self.context: Any = None
        self.stream: Any = _core.Stream(handle.device)
        self.context = handle.context()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[str, tuple[int, ...] | None] | None = None
        self._held: list[Any] = []
        self._memories: dict[str, Any] = {}

    def __del__(self) -> None:
        """Drop the context before the handle, whose allocator it gives its memory back to."""
        self.context = None

    def shape(self, shapes: dict[str, tuple[int, ...]], outputs: list[str]) -> dict[str, tuple[int, ...] | None]:
        """Tell the sizes of inputs with open dimensions, where they differ from those of the run before.

        Returns
        -------
        dict of str to tuple of int, or None
            Shape of each output, or ``None`` for one that only the run can tell.

        Raises
        ------
        EngineError
            The engine was not built for them.
        """
        if self._outputs is not None and shapes == self._shapes:
            return self._outputs
        self._outputs = None
        with Listener() as heard:
            for name, shape in shapes.items():
                if not self.context.set_input_shape(name, shape):
                    raise self._handle.failed(f"setting the shape {list(shape)} of input {name!r} for", heard.errors())
        found: dict[str, tuple[int, ...] | None] = {}
        for name in outputs:
            sizes = tuple(int(size) for size in self.context.get_tensor_shape(name))
            found[name] = None if any(size < 0 for size in sizes) else sizes
        self._shapes, self._outputs = shapes, found
        return found

    def address(self, name: str, pointer: int) -> None:
        """Tell where an input or output is. A tensor without elements still needs an address."""
        if not self.context.set_tensor_address(name, pointer or _ANYWHERE):
            raise self._handle.failed(f"setting the address of {name!r} for", [])

    def output_memory(self, name: str) -> Any:
        """Let the run allocate an output; see `make_output_memory`."""
        memory = make_output_memory(self._handle.trt, self._handle.device)
        self.context.set_output_allocator(name, memory)
        self._memories[name] = memory  # the context has a pointer to it
        return memory

    def watch(self, profiler: Any) -> None:
        """Report the time of each layer to a profiler of the vendor's type."""
        self._memories[""] = profiler
        self.context.profiler = profiler

    def enqueue(self, stream: Any = None) -> None:
        """Enqueue a run on the slot's stream, or on another one.

        Raises
        ------
        OutOfMemoryError, CudaError, EngineError
        """
        with Listener() as heard:
            if not self.context.execute_async_v3((stream or self.stream).handle):
                raise self._handle.failed("running", heard.errors())

    def keep(self, arrays: list[Any]) -> None:
        """Keep what a run reads until the next run."""
        self._held = arrays

    def close(self) -> None:
        """Wait for its work, and drop the context."""
        if self.context is not None:
            self.stream.synchronize()
            self.context = None
            self._held = []
            self._memories = {}


#: Address for tensors without elements: never read, but it must not be null.
_ANYWHERE = ALIGNMENT


class Slots:
    """The slots of one session. Threads take turns where there are more of them than slots.

    Parameters
    ----------
    handle : Handle
    most : int
    """

    def __init__(self, handle: Handle, most: int) -> None:
        self._handle, self._most = handle, most
        self._changed = threading.Condition()
        self._free: list[Slot] = [Slot(handle)]
        self._made = 1
        self._open = True

    @contextlib.contextmanager
    def slot(self) -> Generator[Slot, None, None]:
        """Hold a slot; waits for one to be given back where all are held.

        Raises
        ------
        XpuRuntimeError
            After `close`.
        """
        slot = self._take()
        try:
            yield slot
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    def _take(self) -> Slot:
        with self._changed:
            while True:
                if not self._open:
                    closed()
                if self._free:
                    return self._free.pop()
                if self._made < self._most:
                    self._made += 1
                    break
                self._changed.wait()
        try:
            return Slot(self._handle)
        except BaseException as error:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            if isinstance(error, OutOfMemoryError):
                msg = f"{error} Or state fewer contexts in the provider options."
                raise type(error)(msg, engine=error.engine, device=error.device) from None
            raise

    def close(self) -> None:
        """Refuse new runs, wait for those that are under way, and drop the contexts. Idempotent."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            while len(self._free) < self._made:
                self._changed.wait()
            slots, self._free, self._made = self._free, [], 0
        for slot in slots:
            slot.close()


def unfit(item: DeviceArray) -> str | None:
    """Return why an array cannot be used where it is, as the end of a sentence; ``None`` where it can."""
    if not item.contiguous:
        return "is not C-contiguous"
    if (item.pointer or 0) % ALIGNMENT:
        return f"does not start at a multiple of {ALIGNMENT} bytes"
    return None
