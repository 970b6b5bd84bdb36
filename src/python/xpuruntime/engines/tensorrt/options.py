# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options of the TensorRT engines, and the two products that they are of."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from importlib import util
from typing import Any, Literal

import msgspec

from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.control_builder import BOOL, Option, check_options
from xpuruntime.errors import EngineError, EngineUnavailable, PolicyError
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command, installed

#: What changes the engine that is built.
BUILD_OPTIONS: dict[str, Option] = {
    "workspace": Option(meaning="scratch memory in bytes", owned_by="execution.memory.limit"),
    "tf32": Option(meaning="TF32 in fp32 products", values=BOOL, owned_by="execution.tf32"),
    "max_threads": Option(meaning="threads of the builder", low=1, high=4096),
    "builder_optimization_level": Option(meaning="how long to search for kernels; the default is 3", high=5),
    "max_aux_streams": Option(meaning="streams an engine may use beside xpuruntime's; 0 for none", high=32),
    "max_num_tactics": Option(meaning="most tactics timed for a layer; -1: vendor's choice", low=-1, high=2**31 - 1),
    "avg_timing_iterations": Option(meaning="runs averaged when a tactic is timed", low=1, high=10000),
    "tiling_optimization_level": Option(
        meaning="how long tilings are searched for", values=("none", "fast", "moderate", "full")
    ),
    "l2_limit_for_tiling": Option(meaning="bytes of L2 that tilings may use; 0 leaves it to the vendor"),
    "tactic_shared_memory": Option(meaning="most shared memory of a tactic, in bytes", low=1),
    "sparse_weights": Option(meaning="use kernels for 2:4 sparse weights where weights are so", values=BOOL),
    "strict_nans": Option(meaning="no rewriting that could hide a NaN, such as 0*x to 0", values=BOOL),
    "distributive_independence": Option(
        meaning="rows of a product are computed the same wherever they stand", values=BOOL
    ),
    "refit": Option(
        meaning="weights can be replaced later: any, or by equal ones only", values=("off", "on", "identical")
    ),
    "strip_plan": Option(
        meaning="leave weights out of the plan; loading puts them back from the model", values=BOOL
    ),
    "weight_streaming": Option(meaning="build so that weights can stay in host memory", values=BOOL),
    "version_compatible": Option(meaning="a plan for later versions too; needs the lean runtime", values=BOOL),
    "hardware_compatibility": Option(
        meaning="GPUs that an engine runs on", values=("none", "ampere_plus", "same_compute_capability")
    ),
    "runtime_platform": Option(
        meaning="the system an engine is built for", values=("same_as_build", "windows_amd64")
    ),
    "profiling_verbosity": Option(
        meaning="what the engine remembers of its layers; the default here is detailed, which evidence needs",
        values=("detailed", "layer_names_only", "none"),
    ),
    "pin_tactics": Option(
        meaning="keep the tactics of a build in the timing cache (record), or build from these only (require)",
        values=("off", "record", "require"),
    ),
}  # fmt: skip

#: What changes how an engine runs.
RUN_OPTIONS: dict[str, Option] = {
    "contexts": Option(meaning="execution contexts, each with memory of its own: runs at a time", low=1, high=64),
    "context_allocation": Option(
        meaning="memory of a context: for the largest shapes, or for those of its profile",
        values=("static", "on_profile_change"),
    ),
    "weight_streaming_budget": Option(meaning="bytes of weights kept on the GPU; -1 lets the vendor choose", low=-1),
    "persistent_cache_limit": Option(meaning="bytes of L2 kept for activations"),
    "cuda_graph_strategy": Option(
        meaning="whether the runtime captures runs into CUDA graphs by itself",
        values=("disabled", "whole_graph_capture"),
    ),
    "kernel_specialization": Option(
        meaning="when kernels for dynamic shapes are made: while others run (lazy), at once (eager), never (none)",
        values=("lazy", "eager", "none"),
    ),
}

