# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Provider options of ONNX Runtime, with the values each accepts.

ONNX Runtime accepts unknown session keys and unknown CPU options without a word, so names and values are ours to check.
Read from the 1.31 wheel; the CUDA ones were tried on a device.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CPU_OPTIONS", "CUDA_OPTIONS", "NAMES", "SESSION_OPTIONS", "Option", "check_options", "own_options"]

#: What a policy may call this engine.
NAMES = ("onnxruntime", "ort", "onnxrt")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor option.

    Attributes
    ----------
    meaning : str
    values : tuple of str or None
        The words accepted, or ``None`` for an integer.
    low, high : int
        Range of an integer.
    owned_by : str or None
        The policy key that sets it. Such an option is refused in ``provider_options``: one fact has one place.
    """

    meaning: str
    values: tuple[str, ...] | None = None
    low: int = 0
    high: int = 2**63 - 1
    owned_by: str | None = None


_BOOL = ("0", "1")

CUDA_OPTIONS: dict[str, Option] = {
    "device_id": Option(meaning="device index", owned_by="execution.device"),
    "user_compute_stream": Option(meaning="stream address", owned_by="the session's own stream"),
    "has_user_compute_stream": Option(meaning="stream given", values=_BOOL, owned_by="the session's own stream"),
    "gpu_mem_limit": Option(meaning="arena limit in bytes", low=1, owned_by="execution.memory.limit"),
    "gpu_external_alloc": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "gpu_external_free": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "gpu_external_empty_cache": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "use_tf32": Option(meaning="TF32 in fp32 matmul and conv", values=_BOOL, owned_by="execution.tf32"),
    "prefer_nhwc": Option(meaning="NHWC convolutions", values=_BOOL, owned_by="execution.layout"),
    "enable_cuda_graph": Option(meaning="CUDA graph capture", values=_BOOL, owned_by="execution.cuda_graph"),
    "sdpa_kernel": Option(meaning="bit set of attention kernels", high=1023, owned_by="kernels.attention"),
    "cudnn_conv_algo_search": Option(
        meaning="how cuDNN picks convolution algorithms",
        values=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        owned_by="kernels.conv",
    ),
    "arena_extend_strategy": Option(meaning="how the arena grows", values=("kNextPowerOfTwo", "kSameAsRequested")),
    "do_copy_in_default_stream": Option(meaning="copies on the compute stream", values=_BOOL),
    "cudnn_conv_use_max_workspace": Option(meaning="let cuDNN take as much workspace as it wants", values=_BOOL),
    "cudnn_conv1d_pad_to_nc1d": Option(meaning="pad 1-D convolutions to NC1D instead of NCD1", values=_BOOL),
    "enable_cudnn": Option(meaning="use cuDNN at all", values=_BOOL),
    "fuse_conv_bias": Option(meaning="fuse bias into convolutions (cuDNN frontend)", values=_BOOL),
    "enable_skip_layer_norm_strict_mode": Option(meaning="fp32 accumulation in SkipLayerNorm", values=_BOOL),
    "tunable_op_enable": Option(meaning="use tuned kernels", values=_BOOL),
    "tunable_op_tuning_enable": Option(meaning="tune while running", values=_BOOL),
    "tunable_op_max_tuning_duration_ms": Option(meaning="tuning time per op in ms", high=2**31 - 1),
    "use_ep_level_unified_stream": Option(meaning="one stream for all threads", values=_BOOL),
    "external_data_loader_reading_threads": Option(meaning="threads reading external data", low=1, high=1024),
}

CPU_OPTIONS: dict[str, Option] = {
    "use_arena": Option(meaning="arena allocator", values=_BOOL),
}

SESSION_OPTIONS: dict[str, Option] = {
    "session.disable_prepacking": Option(meaning="keep weights as they are", values=_BOOL),
    "session.set_denormal_as_zero": Option(meaning="flush denormals", values=_BOOL),
    "session.intra_op.allow_spinning": Option(meaning="worker threads spin", values=_BOOL),
    "session.inter_op.allow_spinning": Option(meaning="worker threads spin", values=_BOOL),
    "session.force_spinning_stop": Option(meaning="stop spinning after the last run", values=_BOOL),
    "session.dynamic_block_base": Option(meaning="work block size base", high=1024),
    "session.use_env_allocators": Option(meaning="share environment allocators", values=_BOOL),
    "session.use_device_allocator_for_initializers": Option(meaning="no arena for weights", values=_BOOL),
    "session.qdqisint8allowed": Option(meaning="int8 QDQ", values=_BOOL),
    "session.disable_quant_qdq": Option(meaning="no QDQ transformation", values=_BOOL),
    "session.disable_double_qdq_remover": Option(meaning="keep doubled QDQ pairs", values=_BOOL),
    "session.enable_quant_qdq_cleanup": Option(meaning="remove QDQ pairs at the end", values=_BOOL),
    "session.x64quantprecision": Option(meaning="precise int8 on old x86", values=_BOOL),
    "session.disable_aot_function_inlining": Option(meaning="inline functions late", values=_BOOL),
    "session.graph_optimizations_loop_level": Option(meaning="repeat optimizers", high=2),
    "optimization.enable_gelu_approximation": Option(meaning="approximate Gelu", values=_BOOL),
    "optimization.enable_cast_chain_elimination": Option(meaning="drop cast chains", values=_BOOL),
    "optimization.minimal_build_optimizations": Option(meaning="for saved models", values=("", "save", "apply")),
    "graph_optimization_level": Option(
        meaning="how far the graph is rewritten", values=("disable", "basic", "extended", "layout", "all")
    ),
    "ep.cuda.enable_gemm_auto_tune": Option(meaning="tune cuBLAS algorithms at first use", values=_BOOL),
}


def own_options(given: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return what ``execution.provider_options`` holds for this engine, under any of its names.

    Raises
    ------
    PolicyError
        An option is given under two of them.
    """
    found: dict[str, object] = {}
    for name in NAMES:
        options = given.get(name, {})
        twice = sorted(found.keys() & options.keys())
        if twice:
            msg = f"execution.provider_options: {twice[0]!r} is given under two names of one engine; keep one of them"
            raise PolicyError(msg, engine="onnxruntime")
        found.update(options)
    return found


