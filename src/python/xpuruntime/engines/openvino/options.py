# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options and settings of the OpenVINO engine, and their values as a compiled model reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.control_builder import BOOL, Option, show
from xpuruntime.policies.compound_kinds import split_size

#: What a policy may call this engine.
NAMES = ("openvino", "ov")

_LEVELS = ("LOW", "MEDIUM", "HIGH")
_CACHE = ("f32", "f16", "bf16", "u8")
_ARTIFACTS = "execution.artifacts"

_SHARED: dict[str, Option] = {
    "INFERENCE_PRECISION_HINT": Option(meaning="precision to compute in", owned_by="execution.precision"),
    "EXECUTION_MODE_HINT": Option(meaning="accuracy or speed", owned_by="execution.precision"),
    "DEVICE_ID": Option(meaning="device index", owned_by="execution.device"),
    "PERF_COUNT": Option(meaning="times of nodes", owned_by="explain()"),
    "CACHE_DIR": Option(meaning="folder of compiled models", owned_by=_ARTIFACTS),
    "CACHE_MODE": Option(meaning="what a compiled model is made for", owned_by=_ARTIFACTS),
    "ENABLE_WEIGHTLESS": Option(meaning="compiled models without weights", owned_by=_ARTIFACTS),
    "WEIGHTS_PATH": Option(meaning="weights of a compiled model", owned_by=_ARTIFACTS),
    "PERFORMANCE_HINT": Option(
        meaning="what streams and batching are tuned for", values=("LATENCY", "THROUGHPUT"), search=("THROUGHPUT",)
    ),
    "PERFORMANCE_HINT_NUM_REQUESTS": Option(meaning="requests that will run side by side", low=1, high=4096),
    "NUM_STREAMS": Option(meaning="inferences that run side by side", low=1, high=4096),
}

CPU_OPTIONS: dict[str, Option] = {
    **_SHARED,
    "INFERENCE_NUM_THREADS": Option(meaning="threads of one inference", owned_by="execution.threads"),
    "ENABLE_CPU_PINNING": Option(meaning="bind threads to cores", values=BOOL, search=("0", "1")),
    "ENABLE_CPU_RESERVATION": Option(
        meaning="keep the cores for this model: while it has all of them, no other can be compiled in the process",
        values=BOOL,
    ),
    "ENABLE_HYPER_THREADING": Option(meaning="use both threads of a core", values=BOOL, search=("1",)),
    "ENABLE_TENSOR_PARALLEL": Option(meaning="split one inference over sockets", values=BOOL),
    "SCHEDULING_CORE_TYPE": Option(
        meaning="which cores of a hybrid processor", values=("ANY_CORE", "PCORE_ONLY", "ECORE_ONLY")
    ),
    "TBB_PARTITIONER": Option(meaning="how loops are divided", values=("STATIC", "AUTO")),
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": Option(
        meaning="activations quantized while running where weights are compressed: size of a group, 0 for none",
        high=2**31 - 1,
    ),
    "KV_CACHE_PRECISION": Option(meaning="type of cached keys and values", values=_CACHE),
    "KEY_CACHE_PRECISION": Option(meaning="type of cached keys", values=_CACHE),
    "VALUE_CACHE_PRECISION": Option(meaning="type of cached values", values=_CACHE),
    "KEY_CACHE_GROUP_SIZE": Option(meaning="size of a group of cached keys", high=2**31 - 1),
    "VALUE_CACHE_GROUP_SIZE": Option(meaning="size of a group of cached values", high=2**31 - 1),
}

GPU_OPTIONS: dict[str, Option] = {
    **_SHARED,
    "MODEL_PRIORITY": Option(meaning="priority among models on the device", values=_LEVELS),
    "GPU_QUEUE_PRIORITY": Option(meaning="priority of the queue", values=_LEVELS),
    "GPU_QUEUE_THROTTLE": Option(meaning="throttling of the queue", values=_LEVELS),
    "GPU_HOST_TASK_PRIORITY": Option(meaning="cores for work on the host", values=_LEVELS),
    "GPU_ENABLE_SDPA_OPTIMIZATION": Option(meaning="fused attention", values=BOOL),
    "GPU_ENABLE_LOOP_UNROLLING": Option(meaning="unroll loops", values=BOOL),
    "GPU_DISABLE_WINOGRAD_CONVOLUTION": Option(meaning="no Winograd convolutions", values=BOOL),
}

