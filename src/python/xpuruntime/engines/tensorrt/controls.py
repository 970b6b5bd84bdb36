# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of TensorRT for the keys of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.control_builder import ControlBuilder, fp32_nodes, own_options, show
from xpuruntime.engines.model.shapes import shape_ranges
from xpuruntime.engines.tensorrt.options import (
    Profile,
    TensorRtProduct,
    TensorRtSettings,
    checked_options,
    compute_capabilities,
    has,
    targets_of,
)
from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control
    from xpuruntime.runtime.machine import EngineFacts

_OLDEST_DEFAULT = 8
_AT_ONCE = ("eager", "none")


def resolve_settings(
    request: Request, product: TensorRtProduct, facts: EngineFacts, chip: str | None
) -> tuple[TensorRtSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for one product. Pure."""
    builder = ControlBuilder(request.policy.stated())
    builder.common(request, product.name, checked="the engine is one CUDA engine, whose layers all run on this device")
    own = own_options(request.policy.execution.provider_options, product.names)
    options = checked_options(own, product, facts)
    where = f"execution.provider_options.{product.name}"
    builder.options(
        where, product.names, "checked against a table, set, and read back where the vendor lets it be read"
    )
    chosen: dict[str, Any] = {"options": options, "strict": request.policy.mode == "strict"}
    chosen["targets"] = _targets(request, product, facts, chip, options)
    chosen["profiles"] = profiles(request)
    chosen.update(_precision(request, product, builder))
    chosen["keep_fp32"] = _rules(request, builder, changed=bool(chosen.get("convert") or chosen.get("quantize")))
    chosen.update(_execution(request, product, facts, builder, options))
    chosen.update(_memory(request, builder))
    return TensorRtSettings(**chosen), builder.finish(product.title)


def profiles(request: Request) -> dict[str, Profile]:
    """Return the least, best and largest shape of each input that keeps an open dimension."""
    profiles: dict[str, Profile] = {}
    for name, ranges in shape_ranges(request.model, request.policy).items():
        if not all(range_.fixed for range_ in ranges):
            profiles[name] = (
                tuple(range_.min for range_ in ranges),
                tuple(range_.opt for range_ in ranges),
                tuple(range_.max for range_ in ranges),
            )
    return profiles


def _targets(
    request: Request, product: TensorRtProduct, facts: EngineFacts, chip: str | None, options: dict[str, str]
) -> tuple[str, ...]:
    if not has(facts, "targets"):
        return ()
    stated = options.get("compute_capability")
    if stated is not None:
        targets = targets_of(stated, product, facts)
        if request.purpose != "compile" and chip is not None and chip not in targets:
            msg = (
                f"execution.provider_options.{product.name}.compute_capability names {', '.join(targets)}, and "
                f"{request.device} is {chip}; add {chip}, or compile the artifact and load it on such a GPU"
            )
            raise PolicyError(msg, engine=product.name)
        return targets
    if request.artifact is not None:
        return tuple(request.artifact.manifest.target.get("compute_capability", "").split())
    known = compute_capabilities(facts)
    if chip in known:
        return (chip,)
    if chip is not None:
        return targets_of(chip, product, facts)
    return tuple(capability for capability in known if int(capability.partition(".")[0]) >= _OLDEST_DEFAULT)


def _precision(request: Request, product: TensorRtProduct, builder: ControlBuilder) -> dict[str, Any]:
    execution = request.policy.execution
    precision = execution.precision
    tf32 = execution.tf32 if execution.tf32 is not None else {"fp32": False}.get(precision, True)
    chosen: dict[str, Any] = {"tf32": tf32}
    flag = f"BuilderFlag.TF32={int(tf32)}"
    key, typed = "execution.precision", "the network is strongly typed: the types in the graph are what runs"
    if precision in ("fp16", "bf16"):
        chosen["convert"] = precision
        reason = f"{typed}, and a probe input is compared with fp32"
        builder.add(key, f"graph converted to {precision}", "enforced", reason)
    elif precision == "int8":
        chosen["quantize"] = request.model.quantization.scheme == "none"
        how = "graph quantized to int8 Q/DQ, biases in floats" if chosen["quantize"] else "the model's own Q/DQ"
        reason = f"{typed}, with every rounding to int8; the report says which layers compute in it"
        builder.add(key, how, "enforced", reason)
    elif precision == "fp32":
        builder.add(key, flag, "enforced", f"fp32 excludes TF32, which {product.title} uses by default; {typed}")
    elif precision == "tf32":
        builder.add(key, flag, "enforced", "TF32 is allowed for fp32 products and convolutions")
    else:
        builder.add(key, "the model's own types", "enforced", typed)
    builder.add("execution.tf32", flag, "enforced", "builder flag, read back before the build")
    return chosen


def _rules(request: Request, builder: ControlBuilder, *, changed: bool) -> tuple[str, ...]:
    keep: list[str] = []
    for index, rule in enumerate(request.policy.kernels.rules):
        key, glob = f"kernels.rules[{index}]", fp32_nodes(rule)
        if glob is not None and changed:
            keep.append(glob)
            builder.add(key, f"nodes {glob} stay fp32", "enforced", "they are neither converted nor quantized")
        else:
            reason = "only precision: fp32 for nodes of a graph that is converted or quantized can be enforced"
            builder.add(key, "-", "unsupported", reason)
    return tuple(keep)


def _execution(
    request: Request, product: TensorRtProduct, facts: EngineFacts, builder: ControlBuilder, options: dict[str, str]
) -> dict[str, Any]:
    execution = request.policy.execution
    builder.add(
        "execution.allow_cpu_ops", "-", "enforced", "an engine has no layers on the CPU; nothing needs permission"
    )
    builder.add("execution.threads", "-", "unsupported", "nothing is computed on the CPU")
    if execution.layout == "auto":
        builder.add("execution.layout", "-", "enforced", "left to the engine")
    else:
        reason = "the builder chooses the layout of every tensor inside the engine; evidence says which"
        builder.add("execution.layout", "-", "unsupported", reason)
    builder.shapes(request, "an optimization profile is built for the range")
    _determinism(request, product, facts, builder, options)
    if execution.cuda_graph != "off" and options.get("cuda_graph_strategy") == "whole_graph_capture":
        msg = (
            f"execution.provider_options.{product.name}.cuda_graph_strategy: whole_graph_capture and "
            "execution.cuda_graph would capture one graph inside the other. Fix: state one of the two"
        )
        raise PolicyError(msg, engine=product.name)
    if execution.cuda_graph == "off":
        builder.add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    elif execution.cuda_graph == "require":
        builder.add("execution.cuda_graph", "captured by bind()", "enforced", "bind() captures or raises")
    else:
        reason = "captured where the engine allows it; otherwise the binding says why not"
        builder.add("execution.cuda_graph", "captured by bind()", "advisory", reason)
    return {"graph": execution.cuda_graph}


def _determinism(
    request: Request, product: TensorRtProduct, facts: EngineFacts, builder: ControlBuilder, options: dict[str, str]
) -> None:
    if not request.policy.execution.deterministic:
        return
    resolved, how = "-", "one built engine runs the same kernels each time"
    if has(facts, "kernel_specialization"):
        specialization = options.setdefault("kernel_specialization", "eager")
        if specialization not in _AT_ONCE:
            msg = (
                f"execution.provider_options.{product.name}.kernel_specialization: {specialization} "
                "replaces kernels while the engine runs, which execution.determinism forbids; "
                "state eager or none, or leave the option out"
            )
            raise PolicyError(msg, engine=product.name)
        resolved, how = f"kernel_specialization={specialization}", "kernels are not replaced while the engine runs"
    reason = f"{how}; the vendor does not promise that each of them adds in the same order every time"
    builder.determinism(request, resolved, "advisory", reason)


def _memory(request: Request, builder: ControlBuilder) -> dict[str, Any]:
    memory = request.policy.execution.memory
    chosen = {"pool": memory.pool, "pool_limit": memory.limit, "workspace": memory.limit}
    if memory.pool == "engine":
        builder.add("execution.memory.pool", "the vendor's own allocations", "enforced", "nothing is replaced")
        reason = "limit of the scratch memory that kernels are chosen with; weights and activations come on top"
        fix = "state execution.memory.pool: caching, whose limit holds for everything"
        builder.add("execution.memory.limit", f"workspace {show(memory.limit)} bytes", "advisory", reason, fix)
        return chosen
    reason = "weights, activations and scratch memory of the session go through the pool, in the order of its streams"
    builder.add("execution.memory.pool", f"a {memory.pool} xpuruntime pool as IGpuAllocator", "enforced", reason)
    reason = "limit of the pool, and of the scratch memory that kernels are chosen with"
    builder.add("execution.memory.limit", f"pool limit {show(memory.limit)} bytes", "enforced", reason)
    return chosen
