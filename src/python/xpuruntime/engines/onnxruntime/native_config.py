# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Native configuration of ONNX Runtime: a Python script, and a model repository of Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.native_export.native_config import (
    RECORD,
    REQUIREMENTS,
    SCRIPT,
    KeyOutcome,
    KeyOutcomes,
    NativeConfig,
    NativeExporter,
    OutcomeWord,
    python_literal,
    script_main,
    write_model,
)
from xpuruntime.engines.native_export.triton_config import TRITON_COMMAND, ModelConfig, tensor_configs
from xpuruntime.engines.onnxruntime.loading import model_source, source_graph_of
from xpuruntime.engines.onnxruntime.opening import LEVELS, NO_CPU
from xpuruntime.engines.onnxruntime.options import INTER_THREADS, NAMES, OPERATOR_LIBRARIES, OnnxRuntimeSettings
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.model_source import ModelSource

_TITLE = "ONNX Runtime"
_CUDA = "CUDAExecutionProvider"
#: Options that choose kernels.
_KERNEL_OPTIONS = ("sdpa_kernel", "cudnn_conv_algo_search")
#: Graph levels that Triton's backend has; without one it takes all.
_TRITON_LEVELS = {"disable": 2, "basic": -1, "extended": 1}
#: The one session entry that Triton's backend passes on.
_TRITON_ENTRIES = ("session.use_device_allocator_for_initializers",)


