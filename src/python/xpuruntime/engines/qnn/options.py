# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options of the QNN provider, with the values each accepts.

The provider takes unknown names and nonsense such as ``htp_performance_mode=bogus`` with a warning in its log at most,
so xpuruntime checks them. Names and values are those of onnxruntime-qnn 2.7; each was handed to the HTP
simulator once.
"""

from __future__ import annotations

from xpuruntime.engines.control_builder import BOOL, Option

__all__ = ["GRAPH_OPTIONS", "NAMES", "OPTIONS", "PERFORMANCE", "TARGET_OPTIONS"]

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
