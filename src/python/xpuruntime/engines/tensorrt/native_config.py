# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Native configuration of TensorRT: a command line of ``trtexec`` that builds the same engine.

Options are those that the help of trtexec 10 and 11 lists. The command is not run here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.native_export.native_config import (
    RECORD,
    KeyOutcome,
    KeyOutcomes,
    NativeConfig,
    NativeExporter,
    write_model,
)
from xpuruntime.engines.tensorrt.building import prepare
from xpuruntime.engines.tensorrt.options import TENSORRT, TensorRtSettings

if TYPE_CHECKING:
    from pathlib import Path


_SCRIPT, _ARGUMENTS = "build.sh", "arguments.json"
_KIB = 1024
#: Option of the policy to the one of trtexec, where the value is the same.
_SAME = {
    "builder_optimization_level": "--builderOptimizationLevel",
    "max_aux_streams": "--maxAuxStreams",
    "max_num_tactics": "--maxTactics",
    "avg_timing_iterations": "--avgTiming",
    "l2_limit_for_tiling": "--l2LimitForTiling",
    "profiling_verbosity": "--profilingVerbosity",
}
#: Option to the one of trtexec and its words.
_SPELT = {
    "tiling_optimization_level": (
        "--tilingOptimizationLevel",
        {"none": "0", "fast": "1", "moderate": "2", "full": "3"},
    ),
    "hardware_compatibility": (
        "--hardwareCompatibilityLevel",
        {"none": "none", "ampere_plus": "ampere+", "same_compute_capability": "sameComputeCapability"},
    ),
    "runtime_platform": ("--runtimePlatform", {"same_as_build": "SameAsBuild", "windows_amd64": "WindowsAMD64"}),
}
_SWITCHES = {
    "sparse_weights": "--sparsity=enable",
    "version_compatible": "--versionCompatible",
    "strip_plan": "--stripWeights",
    "weight_streaming": "--allowWeightStreaming",
}
#: What only the program that runs the engine can set.
_AT_RUN_TIME = ("contexts", "context_allocation", "weight_streaming_budget", "persistent_cache_limit")


