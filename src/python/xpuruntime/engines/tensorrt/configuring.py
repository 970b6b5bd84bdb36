# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A builder's configuration, set from `TensorRtSettings` and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.tensorrt.settings import TensorRtSettings

__all__ = ["configure"]

#: Options that are an attribute of the configuration and take a number.
_NUMBERS = (
    "builder_optimization_level",
    "max_aux_streams",
    "max_num_tactics",
    "avg_timing_iterations",
    "l2_limit_for_tiling",
)
#: Options that are an attribute and take a member of an enumeration, which is the word in capitals.
_WORDS = {
    "tiling_optimization_level": "TilingOptimizationLevel",
    "hardware_compatibility": "HardwareCompatibilityLevel",
    "runtime_platform": "RuntimePlatform",
    "profiling_verbosity": "ProfilingVerbosity",
}
_ATTRIBUTE = {"hardware_compatibility": "hardware_compatibility_level"}
#: Options that are a flag.
_FLAGS = {
    "sparse_weights": "SPARSE_WEIGHTS",
    "strict_nans": "STRICT_NANS",
    "distributive_independence": "DISTRIBUTIVE_INDEPENDENCE",
    "strip_plan": "STRIP_PLAN",
    "weight_streaming": "WEIGHT_STREAMING",
    "version_compatible": "VERSION_COMPATIBLE",
}
_REFIT = {"on": "REFIT", "identical": "REFIT_IDENTICAL"}
_PINNING = {"record": ("EDITABLE_TIMING_CACHE",), "require": ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")}


def configure(trt: Any, builder: Any, config: Any, settings: TensorRtSettings) -> dict[str, str]:
    """Set everything that a build depends on, and return it as read back: option to value."""
    held = _Held()
    options = settings.options
    for option in (name for name in _NUMBERS if name in options):
        number = int(options[option])
        held.check(option, options[option], _set(config, option, number))
    for option, kind in _WORDS.items():
        word = options.get(option, "detailed" if option == "profiling_verbosity" else None)
        if word is not None:
            member = getattr(getattr(trt, kind), word.upper())
            held.check(option, word, _set(config, _ATTRIBUTE.get(option, option), member).name.lower())
    if "max_threads" in options:
        held.check("max_threads", options["max_threads"], _set(builder, "max_threads", int(options["max_threads"])))
    for flag, option, wanted in _flags(settings):
        held.check(option, str(int(wanted)), int(_flag(trt, config, flag, wanted)))
    _pools(trt, config, settings, held.check)
    _targets(trt, config, settings, held.check)
    _profile(builder, config, settings)
    return held.values


class _Held:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def check(self, option: str, wanted: str, held: object) -> None:
        if str(held) != wanted:
            raise EngineError(f"the builder does not take {option}={wanted}: it holds {held}; leave the option out")
        self.values[option] = wanted


def _set(thing: Any, attribute: str, value: Any) -> Any:
    setattr(thing, attribute, value)
    return getattr(thing, attribute)


def _flags(settings: TensorRtSettings) -> list[tuple[str, str, bool]]:
    options = settings.options
    found = [("TF32", "tf32", settings.tf32)]
    found += [(flag, option, options[option] == "1") for option, flag in _FLAGS.items() if option in options]
    refit = _REFIT.get(options.get("refit", "off"))
    if refit is not None:
        found.append((refit, "refit", True))
    found += [(flag, f"pin_tactics.{flag}", True) for flag in _PINNING.get(options.get("pin_tactics", "off"), ())]
    return found


def _flag(trt: Any, config: Any, name: str, wanted: bool) -> bool:
    flag = getattr(trt.BuilderFlag, name)
    (config.set_flag if wanted else config.clear_flag)(flag)
    return bool(config.get_flag(flag))


def _pools(trt: Any, config: Any, settings: TensorRtSettings, check: Callable[[str, str, object], None]) -> None:
    limits = {"WORKSPACE": settings.workspace}
    if "tactic_shared_memory" in settings.options:
        limits["TACTIC_SHARED_MEMORY"] = int(settings.options["tactic_shared_memory"])
    for name, limit in limits.items():
        if limit is None:
            continue
        pool = getattr(trt.MemoryPoolType, name)
        # The vendor's own limit is the memory of the GPU; a policy's may be more than that.
        limit = min(limit, int(config.get_memory_pool_limit(pool)))
        config.set_memory_pool_limit(pool, limit)
        check(name.lower(), str(limit), int(config.get_memory_pool_limit(pool)))


def _targets(trt: Any, config: Any, settings: TensorRtSettings, check: Callable[[str, str, object], None]) -> None:
    if not settings.targets:
        return
    config.num_compute_capabilities = len(settings.targets)
    for index, target in enumerate(settings.targets):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.replace('.', '')}"), index)
    held = [config.get_compute_capability(index).name[2:] for index in range(config.num_compute_capabilities)]
    wanted = " ".join(settings.targets)
    check("compute_capability", wanted, " ".join(f"{name[:-1]}.{name[-1]}" for name in held))


def _profile(builder: Any, config: Any, settings: TensorRtSettings) -> None:
    if not settings.profiles:
        return
    profile = builder.create_optimization_profile()
    for name, (least, best, largest) in settings.profiles.items():
        profile.set_shape(name, least, best, largest)
    if config.add_optimization_profile(profile) < 0:
        raise EngineError(f"the builder refused the optimisation profile {settings.profiles}; check execution.shapes")