NPU_OPTIONS: dict[str, Option] = {
    **_SHARED,
    "MODEL_PRIORITY": Option(meaning="priority among models on the device", values=_LEVELS),
    "NPU_TURBO": Option(meaning="highest frequency", values=BOOL),
    "NPU_TILES": Option(meaning="tiles to use", low=1, high=64),
    "NPU_DEFER_WEIGHTS_LOAD": Option(meaning="load weights at the first run", values=BOOL),
    "NPU_RUN_INFERENCES_SEQUENTIALLY": Option(meaning="one inference at a time", values=BOOL),
}


#: Options that are no properties of a plugin: they say how the graph is prepared.
GRAPH_OPTIONS: dict[str, Option] = {
    "quantizer": Option(meaning="who quantizes a model in floats for int8", values=("onnxruntime", "nncf")),
}


def options_of(kind: str) -> dict[str, Option]:
    """Return the table of ``"cpu"``, ``"gpu"`` or ``"npu"``."""
    return {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS, "npu": NPU_OPTIONS}[kind]


class OpenVinoSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to OpenVINO."""

    device: str
    hint: str
    properties: Mapping[str, str] = {}
    precision: str = "model"
    quantize: bool = False
    style: Literal["openvino", "openvino-nncf"] = "openvino"
    keep_fp32: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    strict: bool = False

    def with_properties(self, properties: Mapping[str, str]) -> OpenVinoSettings:
        """Return the same settings with these properties, which replace others of the same names."""
        return self.replace(properties={**self.properties, **properties})


#: Names of enumerations that differ from what OpenVINO takes.
_WORDS = {"ERR": "LOG_ERROR", "NO": "LOG_NONE"}


def word(value: Any) -> str:
    """Return a property's value as one writes it: ``"f32"``, ``"YES"``, ``"LATENCY"``, ``"2"``."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    name = getattr(value, "name", None)  # an enumeration
    if isinstance(name, str):
        return _WORDS.get(name, name)
    if hasattr(value, "to_string"):  # a type
        return str(value.to_string())
    return str(value)


def read_back(compiled: Any, name: str) -> str | None:
    """Return what a compiled model holds for a property, or ``None`` where it does not tell."""
    try:
        return word(compiled.get_property(name))
    except RuntimeError:
        return None


def effective(
    compiled: Any, settings: OpenVinoSettings, device: str, stated: Mapping[str, Sequence[int | str]]
) -> dict[str, str]:
    """Return policy key to value, for what can be read back."""
    in_effect = {"execution.engine": NAMES[0], "execution.device": device}
    threads = read_back(compiled, "INFERENCE_NUM_THREADS")
    if threads is not None:
        in_effect["execution.threads"] = f"INFERENCE_NUM_THREADS={threads}"
    shapes = {port.get_any_name(): port.get_partial_shape() for port in compiled.inputs}
    if all(shape.is_static for shape in shapes.values()):
        in_effect["execution.static_shape"] = "all sizes are fixed"
    for name, sizes in stated.items():
        if name in shapes:
            same = _limits(shapes[name]) == [split_size(size)[::2] for size in sizes]
            in_effect[f"execution.shapes.{name}"] = show(sizes) if same else str(shapes[name])
    for name in settings.properties:
        value = read_back(compiled, name)
        if value is not None:
            for alias in NAMES:
                in_effect[f"execution.provider_options.{alias}.{name}"] = value
    return in_effect


def _limits(shape: Any) -> list[tuple[int, int]]:
    return [(int(dim.get_min_length()), int(dim.get_max_length())) for dim in shape]