class OnnxRuntimeExporter(NativeExporter):
    """Exports sessions of ONNX Runtime on the CPU and on CUDA."""

    targets: ClassVar[dict[str, str]] = {
        "ort-python": "a Python script that opens the session of ONNX Runtime",
        "triton": "a model repository for Triton's onnxruntime backend",
    }
    proved: ClassVar[tuple[str, ...]] = ("ort-python",)
    worker: ClassVar[Path] = Path(__file__).with_name("native_worker.py")
    _source: ModelSource | None = None

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the script or the repository, with the model as the session gets it."""
        settings = self.settings_as(OnnxRuntimeSettings)
        if settings.provider not in ("CPUExecutionProvider", _CUDA):
            raise UnsupportedOperationError(
                f"sessions of {settings.provider} are not exported. Fix: lock the model on cpu or cuda:0",
                engine="onnxruntime",
            )
        self._source = model_source(self.job.request, settings, ConversionLog())
        return self._script(settings, folder) if target == "ort-python" else self._repository(settings, folder)

    def device_word(self) -> str:
        """Return the execution provider."""
        return self.settings_as(OnnxRuntimeSettings).provider

    def observed(self, feeds: Mapping[str, Any], value: dict[str, Any]) -> Observed:
        """Join what ran to the source nodes; see `NativeExporter.observed`."""
        from xpuruntime.engines.onnxruntime.observing.instrumented_run import observe
        from xpuruntime.engines.quantization import in_source_terms

        settings, request, source = self.settings_as(OnnxRuntimeSettings), self.job.request, self._source
        assert source is not None

        def make(prefix: str | None, optimized: str | None) -> _Recorded:
            del prefix
            return _Recorded(value, optimized)

        seen = observe(
            make,
            feeds,
            1,
            source_graph_of(request, source),
            device=request.device,
            precision=settings.convert or request.policy.execution.precision,
            allow_cpu_ops=settings.allow_cpu_ops,
            run=lambda *_: None,
        )
        if source.quantized is not None:
            units = in_source_terms(seen.units, source.quantized, request.model)
            seen = msgspec.structs.replace(seen, units=units)
        return seen

    def _script(self, settings: OnnxRuntimeSettings, folder: Path) -> NativeConfig:
        assert self._source is not None
        write_model(self._source, folder, also=(SCRIPT, REQUIREMENTS, RECORD))
        entries = dict(settings.session)
        if settings.provider == _CUDA and not settings.allow_cpu_ops:
            entries[NO_CPU] = "1"
        text = script_text(
            *self.bits(),
            name=self.job.name,
            digest=self.job.digest,
            version=self.job.version,
            provider=settings.provider,
            options=python_literal(_plain_options(settings)),
            entries=python_literal(entries),
            level=LEVELS[settings.level],
            threads=settings.threads or 0,
            inter=settings.inter_threads,
            deterministic=settings.deterministic,
            preload="    ort.preload_dlls()\n" if settings.provider == _CUDA else "",
        )
        return self.write_script(folder, text, self._script_outcomes(settings), _rewritten(settings))

    def _script_outcomes(self, settings: OnnxRuntimeSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, _TITLE)
        cuda = settings.provider == _CUDA
        self._of_the_graph(outcomes, settings)
        outcomes.add("execution.threads", "kept", "intra_op_num_threads")
        outcomes.add("execution.tf32", "kept", "provider option use_tf32")
        outcomes.add("execution.layout", "kept", "provider option prefer_nhwc, or ONNX Runtime's own layout")
        outcomes.add_determinism("kept", "use_deterministic_compute, and the provider options that belong to it")
        if not cuda:
            outcomes.add("execution.allow_cpu_ops", "kept", "every node runs on the CPU")
        outcomes.add(
            "execution.allow_cpu_ops", "weakened", "any node may run on the CPU provider, not only those named"
        )
        outcomes.add(
            "execution.cuda_graph",
            "weakened",
            "enable_cuda_graph is set, and a graph is captured only where runs bind fixed addresses; nothing refuses "
            "other runs",
        )
        if settings.pool == "engine":
            outcomes.add("execution.memory.", "kept", "ONNX Runtime's own arena, with gpu_mem_limit")
        outcomes.add("execution.memory.", "lost", "the pool is xpuruntime's")
        same = (*settings.options, *settings.session, "graph_optimization_level", INTER_THREADS)
        outcomes.add_options(NAMES, same, "kept", "the same option")
        outcomes.add_options(NAMES, (OPERATOR_LIBRARIES,), "lost", "the script registers none")
        return outcomes.settle(
            device=f"{settings.provider} with its device_id, and the script refuses a session without it"
        )

    def _of_the_graph(self, outcomes: KeyOutcomes, settings: OnnxRuntimeSettings) -> None:
        outcomes.add(
            "execution.precision", "kept", "types of the graph that is written; its accuracy was probed when locked"
        )
        for name, sizes in self.job.request.policy.execution.shapes.items():
            fixed = not any(isinstance(size, str) for size in sizes)
            reason = (
                "the sizes are fixed in the graph" if fixed else "ONNX Runtime takes any size, also out of the range"
            )
            outcomes.add(f"execution.shapes.{name}", "kept" if fixed else "lost", reason)
        outcomes.add_kernels(
            settings.keep_fp32,
            "an option, the graph, or ONNX Runtime's own choice",
            "xpuruntime's kernels are missing",
            options=_KERNEL_OPTIONS,
        )

    def _repository(self, settings: OnnxRuntimeSettings, folder: Path) -> NativeConfig:
        assert self._source is not None
        model = folder / self.job.name
        write_model(self._source, model / "1")
        info = self._source.info or self.job.request.model
        cuda = settings.provider == _CUDA
        config = ModelConfig(
            name=self.job.name,
            backend="onnxruntime",
            inputs=tensor_configs(info.inputs, self.job.name, backend="onnxruntime"),
            outputs=tensor_configs(info.outputs, self.job.name, backend="onnxruntime"),
            gpus=(int(self.job.request.device.partition(":")[2] or 0),) if cuda else (),
            graph_level=_TRITON_LEVELS.get(settings.level),
            accelerator=("cuda", _cuda_parameters(settings)) if cuda else None,
            parameters=_triton_parameters(settings),
        )
        config.write(folder, self.job.digest)
        return NativeConfig(
            outcomes=self._triton_outcomes(settings),
            entry=config.entry,
            command=TRITON_COMMAND,
            notes=(
                *_rewritten(settings),
                *(f"the backend does not pass {entry} on" for entry in _not_passed_on(settings)),
                f"the version of ONNX Runtime is that of the server; the lock has {self.job.version}",
                "without --disable-auto-complete-config the server may switch its dynamic batcher on",
            ),
        )

    def _triton_outcomes(self, settings: OnnxRuntimeSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, "Triton's onnxruntime backend")
        cuda = settings.provider == _CUDA
        if left := _not_passed_on(settings):
            outcomes.add("execution.precision", "weakened", f"the backend passes {', '.join(left)} not on")
        self._of_the_graph(outcomes, settings)
        outcomes.add(
            "execution.threads", "kept", "intra_op_thread_count; a global thread pool of the server overrides it"
        )
        if cuda:
            outcomes.add("execution.tf32", "kept", "use_tf32 of the cuda accelerator")
            outcomes.add("execution.layout", "kept", "prefer_nhwc of the cuda accelerator")
            if settings.pool == "engine":
                outcomes.add("execution.memory.limit", "kept", "gpu_mem_limit")
        else:
            outcomes.add("execution.tf32", "kept", "the CPU has no TF32")
            outcomes.add("execution.layout", "kept", "ONNX Runtime's own layout")
            outcomes.add("execution.allow_cpu_ops", "kept", "every node runs on the CPU")
        outcomes.add(
            "execution.allow_cpu_ops", "weakened", "any node may run on the CPU provider, not only those named"
        )
        outcomes.add(
            "execution.memory.pool", "kept" if settings.pool == "engine" else "lost", "ONNX Runtime's own arena"
        )
        outcomes.add("execution.determinism", "lost", "the backend does not set use_deterministic_compute")
        outcomes.add(
            "execution.cuda_graph", "weakened", "enable_cuda_graph is set; whether runs capture is the backend's"
        )
        own = "of the cuda accelerator" if cuda else "the backend's own"
        outcomes.add_options(NAMES, settings.options, "kept", own)
        outcomes.add_options(NAMES, _TRITON_ENTRIES, "kept", "the same parameter")
        outcomes.add_options(NAMES, (INTER_THREADS,), "kept", "inter_op_thread_count, execution_mode")
        level: OutcomeWord = "kept" if settings.level in (*_TRITON_LEVELS, "all") else "lost"
        outcomes.add_options(NAMES, ("graph_optimization_level",), level, "optimization.graph.level")
        outcomes.add_options(NAMES, ("",), "lost", "the backend passes no such session entry on")
        return outcomes.settle(device="instance_group, by kind and GPU")


class _Recorded:
    """A session that ran elsewhere, as `observe` looks at it."""

    def __init__(self, value: dict[str, Any], optimized: str | None) -> None:
        self._value = value
        if optimized is not None and value["optimized"] is not None:
            Path(optimized).write_bytes(Path(value["optimized"]).read_bytes())

    def end_profiling(self) -> str:
        return str(self._value["profile"])

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [_Part(provider, nodes) for provider, nodes in self._value["assignment"]]


class _Part:
    def __init__(self, provider: str, nodes: list[list[str]]) -> None:
        self.ep_name, self._nodes = provider, nodes

    def get_nodes(self) -> list[Any]:
        return [_Node(*node) for node in self._nodes]


class _Node(msgspec.Struct):
    name: str
    op_type: str
    domain: str


def _plain_options(settings: OnnxRuntimeSettings) -> dict[str, str]:
    """Return the provider options without addresses, which are of the process that made them."""
    return {name: value for name, value in settings.options.items() if "user_compute" not in name}


def _cuda_parameters(settings: OnnxRuntimeSettings) -> dict[str, str]:
    return {name: value for name, value in _plain_options(settings).items() if name != "device_id"}


def _triton_parameters(settings: OnnxRuntimeSettings) -> dict[str, str]:
    parameters = {name: settings.session[name] for name in _TRITON_ENTRIES if name in settings.session}
    if settings.threads is not None:
        parameters["intra_op_thread_count"] = str(settings.threads)
    if settings.inter_threads is not None:
        parameters |= {"inter_op_thread_count": str(settings.inter_threads), "execution_mode": "1"}
    return parameters


def _not_passed_on(settings: OnnxRuntimeSettings) -> list[str]:
    return sorted(set(settings.session) - set(_TRITON_ENTRIES))


def _rewritten(settings: OnnxRuntimeSettings) -> tuple[str, ...]:
    count = len(settings.rewrites)
    if not count:
        return ()
    nodes = f"{count} nodes run" if count > 1 else "1 node runs"
    return (f"{nodes} on kernels of xpuruntime in a session, and on ONNX Runtime's own here",)


def script_text(taken: Sequence[str], output_names: Sequence[str], **facts: Any) -> str:
    """Return the script."""
    facts["main"] = script_main("open_session")
    inter = facts.pop("inter")
    facts["inter"] = "" if inter is None else _PARALLEL.format(inter)
    if not taken and not output_names:
        return _TEMPLATE.format(imports="", names="", run=_RUN, **facts)
    names = f"BFLOAT16_INPUTS = {list(taken)!r}  # as bits, in arrays of uint16\n"
    names += f"BFLOAT16_OUTPUTS = {list(output_names)!r}\nBFLOAT16 = 16  # of the element types of ONNX\n"
    return _TEMPLATE.format(imports="import ctypes\nimport math\n", names=names, run=_RUN_BITS, **facts)


_PARALLEL = """\
    options.inter_op_num_threads = {}
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
"""
_TEMPLATE = '''\
#!/usr/bin/env python3
"""The model {name} on ONNX Runtime {version}, as the lock {digest} has it.

