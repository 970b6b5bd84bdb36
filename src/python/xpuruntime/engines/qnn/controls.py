# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of QNN for the execution keys of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.control_builder import ControlBuilder, check_options, fp32_nodes, own_options, show
from xpuruntime.engines.qnn.options import GRAPH_OPTIONS, KEYS, NAMES, OPTIONS, TARGET_OPTIONS, QnnSettings, Target
from xpuruntime.engines.quantization.judge import quantizes
from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

_WHERE = "execution.provider_options.qnn"
#: The first chip that computes in bf16, as the provider itself says.
BF16_SOC = 88


def chip_options(request: Request) -> dict[str, object]:
    """Return what the policy says of the chip."""
    options = own_options(request.policy.execution.provider_options, NAMES)
    return {key: options[key] for key in KEYS if key in options}


def resolve_settings(request: Request, target: Target, *, simulated: bool) -> tuple[QnnSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for QNN on one chip. Pure."""
    policy = request.policy
    settings = QnnSettings(target=target, simulated=simulated, strict=policy.mode == "strict")
    builder = ControlBuilder(policy.stated())
    builder.common(request, "qnn", checked="every node's provider is read back after loading")
    settings = _given_options(request, settings, builder)
    settings = _placement(request, settings, builder)
    settings = _precision(request, settings, builder)
    settings = _rules(request, settings, builder)
    _execution(request, builder)
    _memory(request, builder)
    return settings, builder.finish("QNN")


def _given_options(request: Request, settings: QnnSettings, builder: ControlBuilder) -> QnnSettings:
    options = own_options(request.policy.execution.provider_options, NAMES)
    own = {name: value for name, value in options.items() if name not in KEYS}
    checked = check_options(own, {**OPTIONS, **GRAPH_OPTIONS}, _WHERE, also=TARGET_OPTIONS)
    bits = checked.pop("activation_bits", "8")
    settings = settings.replace(style="qnn" if bits == "8" else "qnn-u16", options=checked)
    if quantizes(request):
        builder.add(f"{_WHERE}.activation_bits", bits, "enforced", "the graph is quantized so")
    else:
        fix = "use precision int8 with a model in floats, or leave the option out"
        builder.add(f"{_WHERE}.activation_bits", "-", "unsupported", "nothing is quantized here", fix)
    vtcm_mb, room = settings.options.get("vtcm_mb"), settings.target.vtcm_mb
    if vtcm_mb is not None and room is not None and int(vtcm_mb) > room:
        msg = f"{_WHERE}.vtcm_mb: {settings.target} has {room} MiB, asked for {vtcm_mb}. Fix: state at most {room}"
        raise PolicyError(msg, engine="qnn")
    for key in KEYS:
        builder.add(
            f"{_WHERE}.{key}",
            f"soc_model={settings.target.soc_model}, htp_arch={settings.target.htp_arch}",
            "enforced",
            "handed to every graph of this session, and one process holds one chip only",
        )
    for name in checked:
        builder.add(
            f"{_WHERE}.{name}",
            f"{name}={settings.options[name]}",
            "advisory",
            "validated and handed over; QNN does not say what it made of it",
        )
    others = ControlBuilder({key: value for key, value in builder.stated.items() if not key.startswith(f"{_WHERE}.")})
    others.options(_WHERE, NAMES, "handed over")
    builder.controls.extend(others.controls)
    return settings


def _placement(request: Request, settings: QnnSettings, builder: ControlBuilder) -> QnnSettings:
    execution = request.policy.execution
    builder.add(
        "execution.allow_cpu_ops",
        show(execution.allow_cpu_ops),
        "enforced",
        "a node on the CPU provider whose operator is not listed is refused at load",
    )
    settings = settings.replace(allow_cpu_ops=tuple(execution.allow_cpu_ops))
    return settings.with_options({"offload_graph_io_quantization": "0"})


def _precision(request: Request, settings: QnnSettings, builder: ControlBuilder) -> QnnSettings:
    precision, target = request.policy.execution.precision, settings.target
    key = "execution.precision"
    in_fp16 = "0" if precision in ("fp32", "bf16") else "1"
    settings = settings.with_options({"enable_htp_fp16_precision": in_fp16})
    if precision == "fp16":
        settings = settings.replace(convert="fp16")
        if target.has_float:
            builder.add(key, "graph converted to fp16", "enforced", "the types in the graph change and are read back")
        else:
            builder.add(
                key,
                "graph converted to fp16",
                "unsupported",
                f"HTP v{target.htp_arch} has no floating point; the simulator computes it all the same",
                "use precision int8, or a chip of architecture 69 or later",
            )
    elif precision == "fp32":
        reason = "HTP has no fp32: tensors are fp32 and the arithmetic in them is fp16"
        if not target.has_float:
            reason = f"HTP v{target.htp_arch} has no floating point; the simulator computes it in fp32 all the same"
        fix = "use precision fp16, or an engine on the CPU"
        builder.add(key, "fp32 tensors, enable_htp_fp16_precision=0", "unsupported", reason, fix)
    elif precision == "bf16":
        settings = settings.with_options({"htp_bf16_enable": "1"})
        builder.add(key, "htp_bf16_enable=1", "enforced", "the types in the compiled graph are read back")
    elif precision == "int8":
        settings = settings.replace(quantize=quantizes(request))
        resolved = (
            "graph quantized from the calibration inputs" if settings.quantize else "the model's own quantization"
        )
        builder.add(key, resolved, "enforced", "the types in the compiled graph are read back")
    else:
        builder.add(key, "the model's own types", "enforced", "nothing is converted")
    if precision in ("fp32", "model") and target.has_float and _in_floats(request):
        settings = settings.replace(computes="fp16")
    tf32 = request.policy.execution.tf32
    builder.add("execution.tf32", "-", "enforced" if tf32 is False else "unsupported", "an NPU has no TF32")
    return settings


def _in_floats(request: Request) -> bool:
    """Whether the model computes in floats; of one that is compiled already, nothing is known."""
    return request.model.quantization.scheme == "none" and "com.microsoft:EPContext" not in request.model.ops


def _rules(request: Request, settings: QnnSettings, builder: ControlBuilder) -> QnnSettings:
    keep: list[str] = []
    for index, rule in enumerate(request.policy.kernels.rules):
        key, glob = f"kernels.rules[{index}]", fp32_nodes(rule)
        if glob is not None and (settings.convert or settings.quantize):
            keep.append(glob)
            builder.add(
                key,
                f"nodes {glob} keep fp32 tensors",
                "advisory",
                "their types are left alone, but HTP computes fp32 in fp16 inside",
                "run these nodes on the CPU, or leave the rule out",
            )
        else:
            builder.add(key, "-", "unsupported", "QNN chooses its kernels itself")
    return settings.replace(keep_fp32=tuple(keep))


def _execution(request: Request, builder: ControlBuilder) -> None:
    execution = request.policy.execution
    reason = "a session compiles its graph once and repeats it; QNN promises nothing about its bits"
    builder.determinism(request, "one compiled graph", "advisory", reason)
    builder.shapes(request, "QNN takes no ranges")
    layouts = {
        "nhwc": ("nhwc", "enforced", "QNN's spatial operators are defined in NHWC"),
        "nchw": ("-", "unsupported", "QNN's spatial operators are defined in NHWC"),
    }
    resolved, level, reason = layouts.get(execution.layout, ("-", "enforced", "left to the engine"))
    builder.add("execution.layout", resolved, level, reason)  # type: ignore[arg-type]
    if execution.cuda_graph == "off":
        builder.add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    else:
        builder.add("execution.cuda_graph", "-", "unsupported", "an NPU has no CUDA graphs")


def _memory(request: Request, builder: ControlBuilder) -> None:
    memory = request.policy.execution.memory
    if memory.pool == "engine":
        builder.add("execution.memory.pool", "QNN's own memory", "enforced", "nothing is replaced")
    else:
        builder.add("execution.memory.pool", "-", "unsupported", "QNN takes no outside allocator", "use pool: engine")
