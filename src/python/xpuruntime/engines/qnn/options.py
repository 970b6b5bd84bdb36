# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options, targets and settings of the QNN engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.control_builder import BOOL, Option
from xpuruntime.errors import PolicyError
from xpuruntime.policies.document import nearest, question

#: What a policy may call this engine.
NAMES = ("qnn",)
#: Words of the performance modes.
PERFORMANCE = (
    "default",
    "burst",
    "balanced",
    "high_performance",
    "sustained_high_performance",
    "low_balanced",
    "high_power_saver",
    "low_power_saver",
    "power_saver",
    "extreme_power_saver",
)
_WATCHING = "explain()"
_PLACEMENT = "execution.allow_cpu_ops"

#: Options that name the chip; read by `targets.resolve_target`.
TARGET_OPTIONS: dict[str, Option] = {
    "soc": Option(meaning="the chip by its part number, such as sm8650: one of the names below", text=True),
    "soc_model": Option(meaning="the chip by Qualcomm's number, in place of soc", low=1, high=9999),
    "htp_arch": Option(meaning="its architecture", values=("68", "69", "73", "75", "79", "81")),
}

#: Options that are none of the provider: they say how the graph is prepared.
GRAPH_OPTIONS: dict[str, Option] = {
    "activation_bits": Option(
        meaning="bits of the values between nodes, where a model is quantized", values=("8", "16")
    ),
}

OPTIONS: dict[str, Option] = {
    "backend_type": Option(
        meaning="backend of QNN; the wheel for x86-64 has no QnnCpu, and only HTP is driven here", values=("htp",)
    ),
    "backend_path": Option(meaning="library of the backend", owned_by="backend_type"),
    "htp_performance_mode": Option(meaning="clocks and power", values=PERFORMANCE),
    "htp_graph_finalization_optimization_mode": Option(
        meaning="effort when the graph is compiled: 0 default, 3 longest and best", values=("0", "1", "2", "3")
    ),
    "vtcm_mb": Option(meaning="tightly coupled memory that the graph may use, in MiB", low=1, high=64),
    "rpc_control_latency": Option(meaning="latency of calls to the processor that is asked for, in us", high=10**6),
    "qnn_context_priority": Option(
        meaning="priority among processes on the NPU", values=("low", "normal", "normal_high", "high")
    ),
    "enable_htp_spill_fill_buffer": Option(meaning="share the buffer that intermediate results spill to", values=BOOL),
    "enable_vtcm_backup_buffer_sharing": Option(meaning="share the backup of VTCM between sessions", values=BOOL),
    "enable_htp_shared_memory_allocator": Option(
        meaning="memory shared with the NPU; needs libcdsprpc, which the simulator has not", values=BOOL
    ),
    "enable_block_quant_weight_optimization": Option(meaning="optimized path of block-quantized weights", values=BOOL),
    "extended_udma": Option(meaning="extended memory transfers; chips before v81 refuse the graph", values=BOOL),
    "num_graph_prepare_threads": Option(
        meaning="threads that compile; only Windows on ARM, from 5 partitions on", low=2, high=256
    ),
    "skip_qnn_version_check": Option(meaning="take QNN libraries of another version", values=BOOL),
    "device_id": Option(meaning="device index", owned_by="execution.device"),
    "enable_htp_fp16_precision": Option(meaning="fp16 arithmetic", values=BOOL, owned_by="execution.precision"),
    "htp_bf16_enable": Option(meaning="bf16 arithmetic", values=BOOL, owned_by="execution.precision"),
    "offload_graph_io_quantization": Option(meaning="Q and DQ on the CPU", values=BOOL, owned_by=_PLACEMENT),
    "profiling_level": Option(meaning="profile", owned_by=_WATCHING),
    "profiling_file_path": Option(meaning="profile", owned_by=_WATCHING),
    "enable_framework_op_trace": Option(meaning="trace", owned_by=_WATCHING),
    "framework_op_trace_dir": Option(meaning="trace", owned_by=_WATCHING),
    "dump_json_qnn_graph": Option(meaning="graph as compiled", owned_by=_WATCHING),
    "json_qnn_graph_dir": Option(meaning="graph as compiled", owned_by=_WATCHING),
    "dump_qnn_ep_input_graph": Option(meaning="graph as partitioned", owned_by=_WATCHING),
    "dump_qnn_ep_input_graph_dir": Option(meaning="graph as partitioned", owned_by=_WATCHING),
}


