# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Device memory of an engine from an xpuruntime pool, and memory for outputs whose size is known only after the run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime import _core
from xpuruntime.engines.base import closed
from xpuruntime.engines.tensorrt.network import DTYPES, Listener, failure, logger
from xpuruntime.engines.tensorrt.refusals import Record
from xpuruntime.errors import EngineError, OutOfMemoryError, XpuRuntimeError
from xpuruntime.runtime.interruptible_waits import ConditionVariable

if TYPE_CHECKING:
    from xpuruntime.engines.cuda_arrays import DeviceArray
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.tensorrt.building import CacheFile
    from xpuruntime.engines.tensorrt.options import TensorRtProduct, TensorRtSettings

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = (ctypes.py_object,)


def _capsule(pointer: int) -> Any:
    return _api.PyCapsule_New(pointer, None, None)


def _pointer(memory: Any) -> int:
    """Return the address that the bindings hand over: a capsule, a number, or nothing."""
    if memory is None:
        return 0
    if isinstance(memory, int):
        return memory
    return int(_api.PyCapsule_GetPointer(memory, _api.PyCapsule_GetName(memory)) or 0)


class PoolAllocator:
    """What an engine's allocator does: buffers of a pool by address. Thread-safe.

    None of its methods raises: an exception would have to pass through the vendor's C++ frames, which ends the process.
    """

    def __init__(self, pool: _core.MemoryPool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._buffers: dict[int, _core.Buffer] = {}
        self._failure: str | None = None

    def give(self, size: int, stream: int) -> Any:
        """Return a capsule with memory for use in the order of a stream, or ``None``."""
        if size <= 0:
            return None
        try:
            buffer = self.pool.allocate(size, stream)
        except Exception as error:
            with self._lock:
                self._failure = str(error)
            return None
        with self._lock:
            self._buffers[buffer.ptr] = buffer
        return _capsule(buffer.ptr)

    def take(self, memory: Any, stream: int) -> bool:
        """Give memory back after the work that `stream` has now; say whether it was ours."""
        try:
            pointer = _pointer(memory)
            if not pointer:
                return True
            with self._lock:
                buffer = self._buffers.pop(pointer, None)
            if buffer is None:
                return False
            if stream != buffer.stream:
                buffer.record_stream(stream)
        except Exception as error:
            with self._lock:
                self._failure = str(error)
            return False
        return True

    def take_failure(self) -> str | None:
        """Return why the pool refused last, and forget it."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def held(self) -> int:
        """Return the bytes that the engine holds."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._buffers.values())


def make_allocator(trt: Any, source: PoolAllocator) -> Any:
    """Return the vendor's allocator object over `source`; keep it for as long as anything was allocated with it.

    The base class has to be initialized by its own name: `IGpuAsyncAllocator` through `IGpuAllocator`, as its
    documentation shows, ends the process.
    """
    base: Any = getattr(trt, "IGpuAsyncAllocator", None) or trt.IGpuAllocator

    class Allocator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> Any:
            del alignment, flags  # a pool's memory is aligned to 256 bytes, as that of the driver
            return source.give(int(size), 0)

        def deallocate(self, memory: Any) -> bool:
            return source.take(memory, 0)

        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> Any:
            del alignment, flags
            return source.give(int(size), int(stream))

        def deallocate_async(self, memory: Any, stream: int) -> bool:
            return source.take(memory, int(stream))

        def reallocate(self, address: Any, alignment: int, new_size: int) -> Any:
            del address, alignment, new_size
            return None  # the library then allocates anew and copies

    return Allocator()


def make_output_memory(trt: Any, device: str) -> Any:
    """Return the vendor's output allocator over memory of ours.

    After a run, its `tensor` holds the bytes and its `shape` the sizes; `failure` says why memory was refused.
    """
    base: Any = trt.IOutputAllocator

    class OutputMemory(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.tensor: Any = None
            self.shape: tuple[int, ...] | None = None
            self.failure: str | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            del tensor_name, memory, alignment
            try:
                from xpuruntime import _core

                self.tensor = _core.Tensor.empty((max(int(size), 1),), "uint8", device, stream=int(stream))
            except Exception as error:  # must not pass through C++
                self.failure = str(error)
                return 0
            return int(self.tensor.data_ptr)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            del tensor_name
            self.shape = tuple(int(size) for size in shape)

    return OutputMemory()


class Border(NamedTuple):
    """An input or output of an engine: dtype by xpuruntime's name, whether in host memory, and whether dynamic."""

    dtype: str
    host: bool
    dynamic: bool


class Handle:
    """An engine on its device. Contexts may be made and used from any thread."""

    def __init__(
        self, trt: Any, product: TensorRtProduct, device: str, settings: TensorRtSettings, record: Record, label: str
    ) -> None:
        self.trt, self.product, self.device = trt, product, device
        self.settings, self.record, self.label = settings, record, label
        self.cache_note: tuple[str, str] | None = None
        self._pool: PoolAllocator | None = None
        self._allocator: Any = None
        self._runtime: Any = None
        self._cache: Any = None
        self._config: Any = None
        self._making = threading.Lock()
        self._cache_file: CacheFile | None = None
        self.engine: Any = None

    def open(self, plan: bytes, cache_file: CacheFile | None, weights: ModelSource | None) -> None:
        """Put the engine on the device."""
        trt = self.trt
        self._cache_file = cache_file
        with Listener() as heard:
            self._runtime = trt.Runtime(logger(trt))
            if self.settings.pool != "engine":
                from xpuruntime import _core

                limit, name = self.settings.pool_limit, f"{self.product.name} {self.label}"
                self._pool = PoolAllocator(_core.MemoryPool(self.device, self.settings.pool, limit=limit, name=name))
                self._allocator = make_allocator(trt, self._pool)
                self._runtime.gpu_allocator = self._allocator
            self.engine = self._runtime.deserialize_cuda_engine(plan)
            if self.engine is None:
                why = self._validity(plan)
                raise self.failed("loading", [*why, *heard.errors()])
            if self.settings.options.get("strip_plan") == "1":
                self._refit(weights, heard)
        self._stream_weights()

    def _validity(self, plan: bytes) -> list[str]:
        trt = self.trt
        if not hasattr(trt.Runtime, "get_engine_validity"):
            return []
        _, bits = self._runtime.get_engine_validity(plan[: int(self._runtime.engine_header_size)])
        members = trt.EngineInvalidityDiagnostics.__members__
        words = [name.replace("_", " ").lower() for name, member in members.items() if int(bits) & int(member)]
        return [f"the plan does not fit here ({', '.join(words)})"] if words else []

    def _refit(self, weights: ModelSource | None, heard: Listener) -> None:
        trt = self.trt
        if weights is None:
            msg = (
                f"the engine of {self.label} was built with strip_plan and holds no weights, and the model is not at "
                "hand; load the model itself, or compile without strip_plan"
            )
            raise EngineError(msg, engine=self.product.name, device=self.device)
        refitter = trt.Refitter(self.engine, logger(trt))
        parser = trt.OnnxParserRefitter(refitter, logger(trt))
        if isinstance(weights.model, bytes):
            paths = () if weights.folder is None else (f"{weights.folder}/model.onnx",)
            read = parser.refit_from_bytes(weights.model, *paths)
        else:
            read = parser.refit_from_file(weights.model)
        if not read or not refitter.refit_cuda_engine():
            raise self.failed("putting weights into the engine of", heard.errors())

    def _stream_weights(self) -> None:
        budget = self.settings.options.get("weight_streaming_budget")
        if budget is not None:
            least = int(budget)
            wanted = self.engine.get_weight_streaming_automatic_budget() if least < 0 else least
            self.engine.weight_streaming_budget_v2 = wanted

    def context(self) -> Any:
        """Return a new execution context; it has memory of its own."""
        trt, options = self.trt, self.settings.options
        word = options.get("context_allocation", "static").upper()
        strategy = getattr(trt.ExecutionContextAllocationStrategy, word)
        with self._making, Listener() as heard:
            if hasattr(self.engine, "create_runtime_config"):
                if self._config is None:  # kept: a context may hold on to it
                    self._config = self._runtime_config(trt, strategy, options)
                context = self.engine.create_execution_context(runtime_config=self._config)
            else:
                context = self.engine.create_execution_context(strategy)
            if context is None:
                raise self.failed("making an execution context for", heard.errors())
        if hasattr(context, "nvtx_verbosity"):  # the engine keeps its details for evidence; runs need none of them
            context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        if "persistent_cache_limit" in options:
            context.persistent_cache_limit = int(options["persistent_cache_limit"])
        return context

    def _runtime_config(self, trt: Any, strategy: Any, options: Mapping[str, str]) -> Any:
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if "cuda_graph_strategy" in options:
            config.cuda_graph_strategy = getattr(trt.CudaGraphStrategy, options["cuda_graph_strategy"].upper())
        if "kernel_specialization" in options:
            kind = trt.DynamicShapesKernelSpecializationStrategy
            word = options["kernel_specialization"].upper()
            config.dynamic_shapes_kernel_specialization_strategy = getattr(kind, word)
        if self._cache_file is not None:
            self._cache = self._read_cache(config, self._cache_file)
            config.set_runtime_cache(self._cache)
        return config

    def _read_cache(self, config: Any, file: CacheFile) -> Any:
        cache = config.create_runtime_cache()
        content = file.read()
        what = f"runtime cache {file.path}"
        if content is None:
            self.cache_note = what, "not there yet; kernels are compiled and kept"
        elif cache.deserialize(content):
            self.cache_note = what, "read"
        else:
            self.cache_note = what, "made for another GPU, driver or version; kernels are compiled anew and kept"
        return cache

    def keep_cache(self) -> None:
        """Write the runtime cache, where there is one and it holds more than its file."""
        if self._cache is None or self._cache_file is None:
            return
        memory = self._cache.serialize()
        if memory is not None and memory.nbytes:
            content = bytes(memory)
            self._cache_file.update(lambda _: content)

    def borders(self) -> dict[str, Border]:
        """Return the inputs and outputs of the engine by name."""
        engine, borders = self.engine, {}
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            dtype = engine.get_tensor_dtype(name).name
            host = engine.get_tensor_location(name) == self.trt.TensorLocation.HOST
            dynamic = any(size < 0 for size in engine.get_tensor_shape(name))
            borders[name] = Border(DTYPES.get(dtype, dtype), host, dynamic)
        return borders

    def memory(self) -> dict[str, int]:
        """Return bytes by owner, as far as the engine and xpuruntime's pool report."""
        usage = {} if self._pool is None else {"engine": self._pool.held()}
        size = getattr(self.engine, "device_memory_size_v2", None)
        return {**usage, **({"activations_per_context": int(size)} if size is not None else {})}

    def failed(self, doing: str, heard: list[str]) -> XpuRuntimeError:
        """Return the error of a call that answered with nothing; `doing` such as ``"running"``."""
        pool = self._pool.take_failure() if self._pool is not None else None
        text = f"{doing} {self.label} with {self.product.title} on {self.device}"
        return failure(text, heard, engine=self.product.name, device=self.device, pool=pool)

    def __del__(self) -> None:
        """Drop the engine before the allocator that it gives its memory back to."""
        self.close()

    def close(self) -> None:
        """Give everything back; contexts must be gone. Idempotent."""
        self._config = None
        self.engine = None
        self._cache = None
        self._runtime = None
        self._allocator = None
        self._pool = None


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
        output_shapes: dict[str, tuple[int, ...] | None] = {}
        for name in outputs:
            sizes = tuple(int(size) for size in self.context.get_tensor_shape(name))
            output_shapes[name] = None if any(size < 0 for size in sizes) else sizes
        self._shapes, self._outputs = shapes, output_shapes
        return output_shapes

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
