# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Slot`: an execution context with a stream of its own; `Slots`: as many as the policy allows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.base import closed
from xpuruntime.engines.tensorrt.memory import make_output_memory
from xpuruntime.engines.tensorrt.messages import Listener
from xpuruntime.errors import OutOfMemoryError
from xpuruntime.runtime.interruptible_waits import ConditionVariable

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.cuda_arrays import DeviceArray
    from xpuruntime.engines.tensorrt.handle import Handle

__all__ = ["ALIGNMENT", "Slot", "Slots", "unfit"]

#: The vendor asks for it of every address.
ALIGNMENT = 256


class Slot:
    """One execution context. For one thread at a time; what it enqueues is ordered by its stream."""

    def __init__(self, handle: Handle) -> None:
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
        """Tell the sizes of inputs with open dimensions, where they differ from those of the run before."""
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
        """Enqueue a run on the slot's stream, or on another one."""
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
    """The slots of one session. Threads take turns where there are more of them than slots."""

    def __init__(self, make: Callable[[], Slot], most: int) -> None:
        self._make, self._most = make, most
        self._lock = threading.Lock()
        self._changed = ConditionVariable(self._lock)
        self._slots = [make()]
        #: Which turn has which slot, and the turns for which one is made. A slot that no turn has is free.
        self._taken: dict[_Turn, Slot] = {}
        self._making: set[_Turn] = set()
        self._open = True

    def slot(self) -> _Turn:
        """Return a block that holds a slot; waits for one to be given back where all are held."""
        return _Turn(self)

    def _claim(self, turn: _Turn) -> bool:
        """Let a turn have a slot, or make one; say whether it does. With the lock."""
        if not self._open:
            closed()
        held = set(map(id, self._taken.values()))
        for slot in reversed(self._slots):
            if id(slot) not in held:
                self._taken[turn] = slot
                return True
        if len(self._slots) + len(self._making) < self._most:
            self._making.add(turn)
            return True
        return False

    def _take(self, turn: _Turn) -> Slot:
        self._changed.wait_for(lambda: self._claim(turn))
        if turn in self._making:
            slot = self._made()
            with self._lock:
                self._taken[turn] = slot
                self._slots.append(slot)
                self._making.discard(turn)
        return self._taken[turn]

    def _made(self) -> Slot:
        try:
            return self._make()
        except OutOfMemoryError as error:
            msg = f"{error} Or state fewer contexts in the provider options."
            raise type(error)(msg, engine=error.engine, device=error.device) from None

    def _give(self, turn: _Turn) -> None:
        """End a turn, however far it came."""
        with self._lock:
            self._taken.pop(turn, None)
            self._making.discard(turn)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new runs, wait for those that are under way, and drop the contexts. Idempotent."""
        with self._lock:
            self._open = False
            self._changed.notify_all()
        self._changed.wait_for(lambda: not (self._taken or self._making))
        with self._lock:
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()


class _Turn:
    """A block that holds a slot."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def _enter(self) -> Slot:
        return self._slots._take(self)

    def _leave(self, *_: object) -> None:
        self._slots._give(self)

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)


def unfit(item: DeviceArray) -> str | None:
    """Return why an array cannot be used where it is, as the end of a sentence; ``None`` where it can."""
    if not item.contiguous:
        return "is not C-contiguous"
    if (item.pointer or 0) % ALIGNMENT:
        return f"does not start at a multiple of {ALIGNMENT} bytes"
    return None
