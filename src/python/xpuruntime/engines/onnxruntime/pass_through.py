# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pass-through providers of ONNX Runtime: MIGraphX for ``rocm:N``, Core ML for ``metal``, DirectML for ``dml:N``.

Their options were read in ONNX Runtime's sources and documentation, and nothing of them was executed by us. So what a
provider is given is at most advisory; where nodes run is checked after loading as for CUDA, and enforced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.base import Refusal, Request
from xpuruntime.engines.control_builder import ControlBuilder, Option, check_options, own_options, show
from xpuruntime.engines.onnxruntime.options import (
    COREML_OPTIONS,
    DML_OPTIONS,
    DML_SESSION_OPTIONS,
    MIGRAPHX_OPTIONS,
    NAMES,
    SESSION_OPTIONS,
    OnnxRuntimeSettings,
)
from xpuruntime.errors import EngineError
from xpuruntime.evidence.records import Control, VerdictCode
from xpuruntime.files.paths import kind_of, not_private, with_home

if TYPE_CHECKING:
    from xpuruntime.runtime.machine import EngineFacts, Machine


class PassThrough(msgspec.Struct, frozen=True, kw_only=True):
    """One pass-through provider."""

    provider: str
    vendor: str
    wheel: str
    systems: tuple[str, ...]
    options: dict[str, Option]
    session: dict[str, Option] = {}
    indexed: bool = True
    preset: dict[str, str] = {}
    limit: str | None = None
    inside: str | None = None


#: Kind of device to what drives it.
PASS_THROUGH: dict[str, PassThrough] = {
    "rocm": PassThrough(
        provider="MIGraphXExecutionProvider",
        vendor="MIGraphX",
        wheel="onnxruntime-migraphx",
        systems=("Linux",),
        options=MIGRAPHX_OPTIONS,
        limit="migraphx_mem_limit",
    ),
    "metal": PassThrough(
        provider="CoreMLExecutionProvider",
        vendor="Core ML",
        wheel="onnxruntime",
        systems=("Darwin",),
        options=COREML_OPTIONS,
        indexed=False,
        preset={"MLComputeUnits": "CPUAndGPU"},
        inside="Core ML itself may compute parts of its partition on the CPU, and does not say which",
    ),
    "dml": PassThrough(
        provider="DmlExecutionProvider",
        vendor="DirectML",
        wheel="onnxruntime-directml",
        systems=("Windows",),
        options=DML_OPTIONS,
        session=DML_SESSION_OPTIONS,
    ),
}

#: Options that name a folder of compiled models, which the provider trusts.
_CACHES = ("migraphx_model_cache_dir", "ModelCacheDirectory")
_PRECISIONS = ("model", "fp32", "fp16")
_NEVER_RUN = "passed through to the provider, which was never tested"


def refuse_pass_through(request: Request, facts: EngineFacts, machine: Machine) -> Refusal | None:
    """Return code, reason and fix where the device of `request` cannot be used, or ``None``. Pure."""
    device = request.device
    kind = device.partition(":")[0]
    known = PASS_THROUGH[kind]
    if known.provider not in facts.providers:
        wheel = facts.detail.get("wheel", "installed")
        reason = f"device {device} needs {known.provider}, which the {wheel} wheel does not have"
        if machine.system not in known.systems:
            where = "macOS" if known.systems == ("Darwin",) else " and ".join(known.systems)
            reason += f"; {known.vendor} is there on {where} only, and this machine runs {machine.system}"
            return Refusal(VerdictCode.DEVICE_UNSUPPORTED, reason, f"use device cpu, or {known.wheel} on {where}")
        installed = " ".join(name.split(" ")[0] for name in wheel.split(" and "))
        return Refusal(
            VerdictCode.LIBRARY_MISSING,
            reason,
            f"pip uninstall -y {installed} && pip install --force-reinstall {known.wheel}",
        )
    if request.purpose == "compile" or request.policy.execution.artifacts.cache != "off":
        reason = f"no compiled model is made for {known.vendor}"
        return Refusal(
            VerdictCode.COMPILE_UNSUPPORTED, reason, "use device cpu or cuda:0, or leave execution.artifacts.cache out"
        )
    precision = request.policy.execution.precision
    if precision not in _PRECISIONS and not (precision == "int8" and request.model.quantization.scheme != "none"):
        reason = f"no model is made {precision} for {known.vendor}"
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED,
            reason,
            f"use precision {', '.join(_PRECISIONS[:-1])} or {_PRECISIONS[-1]}",
        )
    return None