`open_session` gives the session, `run` runs it. As a program: session.py INPUTS.npz OUTPUTS.npz
"""

{imports}import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

MODEL = Path(__file__).resolve().parent / "model.onnx"
VERSION = {version!r}
PROVIDER = {provider!r}
PROVIDER_OPTIONS = {options}
SESSION_ENTRIES = {entries}
{names}

def session_options():
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.{level}
    options.intra_op_num_threads = {threads}  # 0: ONNX Runtime's choice
{inter}    options.use_deterministic_compute = {deterministic}
    for key, value in SESSION_ENTRIES.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(options=None):
    if ort.__version__ != VERSION:
        raise RuntimeError(f"locked with ONNX Runtime {{VERSION}}, and {{ort.__version__}} is installed")
{preload}    session = ort.InferenceSession(
        str(MODEL),
        session_options() if options is None else options,
        providers=[(PROVIDER, PROVIDER_OPTIONS)],
        enable_fallback=0,
        read_config_from_model=0,
    )
    if session.get_providers()[0] != PROVIDER:
        raise RuntimeError(f"{{PROVIDER}} was asked for, and the session has {{session.get_providers()}}")
    return session


{run}


{main}'''

_RUN = """\
def run(session, inputs):
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs)))"""

_RUN_BITS = """\
def value_of(name, array):
    if name not in BFLOAT16_INPUTS:
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    bits = np.ascontiguousarray(array)
    if bits.dtype.itemsize != 2 or bits.dtype.kind not in "uV":
        raise TypeError(f"{name} is bfloat16, and taken as its bits in an array of uint16, not as {bits.dtype}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits.view(np.uint16), BFLOAT16)


def array_of(name, value):
    if name not in BFLOAT16_OUTPUTS:
        return value.numpy()
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(shape))
    return np.frombuffer(bits, np.uint16).reshape(shape)


def run(session, inputs):
    names = [output.name for output in session.get_outputs()]
    values = session.run_with_ort_values(names, {name: value_of(name, array) for name, array in inputs.items()})
    return {name: array_of(name, value) for name, value in zip(names, values)}"""
