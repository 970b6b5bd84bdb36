# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products: feature detection across TensorRT 10, 11 and TensorRT-RTX, the installation, and whether it loads."""

from __future__ import annotations

import importlib
from importlib import util
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import EngineError, EngineUnavailable
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command, installed

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.runtime.machine import EngineFacts

__all__ = [
    "CAPABILITIES",
    "OLDEST",
    "RTX",
    "TENSORRT",
    "Capability",
    "TensorRtProduct",
    "bindings",
    "compute_capabilities",
    "has",
    "probe",
    "probe_api",
]


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
    words = [word for word, one in CAPABILITIES.items() if one.present(trt) and not (one.timed and product.jit)]
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