def resolve_pass_through(request: Request) -> tuple[OnnxRuntimeSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for its provider. Pure."""
    kind, _, index = request.device.partition(":")
    known, execution = PASS_THROUGH[kind], request.policy.execution
    settings = OnnxRuntimeSettings(provider=known.provider, strict=request.policy.mode == "strict")
    builder = ControlBuilder(request.policy.stated())
    if known.inside is not None:
        builder.add("execution.device", request.device, "advisory", known.inside)
    builder.common(request, NAMES[0], checked="checked against the node assignment after loading")
    settings = _options(request, known, settings, builder)
    indexed = {"device_id": index or "0"} if known.indexed else {}
    settings = settings.replace(options={**known.preset, **settings.options, **indexed})
    builder.add(
        "execution.allow_cpu_ops",
        show(execution.allow_cpu_ops),
        "enforced",
        "any other node on the CPU provider is refused at load",
    )
    settings = _precision(request, known, settings, builder)
    builder.add("execution.threads", f"intra_op_num_threads={execution.threads}", "enforced", "session option")
    reason = f"deterministic kernels are asked for; {known.vendor} has no setting for it"
    builder.determinism(request, "use_deterministic_compute", "advisory", reason)
    builder.shapes(request, f"nothing is built for a range: {known.vendor} is given the open size")
    if known.limit is not None and execution.memory.limit is not None:
        settings = settings.with_options({known.limit: str(execution.memory.limit)})
        builder.add("execution.memory.limit", f"{known.limit}={execution.memory.limit}", "advisory", _NEVER_RUN)
    settings = settings.replace(
        allow_cpu_ops=tuple(execution.allow_cpu_ops),
        threads=execution.threads,
        deterministic=execution.deterministic,
    )
    return settings, builder.finish(f"ONNX Runtime's {known.vendor} provider")


def refuse_shared_caches(settings: OnnxRuntimeSettings) -> None:
    """Refuse the provider's own folders of compiled models where another user may have put one there."""
    for name in _CACHES:
        folder = settings.options.get(name)
        if not folder:
            continue
        path = with_home(folder, name)
        paths = [path, *path.rglob("*")] if kind_of(path) == "folder" else [path]
        reason = next(filter(None, map(not_private, paths)), None)
        if reason is not None:
            raise EngineError(f"{name} is not used, since another user may have written there: {reason}")


def _options(
    request: Request, known: PassThrough, settings: OnnxRuntimeSettings, builder: ControlBuilder
) -> OnnxRuntimeSettings:
    own = own_options(request.policy.execution.provider_options, NAMES)
    entries = {**SESSION_OPTIONS, **known.session}
    session = {name: own.pop(name) for name in list(own) if name in entries or "." in name}
    where = f"execution.provider_options.{NAMES[0]}"
    options = check_options(own, known.options, where, also=entries)
    checked = check_options(session, entries, where, also=known.options)
    level = checked.pop("graph_optimization_level", "all")
    builder.options(where, NAMES, "validated and handed to ONNX Runtime; provider options are read back after loading")
    return settings.replace(options=options, session=checked, level=level)


def _precision(
    request: Request, known: PassThrough, settings: OnnxRuntimeSettings, builder: ControlBuilder
) -> OnnxRuntimeSettings:
    precision = request.policy.execution.precision
    if precision == "fp16":
        settings = settings.replace(convert="fp16")
        reason = f"the types in the graph change and a probe input is compared with fp32; {_NEVER_RUN}"
        builder.add("execution.precision", "graph converted to fp16", "advisory", reason)
    elif precision == "fp32":
        if known.vendor == "Core ML":  # its other format computes in fp16 whatever the types say
            settings = settings.replace(options={"ModelFormat": "MLProgram", **settings.options})
        reason = f"nothing is converted, and {known.vendor} does not say what it computes in"
        builder.add("execution.precision", "the model's own types", "advisory", reason)
    else:
        builder.add("execution.precision", "the model's own types", "enforced", "nothing is converted")
    return settings