class TrtexecExporter(NativeExporter):
    """Exports sessions of TensorRT."""

    targets: ClassVar[dict[str, str]] = {"trtexec": "a command line of trtexec that builds the engine"}

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the converted or quantized model, the command, and its arguments as JSON."""
        del target
        settings = self.settings_as(TensorRtSettings)
        write_model(prepare(self.job.request, settings, ConversionLog()), folder, also=(_SCRIPT, _ARGUMENTS, RECORD))
        arguments = self._arguments(settings)
        shown = " \\\n  ".join(shlex.quote(argument) for argument in ("trtexec", *arguments))
        text = f'#!/bin/sh\n# Written by xrt export from the lock {self.job.digest}\nset -e\ncd "$(dirname "$0")"\n'
        (folder / _SCRIPT).write_text(f"{text}exec {shown}\n", encoding="utf-8")
        (folder / _SCRIPT).chmod(0o755)
        (folder / _ARGUMENTS).write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
        return NativeConfig(
            outcomes=self._outcomes(settings),
            entry=_SCRIPT,
            command=f"./{_SCRIPT}",
            notes=(
                f"the version of TensorRT is that of trtexec; the lock has {self.job.version}",
                "tactics are timed anew, so another build may choose other kernels",
                "the command was written after the help of trtexec, and was not run",
            ),
        )

    def device_word(self) -> str:
        """Return the CUDA device."""
        return self.job.request.device

    def _arguments(self, settings: TensorRtSettings) -> list[str]:
        options = settings.options
        arguments = ["--onnx=model.onnx", "--saveEngine=model.plan", "--skipInference"]
        arguments.append(f"--device={self.job.request.device.partition(':')[2] or 0}")
        if self.job.version.partition(".")[0] == "10":  # from 11 on there is no other kind of network
            arguments.append("--stronglyTyped")
        if not settings.tf32:
            arguments.append("--noTF32")
        scratch = options.get("tactic_shared_memory", "0")
        if not (scratch.isascii() and scratch.isdecimal()):
            raise self.damaged(f"tactic_shared_memory {scratch!r}")
        pools = {"workspace": settings.workspace, "tacticSharedMem": options.get("tactic_shared_memory")}
        sizes = [f"{pool}:{_kib(int(size))}K" for pool, size in pools.items() if size is not None]
        arguments += [f"--memPoolSize={','.join(sizes)}"] if sizes else []
        for index, word in enumerate(("min", "opt", "max")):
            shapes = [
                f"{name}:{'x'.join(map(str, profile[index]))}" for name, profile in sorted(settings.profiles.items())
            ]
            arguments += [f"--{word}Shapes={','.join(shapes)}"] if shapes else []
        arguments += [f"{flag}={options[name]}" for name, flag in _SAME.items() if name in options]
        if "profiling_verbosity" not in options:
            arguments.append("--profilingVerbosity=detailed")
        arguments += [flag for name, flag in _SWITCHES.items() if options.get(name) == "1"]
        arguments += self._words(options)
        return arguments

    def _words(self, options: Mapping[str, str]) -> list[str]:
        arguments = []
        for name, (flag, words) in _SPELT.items():
            if name in options:
                if options[name] not in words:
                    raise self.damaged(f"{name} {options[name]!r}")
                arguments.append(f"{flag}={words[options[name]]}")
        if options.get("refit") == "on":
            arguments.append("--refit")
        cache = options.get("timing_cache", "off")
        if cache == "off":
            arguments.append("--noBuilderCache")
        elif cache != "default":
            arguments.append(f"--timingCacheFile={cache}")
        if options.get("pin_tactics") == "require":
            arguments.append("--errorOnTimingCacheMiss")
        return arguments

    def _outcomes(self, settings: TensorRtSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, "trtexec")
        outcomes.add("execution.precision", "kept", "types of the graph that is written, strongly typed, and --noTF32")
        outcomes.add("execution.tf32", "kept", "--noTF32, or TensorRT's default")
        outcomes.add("execution.shapes.", "kept", "fixed in the graph, or --minShapes, --optShapes, --maxShapes")
        outcomes.add("execution.allow_cpu_ops", "kept", "TensorRT has no layers on the CPU")
        outcomes.add("execution.layout", "kept", "TensorRT's own choice")
        outcomes.add_determinism("weakened", "tactics are timed anew in each build")
        outcomes.add("execution.cuda_graph", "lost", "the program that runs the engine captures, or not")
        outcomes.add(
            "execution.memory.pool", "kept" if settings.pool == "engine" else "lost", "TensorRT's own allocations"
        )
        outcomes.add("execution.memory.limit", "weakened", "--memPoolSize=workspace, of scratch memory alone")
        outcomes.add_kernels(settings.keep_fp32, "the graph, or TensorRT's own choice", "no such choice")
        names, options = TENSORRT.names, settings.options
        same = (*_SAME, *_SWITCHES, "tiling_optimization_level", "runtime_platform", "tactic_shared_memory")
        outcomes.add_options(names, same, "kept", "the option of trtexec")
        outcomes.add_options(names, ("hardware_compatibility",), "kept", "--hardwareCompatibilityLevel")
        if options.get("refit") != "identical":
            outcomes.add_options(names, ("refit",), "kept", "--refit")
        if options.get("timing_cache") not in (None, "default"):
            outcomes.add_options(names, ("timing_cache",), "kept", "--timingCacheFile")
        if options.get("pin_tactics") == "require":
            outcomes.add_options(names, ("pin_tactics",), "kept", "--errorOnTimingCacheMiss")
        outcomes.add_options(names, _AT_RUN_TIME, "lost", "it is of the program that runs the engine")
        outcomes.add_options(names, ("",), "lost", "trtexec has no such option")
        return outcomes.settle(device="--device; the engine runs on the kind of GPU that built it")


def _kib(size: int) -> int:
    return -(-size // _KIB)
