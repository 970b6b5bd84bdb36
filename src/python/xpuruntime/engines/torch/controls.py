# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of the torch engine for the keys of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.control_builder import ControlBuilder, show
from xpuruntime.engines.options import check_options, own_options
from xpuruntime.engines.torch.kernel_controls import resolve_kernels
from xpuruntime.engines.torch.options import NAMES, OPTIONS
from xpuruntime.engines.torch.settings import TorchSettings
from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

__all__ = ["resolve_settings"]

_WHERE = "execution.provider_options.torch"
_ON_CUDA = "use device cuda:0, or leave the key out"
_COMPILE = ("compile_mode", "fullgraph", "dynamic")


def resolve_settings(request: Request) -> tuple[TorchSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for PyTorch on its device. Pure."""
    policy, execution = request.policy, request.policy.execution
    cuda = request.device.startswith("cuda")
    builder = ControlBuilder(policy.stated())
    builder.common(request, NAMES[0], checked="every parameter and every result is on it")
    given = check_options(own_options(execution.provider_options, NAMES), OPTIONS, _WHERE)
    builder.options(_WHERE, NAMES, "validated and handed to torch.compile, or to the choice of how to run")
    mode = given.pop("mode", "eager")
    if mode == "eager" and given:
        name = next(iter(given))
        msg = f"{_WHERE}: {name!r} is an option of torch.compile; state mode: compile too, or remove it"
        raise PolicyError(msg, engine=NAMES[0])
    if execution.cuda_graph != "off" and given.get("compile_mode") in ("reduce-overhead", "max-autotune"):
        msg = (
            f"{_WHERE}: compile_mode {given['compile_mode']} captures CUDA graphs of its own, which do not nest in "
            "execution.cuda_graph; state one of them"
        )
        raise PolicyError(msg, engine=NAMES[0])
    fields: dict[str, Any] = {"mode": mode, "compile": {n: given[n] for n in _COMPILE if n in given}}
    fields.update(_precision(request, builder, cuda=cuda))
    fields.update(_execution(request, builder, cuda=cuda))
    settings = TorchSettings(strict=policy.mode == "strict", **fields)
    if any(key.startswith("kernels.") for key in builder.stated):
        resolve_kernels(request, builder, compiled=mode == "compile")
    return settings, builder.finish("PyTorch")


def _precision(request: Request, builder: ControlBuilder, *, cuda: bool) -> dict[str, Any]:
    execution = request.policy.execution
    precision = execution.precision
    convert = precision if precision in ("fp16", "bf16") else None
    key = "execution.precision"
    if convert is not None:
        reason = "weights and arithmetic are converted; inputs and outputs keep their types"
        builder.add(key, f"weights converted to {convert}", "enforced", reason)
    elif precision == "fp32":
        reason = "fp32 excludes TF32: torch's switches are set for the process" if cuda else "the CPU computes fp32"
        builder.add(key, "tf32 off" if cuda else "the model's own types", "enforced", reason)
    elif precision == "tf32":
        builder.add(key, "tf32 on", "enforced", "TF32 is allowed for fp32 matmul and conv, for the process")
    else:
        builder.add(key, "the model's own types", "enforced", "nothing is converted")
    tf32 = execution.tf32 if execution.tf32 is not None else {"fp32": False, "tf32": True}.get(precision)
    if cuda:
        builder.add("execution.tf32", show(bool(tf32)), "enforced", "torch's process-wide switches, read back")
        return {"convert": convert, "tf32": tf32}
    if tf32 is False:
        builder.add("execution.tf32", "false", "enforced", "the CPU has no TF32")
    else:
        builder.add("execution.tf32", "-", "unsupported", "the CPU has no TF32", _ON_CUDA)
    return {"convert": convert}


def _execution(request: Request, builder: ControlBuilder, *, cuda: bool) -> dict[str, Any]:
    execution = request.policy.execution
    fields: dict[str, Any] = {}
    if execution.deterministic:
        fields["deterministic"] = True
        reason = "operators that have no deterministic form raise"
        builder.determinism(request, "torch.use_deterministic_algorithms, for the process", "enforced", reason)
    if execution.threads is not None:
        if cuda:
            builder.add("execution.threads", "-", "unsupported", "the model runs on the GPU")
        else:
            fields["threads"] = execution.threads
            reason = "torch.set_num_threads, read back"
            builder.add("execution.threads", str(execution.threads), "enforced", f"for the process: {reason}")
    if execution.cuda_graph != "off":
        if cuda:
            fields["graph"] = execution.cuda_graph
            level, reason = (
                ("enforced", "bind() captures or raises")
                if execution.cuda_graph == "require"
                else ("advisory", "captured where the model can be; otherwise the binding says why not")
            )
            builder.add("execution.cuda_graph", "captured by bind()", level, reason)  # type: ignore[arg-type]
        else:
            builder.add("execution.cuda_graph", "-", "unsupported", "the CPU has no CUDA graphs", _ON_CUDA)
    builder.add(
        "execution.memory.pool", "-", "unsupported", "PyTorch's own allocator serves the model", "use pool: engine"
    )
    builder.add(
        "execution.static_shape",
        "the program's own shapes",
        "enforced" if _fixed(request) else "advisory",
        "every input has a fixed shape"
        if _fixed(request)
        else "the program takes several sizes; bind() fixes them for one binding",
    )
    return fields


def _fixed(request: Request) -> bool:
    return all(isinstance(dim, int) for info in request.model.inputs for dim in info.shape or (None,))
