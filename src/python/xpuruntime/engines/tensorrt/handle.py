# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Handle`: a deserialised engine, and the execution contexts that are made from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.tensorrt.artifact import Record
from xpuruntime.engines.tensorrt.memory import PoolAllocator, make_allocator
from xpuruntime.engines.tensorrt.messages import Listener, failure, logger
from xpuruntime.engines.tensorrt.network import DTYPES
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.tensorrt.caches import CacheFile
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.engines.tensorrt.settings import TensorRtSettings
    from xpuruntime.errors import XpuRuntimeError

__all__ = ["Border", "Handle"]


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
        """Return what the vendor says of a plan that it did not load, in words."""
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
            place = () if weights.folder is None else (f"{weights.folder}/model.onnx",)
            read = parser.refit_from_bytes(weights.model, *place)
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
        engine, found = self.engine, {}
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            dtype = engine.get_tensor_dtype(name).name
            host = engine.get_tensor_location(name) == self.trt.TensorLocation.HOST
            dynamic = any(size < 0 for size in engine.get_tensor_shape(name))
            found[name] = Border(DTYPES.get(dtype, dtype), host, dynamic)
        return found

    def memory(self) -> dict[str, int]:
        """Return bytes by owner, as far as the engine and xpuruntime's pool report."""
        found = {} if self._pool is None else {"engine": self._pool.held()}
        size = getattr(self.engine, "device_memory_size_v2", None)
        return {**found, **({"activations_per_context": int(size)} if size is not None else {})}

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