#: Options that are text; what each takes is said in its meaning.
TEXT_OPTIONS: dict[str, Option] = {
    "compute_capability": Option(
        meaning='GPUs to build for, such as `"8.6"` or `"8.6, 12.0"`; the default is the GPU here, or without one all '
        "that can be named from 8.0 on",
        text=True,
    ),
    "timing_cache": Option(
        meaning="`off` (the default), `default` for a file in the user's cache folder, or the path of a file", text=True
    ),
    "runtime_cache": Option(
        meaning="`off` (the default), `default` for a file in the user's cache folder, or the path of a file", text=True
    ),
}

#: Option to the capability (see `CAPABILITIES`) that it needs.
NEEDS = {
    "compute_capability": "targets",
    "timing_cache": "timing_cache",
    "avg_timing_iterations": "timing_cache",
    "max_num_tactics": "timing_cache",
    "pin_tactics": "tactic_pinning",
    "runtime_cache": "runtime_cache",
    "cuda_graph_strategy": "graph_strategy",
    "kernel_specialization": "kernel_specialization",
    "hardware_compatibility": "hardware_compatibility",
    "runtime_platform": "runtime_platform",
    "refit": "refit",
    "strip_plan": "refit",
    "weight_streaming": "weight_streaming",
    "weight_streaming_budget": "weight_streaming",
    "tiling_optimization_level": "tiling",
    "l2_limit_for_tiling": "tiling",
}


def runtime_keys(product: TensorRtProduct) -> tuple[str, ...]:
    """Return the policy keys that change how an engine runs and nothing in it; see `Engine.runtime_keys`."""
    options = (*RUN_OPTIONS, "runtime_cache", "timing_cache", "compute_capability")
    own = tuple(f"execution.provider_options.{name}.{option}" for name in product.names for option in options)
    return ("execution.cuda_graph", "execution.determinism", "execution.memory.pool", *own)


def checked_options(stated: Mapping[str, object], product: TensorRtProduct, facts: EngineFacts) -> dict[str, str]:
    """Return the options of a policy as text, each with a value that its table allows and this version has."""
    where = f"execution.provider_options.{product.name}"
    texts = {name: str(value).strip() for name, value in stated.items() if name in TEXT_OPTIONS}
    rest = {name: value for name, value in stated.items() if name not in TEXT_OPTIONS}
    options = check_options(rest, {**BUILD_OPTIONS, **RUN_OPTIONS}, where, also=TEXT_OPTIONS)
    for name in (*options, *texts):
        word = NEEDS.get(name)
        if word is not None and not has(facts, word):
            msg = f"{where}.{name}: {product.title} {facts.version} does not have it ({CAPABILITIES[word].meaning})"
            raise PolicyError(msg, fix=_serving(word, product), engine=product.name)
    for name in ("timing_cache", "runtime_cache"):
        text = texts.get(name)
        if text is not None and text not in ("off", "default") and "/" not in text and "\\" not in text:
            msg = f"{where}.{name}: {text!r} is neither off, default, nor a path; for such a file write './{text}'"
            raise PolicyError(msg, engine=product.name)
    options.update(texts)
    _together(options, where, product)
    return options


def _serving(word: str, product: TensorRtProduct) -> str:
    other = TENSORRT if product.jit else RTX
    elsewhere = f"state engine: {other.name}, and the option under that name"
    if product.jit and CAPABILITIES[word].timed:
        return elsewhere
    return f"pip install --upgrade {product.distributions[0]}, or {elsewhere}"


def _together(options: Mapping[str, str], where: str, product: TensorRtProduct) -> None:
    if options.get("pin_tactics", "off") != "off" and options.get("timing_cache", "off") == "off":
        msg = (
            f"{where}.pin_tactics: tactics are kept in a timing cache, and there is none. "
            "Fix: state timing_cache as well"
        )
        raise PolicyError(msg, engine=product.name)
    if "weight_streaming_budget" in options and options.get("weight_streaming") != "1":
        msg = (
            f"{where}.weight_streaming_budget: the engine is built without weight streaming. "
            "Fix: state weight_streaming: 1"
        )
        raise PolicyError(msg, engine=product.name)


