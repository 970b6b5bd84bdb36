# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A stand-in for the vendor's module, where the real one cannot run: it needs a GPU to execute, and 10 and 11 to build.

Contexts compute ``y = 2 * x`` (and what `Engine.outputs` says) on host memory by address, so that what our code tells
them is really used: shapes, addresses, streams, allocators. Builders record every setting.
"""

from __future__ import annotations

import ctypes
import enum
import json
import types
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4")
TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST")
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED NONE")
ExecutionContextAllocationStrategy = enum.Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE")
LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON")
CudaGraphStrategy = enum.Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
DynamicShapesKernelSpecializationStrategy = enum.Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")

NUMPY = {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.INT64: np.int64, DataType.BOOL: np.bool_}


class ILogger:
    pass


class IProfiler:
    pass


class IOutputAllocator:
    pass


class IGpuAsyncAllocator:
    pass


class RuntimeCache:
    """Holds bytes; content that begins with ``bad`` is of another environment."""

    def __init__(self) -> None:
        self.content = b"kernels"

    def deserialize(self, blob: bytes) -> bool:
        if bytes(blob).startswith(b"bad"):
            return False
        self.content = bytes(blob)
        return True

    def serialize(self) -> memoryview:
        return memoryview(self.content + b"+")


class RuntimeConfig:
    def __init__(self) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class Engine:
    """One engine: `inputs` and `outputs` are name to (DataType, shape), with -1 for an open dimension."""

    def __init__(
        self,
        inputs: dict[str, tuple[Any, tuple[int, ...]]],
        outputs: dict[str, tuple[Any, tuple[int, ...]]],
        compute: Callable[..., dict[str, Any]],
        layers: list[Any] | None = None,
        most: tuple[int, ...] | None = None,
    ) -> None:
        self.inputs, self.outputs, self.compute, self.layers = inputs, outputs, compute, layers or []
        self.most = most
        self.contexts: list[Context] = []
        self.failing = False
        self.device_memory_size_v2 = 1024
        self.allocator: Any = None

    num_io_tensors = property(lambda self: len(self.inputs) + len(self.outputs))

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def _of(self, name: str) -> tuple[Any, tuple[int, ...]]:
        return {**self.inputs, **self.outputs}[name]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._of(name)[0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._of(name)[1]

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if name == "on_host" else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        shape = self._of(name)[1]
        return [tuple(low if size < 0 else size for size in shape) for low in (1, 4, 8)]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, strategy: Any = None, runtime_config: Any = None) -> Context | None:
        if self.allocator is not None and self.allocator.allocate_async(1024, 256, 0, 0) is None:
            return None
        self.contexts.append(Context(self, runtime_config))
        return self.contexts[-1]

    def create_engine_inspector(self) -> Any:
        text = json.dumps({"Layers": self.layers, "I/O Tensors": []})
        return types.SimpleNamespace(execution_context=None, get_engine_information=lambda form: text)


class Context:
    def __init__(self, engine: Engine, config: Any) -> None:
        self.engine, self.config = engine, config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.nvtx_verbosity = ProfilingVerbosity.DETAILED
        self.profiler: Any = None
        self.runs = 0
        self.streams: list[int] = []

    def get_runtime_config(self) -> Any:
        return self.config

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.engine.most is not None and any(a > b for a, b in zip(shape, self.engine.most, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Open dimensions of outputs are those of the first input at the same axis; -2 is never known."""
        first = next(iter(self.engine.inputs))
        shape = self.shapes.get(first, self.engine.inputs[first][1])
        return tuple(
            shape[axis] if size == -1 else -1 if size == -2 else size
            for axis, size in enumerate(self.engine._of(name)[1])
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory > 0
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.failing:
            return False
        self.runs += 1
        self.streams.append(stream)
        feeds = {}
        for name, (dtype, shape) in self.engine.inputs.items():
            feeds[name] = _view(self.addresses[name], NUMPY[dtype], self.shapes.get(name, shape)).copy()
        for name, value in self.engine.compute(**feeds).items():
            array = np.ascontiguousarray(value, NUMPY[self.engine.outputs[name][0]])
            if any(size == -2 for size in self.engine.outputs[name][1]):
                memory = self.allocators[name]
                address = memory.reallocate_output_async(name, 0, array.nbytes, 256, stream)
                if not address:
                    return False
                memory.notify_shape(name, array.shape)
            else:
                address = self.addresses[name]
            if array.nbytes:
                ctypes.memmove(address, array.ctypes.data, array.nbytes)
        if self.profiler is not None:
            for index, layer in enumerate(self.engine.layers):
                self.profiler.report_layer_time(
                    layer["Name"] if isinstance(layer, dict) else layer, 0.001 * (index + 1)
                )
        return True


def _view(address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    if not count:
        return np.zeros(shape, dtype)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def module(engine: Engine | None) -> Any:
    """Return the module whose runtime deserializes any plan to `engine`."""

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger
            self.gpu_allocator: Any = None

        def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
            if engine is None:
                self.logger.log(
                    1, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Version tag does not match)"
                )
            else:
                engine.allocator = self.gpu_allocator
            return engine

    names = {name: value for name, value in globals().items() if not name.startswith("_")}
    return types.SimpleNamespace(**names, Runtime=Runtime, __name__="trt_fake")
