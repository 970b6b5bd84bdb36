# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OnnxRuntimeEngine`: probe, judge, load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Compiled, Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.control_builder import Option, own_options
from xpuruntime.engines.onnxruntime.controls import resolve_settings
from xpuruntime.engines.onnxruntime.options import (
    CPU_OPTIONS,
    CUDA_OPTIONS,
    NAMES,
    OPERATOR_LIBRARIES,
    SESSION_OPTIONS,
    OnnxRuntimeSettings,
    uncompilable,
)
from xpuruntime.engines.onnxruntime.pass_through import PASS_THROUGH, refuse_pass_through, resolve_pass_through
from xpuruntime.engines.quantization.judge import refuse_int8
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.packages import install_command, installed

if TYPE_CHECKING:
    from xpuruntime.engines.native_export.native_config import NativeExporter

#: Wheels that all install the package `onnxruntime`.
WHEELS = ("onnxruntime-gpu", "onnxruntime", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-migraphx")

#: Operator domains the wheel has kernels for.
_DOMAINS = frozenset(
    {
        "",
        "ai.onnx",
        "ai.onnx.ml",
        "com.microsoft",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        "ai.onnx.preview.training",
    }
)
#: Types inside models that ONNX Runtime's Python interface has no arrays for.
_NO_ARRAYS = ("float8e", "float6e", "float4e", "int4", "uint4", "int2", "uint2", "complex")
_CUDA = "CUDAExecutionProvider"


class OnnxRuntimeEngine(PackagedEngine[OnnxRuntimeSettings]):
    """ONNX Runtime on ``cpu`` and ``cuda:N``, and by pass-through providers on ``rocm:N``, ``metal`` and ``dml:N``."""

    name: ClassVar[str] = NAMES[0]
    aliases: ClassVar[tuple[str, ...]] = NAMES[1:]
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu", "cuda", *PASS_THROUGH)
    title: ClassVar[str] = "ONNX Runtime"
    runs_on: ClassVar[str] = "cpu, cuda:N, rocm:N, metal and dml:N"
    absent: ClassVar[str] = "no onnxruntime wheel is installed"
    install: ClassVar[str | None] = "pip install onnxruntime-gpu"
    compiles: ClassVar[bool] = True
    library_files: ClassVar[tuple[str, ...]] = ("onnxruntime/capi/*.so*",)
    runtime_keys: ClassVar[tuple[str, ...]] = (
        "execution.threads",
        "execution.memory",
        "execution.cuda_graph",
        "execution.allow_cpu_ops",
    )

    def probe(self) -> EngineFacts:
        """Import the wheel and look which providers can be loaded here; finds libraries without loading them."""
        from xpuruntime.runtime.snapshot import has_cuda

        wheels = installed(*WHEELS)
        if not wheels:
            return self.not_installed()
        wheel, version = next(iter(wheels.items()))
        try:
            import onnxruntime as ort

            version = str(ort.__version__)
            available = tuple(ort.get_available_providers())
            built_for = str(getattr(ort, "cuda_version", "") or "")
        except Exception as error:  # an import of a vendor package can fail in any way
            return EngineFacts(
                name=self.name, version=version, reason=f"the wheel {wheel} does not import: {error}",
                fix=f"pip install --force-reinstall {wheel}",
            )  # fmt: skip
        broken, fix = {}, None
        if _CUDA in available and not has_cuda():
            broken[_CUDA] = "its libraries were not looked for: this machine has no CUDA device"
        elif _CUDA in available:
            missing = _missing_cuda_libraries(Path(ort.__file__).parent)
            if missing:
                broken[_CUDA], fix = f"{', '.join(missing)} not found", install_command("cuda")
        detail = {"wheel": " and ".join(f"{name} {v}" for name, v in wheels.items())}
        if built_for:
            detail["cuda"] = built_for
        return EngineFacts(
            name=self.name,
            version=version,
            loadable=True,
            providers=tuple(p for p in available if p not in broken and p != "TensorrtExecutionProvider"),
            broken=broken,
            fix=fix,
            detail=detail,
        )

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CUDA devices, then the CPU.

        A wheel with the CUDA provider on a machine without a device still offers ``cuda:0``, so that the plan says why
        it is not used. Devices of pass-through providers are used when a policy names them, and only then.
        """
        facts = machine.engines.get(self.name)
        if facts is None or _CUDA not in (*facts.providers, *facts.broken):
            return ("cpu",)
        return (*(f"cuda:{d.index}" for d in machine.cuda), "cpu") if machine.cuda else ("cuda:0", "cpu")

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the options of the provider and of the session."""
        kind = device.partition(":")[0]
        if kind == "cuda":
            return {
                **CUDA_OPTIONS,
                **{name: option for name, option in SESSION_OPTIONS.items() if name.startswith("ep.cuda.")},
            }
        if kind == "cpu":
            return {
                **CPU_OPTIONS,
                **{name: option for name, option in SESSION_OPTIONS.items() if not name.startswith("ep.")},
            }
        return {}

    def operator_schemas(self) -> Sequence[Any]:
        """Return those of ONNX and of ONNX Runtime; empty where it is not installed."""
        if util.find_spec("onnxruntime") is None:
            return ()
        from xpuruntime.engines.onnxruntime._private_api import operator_schemas

        return operator_schemas()

    def operator_options(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the libraries of custom operators."""
        libraries = own_options(options, NAMES).get(OPERATOR_LIBRARIES)
        return {} if libraries is None else {self.name: {OPERATOR_LIBRARIES: str(libraries)}}

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a missing provider, and what it does not compute; see `PackagedEngine.refuse`."""
        kind, facts = request.device.partition(":")[0], machine.engines[self.name]
        refusal = None
        if kind in PASS_THROUGH:
            refusal = refuse_pass_through(request, facts, machine)
        elif kind == "cuda":
            refusal = _refuse_cuda(facts, machine)
        return refusal or _refuse_model(request, kind)

    def resolve(self, request: Request, machine: Machine) -> Resolved[OnnxRuntimeSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        if request.device.partition(":")[0] in PASS_THROUGH:
            settings, controls = resolve_pass_through(request)
        else:
            capability = _capability(request.device, machine)
            settings, controls = resolve_settings(request, capability, features=machine.cpu.features)
        reason = f"ONNX Runtime {machine.engines[self.name].version}, {settings.provider}"
        if settings.provider == _CUDA and "use_tf32" not in settings.options:
            reason += "; fp32 matmul and conv may use TF32 there: state precision fp32 to forbid it"
        return Resolved(settings, controls, reason, uncompilable(settings))

    def load(self, request: Request, judgement: Judgement[OnnxRuntimeSettings], machine: Machine) -> LoadedModel:
        """Open the session; see `LoadedModel`."""
        from xpuruntime.engines.onnxruntime.loading import load_model

        del machine
        return load_model(request, judgement.settings)

    def compares_nodes(self, judgement: Judgement[OnnxRuntimeSettings]) -> bool:
        """Return true where the graph is not changed first, and no library adds schemas of its own."""
        settings = judgement.settings
        changed = settings.convert or settings.qdq or settings.rewrites or settings.tune
        return not changed and not settings.operator_libraries

    def exporter(self) -> type[NativeExporter]:
        """Return what writes scripts of ONNX Runtime and repositories of Triton."""
        from xpuruntime.engines.onnxruntime.native_config import OnnxRuntimeExporter

        return OnnxRuntimeExporter

    def target(self, request: Request, judgement: Judgement[OnnxRuntimeSettings], machine: Machine) -> dict[str, str]:
        """Return versions, provider and the instruction sets that the optimized graph is made for."""
        from xpuruntime.engines.onnxruntime.compiling import compiled_for

        return compiled_for(judgement.settings, machine, request.device)

    def compile(
        self, request: Request, judgement: Judgement[OnnxRuntimeSettings], machine: Machine, folder: Path
    ) -> Compiled:
        """Write the graph as the optimizers leave it; see `Engine.compile`."""
        from xpuruntime.engines.onnxruntime.compiling import compile_model

        del machine
        return compile_model(request, judgement.settings, folder)


def _capability(device: str, machine: Machine) -> tuple[int, int] | None:
    kind, _, index = device.partition(":")
    devices = [d for d in machine.cuda if kind == "cuda" and d.index == int(index or 0)]
    return devices[0].compute_capability if devices else None


def _refuse_cuda(facts: EngineFacts, machine: Machine) -> Refusal | None:
    if not machine.core_cuda:
        return Refusal(
            VerdictCode.LIBRARY_MISSING,
            "xpuruntime itself was built without CUDA, so it cannot order work on a stream",
            "put nvcc on PATH and reinstall xpuruntime",
        )
    if _CUDA in facts.broken:
        return Refusal(
            VerdictCode.LIBRARY_MISSING,
            f"the CUDA provider cannot be loaded: {facts.broken[_CUDA]}",
            install_command("cuda"),
        )
    if _CUDA not in facts.providers:
        wheel = facts.detail.get("wheel", "installed")
        return Refusal(
            VerdictCode.LIBRARY_MISSING,
            f"the {wheel} wheel has no CUDA provider",
            "pip uninstall -y onnxruntime && pip install --force-reinstall onnxruntime-gpu",
        )
    return None


def _refuse_model(request: Request, kind: str) -> Refusal | None:
    precision = request.policy.execution.precision
    if precision == "bf16" and kind == "cpu":
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED,
            "the CPU provider has no bfloat16 kernels",
            "use precision fp32, or device cuda:0",
        )
    refused = refuse_int8(request)
    if refused is not None:
        return refused
    if precision == "tf32" and kind == "cpu":
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, "the CPU has no TF32", "use precision fp32")
    for role, tensors in (("input", request.model.inputs), ("output", request.model.outputs)):
        for tensor in tensors:
            if tensor.dtype.startswith(_NO_ARRAYS):
                return Refusal(
                    VerdictCode.OP_UNSUPPORTED,
                    f"{role} {tensor.name!r} is of type {tensor.dtype}, and ONNX Runtime takes and gives no arrays of "
                    "it in Python",
                    f"put a Cast at this {role} into the model, for example to float32",
                )
    if request.model.unknown_ops:
        listed = "; ".join(f"{name} ({why})" for name, why in request.model.unknown_ops.items())
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"unknown operator{'s' if len(request.model.unknown_ops) > 1 else ''}: {listed}",
            "correct the name or raise the opset; ONNX Runtime's own operators have the domain 'com.microsoft'",
        )
    foreign = {d: ops for d, ops in request.model.custom_domains.items() if d not in _DOMAINS}
    if foreign and not own_options(request.policy.execution.provider_options, NAMES).get(OPERATOR_LIBRARIES):
        named = "; ".join(f"{domain}: {', '.join(ops)}" for domain, ops in foreign.items())
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"ONNX Runtime has no kernels for the custom operators {named}",
            f"state execution.provider_options.onnxruntime.{OPERATOR_LIBRARIES} with the library that has them, as "
            "onnxruntime-extensions, or export the model without them",
        )
    return None


def _missing_cuda_libraries(package: Path) -> list[str]:
    from xpuruntime.runtime.libraries.loading import LibraryIndex, libraries_needed_by

    provider = package / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():
        return []
    linked, later = libraries_needed_by(provider)
    index = LibraryIndex()
    return [soname for soname in (*linked, *later) if not index.find_soname(soname)]