def targets_of(text: str, product: TensorRtProduct, facts: EngineFacts) -> tuple[str, ...]:
    """Return the compute capabilities that ``compute_capability`` names, in order and once each."""
    where = f"execution.provider_options.{product.name}.compute_capability"
    known = compute_capabilities(facts)
    words = [word for word in re.split(r"[\s,;]+", text) if word]
    for word in words or [text]:
        if word not in known:
            what = f"has no target {word}" if re.fullmatch(r"\d+\.\d", word) else f"takes no {word!r}"
            msg = f"{where}: {product.title} {facts.version} {what}; it can build for {', '.join(known)}"
            raise PolicyError(msg, engine=product.name)
    return tuple(sorted(set(words), key=lambda word: tuple(map(int, word.split(".")))))


#: Least, best and largest shape of one input.
Profile = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class TensorRtSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` and `compile` hand to TensorRT."""

    targets: tuple[str, ...] = ()
    convert: Literal["fp16", "bf16"] | None = None
    quantize: bool = False
    keep_fp32: tuple[str, ...] = ()
    tf32: bool = True
    profiles: Mapping[str, Profile] = {}
    workspace: int | None = None
    options: Mapping[str, str] = {}
    graph: Literal["off", "prefer", "require"] = "off"
    pool: Literal["engine", "direct", "caching", "driver"] = "engine"
    pool_limit: int | None = None
    strict: bool = False


class TensorRtProduct(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two products."""

    names: tuple[str, ...]
    title: str
    module: str
    distributions: tuple[str, ...]
    extra: str
    jit: bool

    @property
    def name(self) -> str:
        """The engine's own name."""
        return self.names[0]

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install_command(self.extra)


TENSORRT = TensorRtProduct(
    names=("tensorrt", "trt"),
    title="TensorRT",
    module="tensorrt",
    distributions=("tensorrt-cu13", "tensorrt-cu12", "tensorrt", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings"),
    extra="tensorrt",
    jit=False,
)
RTX = TensorRtProduct(
    names=("tensorrt-rtx", "trt-rtx"),
    title="TensorRT-RTX",
    module="tensorrt_rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx", "tensorrt-rtx-cu13-bindings"),
    extra="tensorrt-rtx",
    jit=True,
)


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """Something that not every product and version has."""

    meaning: str
    present: Callable[[Any], bool]
    timed: bool = False


def _member(kind: str, *names: str) -> Callable[[Any], bool]:
    return lambda trt: all(hasattr(getattr(trt, kind, None), name) for name in names)


#: Word in `EngineFacts.detail` to what it stands for.
CAPABILITIES: dict[str, Capability] = {
    "weak_typing": Capability(
        meaning="networks are weakly typed unless asked otherwise; we always ask",
        present=_member("BuilderFlag", "FP16"),
    ),
    "targets": Capability(
        meaning="an engine is built for named compute capabilities, also without a GPU",
        present=_member("IBuilderConfig", "set_compute_capability", "num_compute_capabilities"),
    ),
    "timing_cache": Capability(
        meaning="measured tactics are kept and used again",
        present=_member("IBuilderConfig", "create_timing_cache"),
        timed=True,
    ),
    "tactic_pinning": Capability(
        meaning="a build can be restricted to the tactics of a timing cache",
        present=_member("BuilderFlag", "EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS"),
        timed=True,
    ),
    "runtime_cache": Capability(
        meaning="kernels compiled at load are kept and used again",
        present=_member("IRuntimeConfig", "create_runtime_cache", "set_runtime_cache"),
    ),
    "graph_strategy": Capability(
        meaning="the runtime captures CUDA graphs by itself", present=_member("IRuntimeConfig", "cuda_graph_strategy")
    ),
    "kernel_specialization": Capability(
        meaning="it can be chosen when kernels for dynamic shapes are compiled",
        present=_member("IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"),
    ),
    "validity": Capability(
        meaning="a plan can be examined before it is loaded", present=_member("Runtime", "get_engine_validity")
    ),
    "weight_streaming": Capability(
        meaning="weights can stay in host memory", present=_member("ICudaEngine", "weight_streaming_budget_v2")
    ),
    "refit": Capability(
        meaning="weights of an engine can be replaced", present=_member("OnnxParserRefitter", "refit_from_bytes")
    ),
    "hardware_compatibility": Capability(
        meaning="an engine can be built for other GPUs than the one here",
        present=_member("HardwareCompatibilityLevel", "AMPERE_PLUS"),
        timed=True,
    ),
    "tiling": Capability(meaning="tiling can be searched for", present=_member("TilingOptimizationLevel", "FULL")),
    "runtime_platform": Capability(
        meaning="an engine can be built for Windows on Linux", present=_member("RuntimePlatform", "WINDOWS_AMD64")
    ),
    "async_allocator": Capability(
        meaning="allocators get the stream", present=_member("IGpuAsyncAllocator", "allocate_async")
    ),
    "capturability": Capability(
        meaning="it says beforehand whether a graph can be captured",
        present=_member("IExecutionContext", "is_stream_capturable"),
    ),
}


def probe_api(trt: Any, product: TensorRtProduct) -> dict[str, str]:
    """Return what the bindings offer, as `EngineFacts.detail` holds it."""
    words = [
        word
        for word, capability in CAPABILITIES.items()
        if capability.present(trt) and not (capability.timed and product.jit)
    ]
    return {"capabilities": " ".join(words), "compute_capabilities": " ".join(_targets(trt))}


def has(facts: EngineFacts, word: str) -> bool:
    """Say whether the bindings that were probed have a capability."""
    return word in facts.detail.get("capabilities", "").split()


def compute_capabilities(facts: EngineFacts) -> tuple[str, ...]:
    """Return the compute capabilities that can be named as targets, such as ``("8.0", "12.1")``."""
    return tuple(facts.detail.get("compute_capabilities", "").split())


def _targets(trt: Any) -> list[str]:
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    numbers = sorted(int(name[2:]) for name in members if name.startswith("SM") and name[2:].isdigit())
    return [f"{number // 10}.{number % 10}" for number in numbers]


#: The oldest release that has everything this adapter calls: tensors by name, `execute_async_v3`, strong typing.
OLDEST = {"tensorrt": 10, "tensorrt-rtx": 1}


def bindings(product: TensorRtProduct) -> Any:
    """Return the vendor's module."""
    try:
        return importlib.import_module(product.module)
    except Exception as error:  # an import of a vendor package can fail in any way
        msg = f"{product.title} does not import: {error}. {product.install}"
        raise EngineUnavailable(msg, engine=product.name) from error


def probe(product: TensorRtProduct) -> EngineFacts:
    """Import the bindings, if they are installed, and note what they offer. Touches no device and never raises."""
    wheel = next(iter(installed(*product.distributions)), None)
    try:
        present = util.find_spec(product.module) is not None
    except (ImportError, ValueError):
        present = False
    if not present:
        return EngineFacts(name=product.name, reason=f"{product.title} is not installed", fix=product.install)
    version = installed(wheel)[wheel] if wheel else None
    try:
        trt = bindings(product)
        version = str(trt.__version__)
    except (EngineError, AttributeError) as error:
        return EngineFacts(
            name=product.name,
            version=version or "unknown",
            reason=f"the package {product.module} is there but does not load: {error.__cause__ or error}",
            fix=f"pip install --force-reinstall {wheel or product.distributions[0]}",
        )
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST[product.name]:
        return EngineFacts(
            name=product.name,
            version=version,
            reason=f"{product.title} {version} is too old: {OLDEST[product.name]}.0 or newer is needed",
            fix=f"pip install --upgrade {wheel or product.distributions[0]}",
        )
    return EngineFacts(
        name=product.name,
        version=version,
        loadable=True,
        providers=("cuda",),
        detail={**({"wheel": wheel} if wheel else {}), **probe_api(trt, product)},
    )