def check_options(
    given: Mapping[str, object], known: Mapping[str, Option], where: str, also: Mapping[str, Option] | None = None
) -> dict[str, str]:
    """Return `given` as the strings the vendor takes.

    Parameters
    ----------
    given : mapping
        Option name to str, int, float or bool.
    known : mapping of str to Option
    where : str
        The policy key that holds them, for messages.
    also : mapping of str to Option, optional
        Options that are valid here too and checked elsewhere; named in messages.

    Raises
    ------
    PolicyError
        For an unknown name (the nearest is named), a value out of range, or an option that has its own policy key.
    """
    checked: dict[str, str] = {}
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            names = sorted({*known, *(also or {})})
            near = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.endswith(f".{name}")]
            hint = f"; did you mean {near[0]!r}?" if near else "."
            msg = f"{where}: unknown option {name!r}{hint} Known: {', '.join(names)}"
            raise PolicyError(msg, engine="onnxruntime")
        if option.owned_by is not None:
            msg = f"{where}: {name!r} is set by {option.owned_by}; state it there, so that one fact has one place"
            raise PolicyError(msg, engine="onnxruntime")
        checked[name] = _text(name, value, option, where)
    return checked


def _text(name: str, value: object, option: Option, where: str) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if option.values is not None:
        if text not in option.values:
            msg = (
                f"{where}.{name}: {text!r} is not one of {', '.join(repr(v) for v in option.values)} ({option.meaning})"
            )
            raise PolicyError(msg, engine="onnxruntime")
        return text
    try:
        number = int(text)
    except ValueError:
        msg = f"{where}.{name}: {text!r} is not an integer ({option.meaning})"
        raise PolicyError(msg, engine="onnxruntime") from None
    if not option.low <= number <= option.high:
        msg = f"{where}.{name}: {number} is outside {option.low}..{option.high} ({option.meaning})"
        raise PolicyError(msg, engine="onnxruntime")
    return str(number)