_WHERE = "execution.provider_options.qnn"
#: Options of the policy that name the chip.
KEYS = ("soc", "soc_model", "htp_arch")
#: Architectures of the Hexagon Tensor Processor.
_ARCHITECTURES = (68, 69, 73, 75, 79, 81)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One chip."""

    name: str | None
    soc_model: int
    htp_arch: int
    vtcm_mb: int | None = None
    product: str = ""

    def __str__(self) -> str:
        """Return ``"SM8650 (soc_model 57, HTP v75)"``."""
        numbers = f"soc_model {self.soc_model}, HTP v{self.htp_arch}"
        return f"{self.name.upper()} ({numbers})" if self.name else numbers

    @property
    def has_float(self) -> bool:
        """Whether its tensor processor computes in floating point; v68 does not."""
        return self.htp_arch >= 69


def _soc(name: str, soc_model: int, htp_arch: int, vtcm_mb: int | None, product: str = "") -> tuple[str, Target]:
    return name, Target(name=name, soc_model=soc_model, htp_arch=htp_arch, vtcm_mb=vtcm_mb, product=product)


#: Chips that a policy may name.
SOCS: dict[str, Target] = dict(
    (
        _soc("sm8350", 30, 68, 4, "Snapdragon 888"),
        _soc("sm8450", 36, 69, 8, "Snapdragon 8 Gen 1"),
        _soc("sm8475", 42, 69, 8, "Snapdragon 8+ Gen 1"),
        _soc("sm8550", 43, 73, 8, "Snapdragon 8 Gen 2"),
        _soc("sm8650", 57, 75, 8, "Snapdragon 8 Gen 3"),
        _soc("sm8750", 69, 79, 8, "Snapdragon 8 Elite"),
        _soc("sm8850", 87, 81, 8, "Snapdragon 8 Elite Gen 5"),
        _soc("sc8380xp", 60, 73, 8, "Snapdragon X Elite"),
        _soc("sc8480xp", 88, 81, None, "Snapdragon X2 Elite"),
        _soc("sa8255", 52, 73, 8),
        _soc("sa8295", 39, 68, 8),
        _soc("qcs9100", 77, 73, 8),
        _soc("ssg2115p", 46, 73, 2),
        _soc("ssg2125p", 58, 73, 2),
        _soc("sxr1230p", 45, 73, 2),
        _soc("sxr2230p", 53, 69, 8),
        _soc("sxr2330p", 75, 79, 8),
        _soc("sar2230p", 95, 81, 4),
        _soc("sw6100", 96, 81, 4),
    )
)
_BY_MODEL = {target.soc_model: target for target in SOCS.values()}


def state_one() -> str:
    """Return the sentence that says how a policy names its chip."""
    return f"state {_WHERE}: {{soc: sm8650}}, or soc_model and htp_arch in numbers; known names: {', '.join(SOCS)}"


def resolve_target(options: Mapping[str, object]) -> Target | None:
    """Return the chip that a policy's options name, or ``None`` when they name none."""
    stated = {key: options[key] for key in KEYS if key in options}
    if not stated:
        return None
    if "soc" in stated:
        return _by_name(stated)
    if "soc_model" not in stated:
        msg = f"{_WHERE}.htp_arch: several chips have this architecture; {state_one()}"
        raise PolicyError(msg, engine="qnn")
    model = _number("soc_model", stated["soc_model"], 1, 9999)
    known = _BY_MODEL.get(model)
    if "htp_arch" not in stated:
        if known is None:
            msg = (
                f"{_WHERE}.soc_model: the architecture of chip {model} is not known here. "
                "Fix: state htp_arch beside it, "
                f"one of {', '.join(map(str, _ARCHITECTURES))}"
            )
            raise PolicyError(msg, engine="qnn")
        return known
    arch = _architecture(stated["htp_arch"])
    if known is not None and known.htp_arch != arch:
        msg = (
            f"{_WHERE}.htp_arch: {arch} contradicts soc_model {model}, which is {known}; correct one, or drop htp_arch"
        )
        raise PolicyError(msg, engine="qnn")
    return known or Target(name=None, soc_model=model, htp_arch=arch)


def _by_name(stated: Mapping[str, object]) -> Target:
    word = str(stated["soc"])
    target = SOCS.get(word.lower())
    if target is None:
        near = nearest(word, SOCS)
        fix = f"{f'write {near}' if near else 'write one of these'}, or state another chip by soc_model and htp_arch"
        msg = f"{_WHERE}.soc: unknown chip {word!r}{question(near, '.')} Known: {', '.join(SOCS)}"
        raise PolicyError(msg, fix=fix, engine="qnn")
    for key, own in (("soc_model", target.soc_model), ("htp_arch", target.htp_arch)):
        if key in stated and str(stated[key]).lower().removeprefix("v") != str(own):
            msg = f"{_WHERE}.{key}: {stated[key]} contradicts soc {word}, which is {target}; drop one of them"
            raise PolicyError(msg, engine="qnn")
    return target


def _architecture(value: object) -> int:
    text = str(value).lower().removeprefix("v")
    if text not in map(str, _ARCHITECTURES):
        names = ", ".join(map(str, _ARCHITECTURES))
        msg = f"{_WHERE}.htp_arch: {str(value)!r} is none of the architectures {names}"
        raise PolicyError(msg, engine="qnn")
    return int(text)


def _number(key: str, value: object, low: int, high: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not low <= number <= high:
        msg = f"{_WHERE}.{key}: {str(value)!r} is no number from {low} to {high}"
        raise PolicyError(msg, engine="qnn")
    return number


class QnnSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to the provider."""

    target: Target
    options: Mapping[str, str] = {}
    convert: Literal["fp16"] | None = None
    quantize: bool = False
    style: str = "qnn"
    keep_fp32: tuple[str, ...] = ()
    allow_cpu_ops: tuple[str, ...] = ()
    computes: Literal["fp16"] | None = None
    simulated: bool = False
    strict: bool = False

    def with_options(self, options: Mapping[str, str]) -> QnnSettings:
        """Return the same settings with these provider options, which replace others of the same names."""
        return self.replace(options={**self.options, **options})

    @property
    def uncompilable(self) -> str | None:
        """Why a model under these settings is not compiled ahead of time."""
        if not self.allow_cpu_ops:
            return None
        # ONNX Runtime would optimize its own nodes again at every load, and the map that is kept would not be theirs.
        return "a model is compiled as a whole, and execution.allow_cpu_ops leaves parts of it to the CPU"

    def provider_options(self) -> dict[str, str]:
        """Return all options of the provider, the chip's among them."""
        chip = {"soc_model": str(self.target.soc_model), "htp_arch": str(self.target.htp_arch)}
        return {"backend_type": "htp", **self.options, **chip}
