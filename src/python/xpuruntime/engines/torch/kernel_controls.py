# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of the torch engine for the kernel keys of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.torch.pinning import operation_of, placed_rules
from xpuruntime.engines.torch.uncovered_calls import uncovered_calls
from xpuruntime.engines.written_out import absence, written_out
from xpuruntime.policies.kernel_rules import KERNEL_IDS, OPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.control_builder import ControlBuilder
    from xpuruntime.engines.torch.uncovered_calls import UncoveredCalls
    from xpuruntime.policies.kernel_rules import KernelRule

__all__ = ["ABSENT", "NATIVE", "PYTORCH_CHOICE", "resolve_kernels", "why_not"]

#: What a key is resolved to that leaves the choice to PyTorch.
PYTORCH_CHOICE = "PyTorch's choice"

#: What becomes of a key for an operation that the model does not have.
ABSENT = "-"
#: Backends of this library by the kind of device that they compute on; those of plugins are not listed.
_DEVICES = {"cpu": "cpu", "null": "cpu", "cuda_raw": "cuda", "cublas": "cuda", "cudnn": "cuda"}
#: Words that mean a kernel of PyTorch's own. As `xpuruntime.pytorch.dispatch.route.NATIVE_NAMES`, which needs PyTorch:
#: a plan is made from facts alone.
NATIVE = {
    "matmul": ("torch", "torch.mm"),
    "attention": (
        "torch",
        "torch.sdpa",
        "flash_v2",
        "torch.flash",
        "efficient",
        "torch.efficient",
        "cudnn",
        "torch.cudnn",
        "math",
        "torch.math",
    ),
    "layer_norm": ("torch", "torch.layer_norm"),
    "rms_norm": ("torch", "torch.rms_norm"),
    "conv": ("torch", "torch.conv"),
}
_CUDA_ALONE = ("cudnn", "torch.cudnn", "efficient", "torch.efficient")


def resolve_kernels(request: Request, builder: ControlBuilder, *, compiled: bool) -> None:
    """Add the control of every kernel key."""
    policy = request.policy.kernels
    cuda = request.device.startswith("cuda")
    present = {op for node in request.model.nodes if (op := operation_of(node)) is not None}
    uncovered = uncovered_calls(request)
    for op, kernel_names in policy.preferences.items():
        key = f"kernels.{op}"
        if op not in present:
            _absent(builder, key, op, _tuple(kernel_names), written_out(request.model.nodes))
        else:
            _add(builder, key, (op,), _tuple(kernel_names), uncovered.get(key), cuda=cuda, compiled=compiled)
    placed = placed_rules(policy, request.model.nodes)
    for index, rule in enumerate(policy.rules):
        key = f"kernels.rules[{index}]"
        if rule.use is None or rule.precision is not None:
            reason = "the torch engine converts a program as a whole; it keeps no operator in another precision"
            builder.add(key, "-", "unsupported", reason)
            continue
        if rule.match.node is not None and not any(source == key for _, source in placed):
            reason = "no operator in a module, of an operation that kernels are chosen for, has such a name"
            builder.add(key, "-", "unsupported", reason, "correct match.node, or name the module by match.module")
            continue
        _add(builder, key, _ops_of(rule, present), _tuple(rule.use), uncovered.get(key), cuda=cuda, compiled=compiled)
    if policy.auto_strategy == "best_performance":
        builder.add(
            "kernels.auto_strategy",
            "best_performance",
            "advisory",
            "where the policy leaves the choice, calls are measured while the model warms up",
        )
    else:
        builder.add("kernels.auto_strategy", "first_supported", "enforced", "a free choice is PyTorch's own")


def _absent(
    builder: ControlBuilder, key: str, op: str, kernel_names: tuple[str, ...], found: Mapping[str, Sequence[str]]
) -> None:
    """Add the control of a key for an operation of which the model has no call: written out, or not found."""
    if kernel_names[0] == "auto":
        builder.add(key, PYTORCH_CHOICE, "enforced", "auto leaves the choice to PyTorch")
    elif op in found:
        reason = f"the model writes {op} out (at {found[op][0]!r}), which is no call that a kernel could serve"
        builder.add(key, ABSENT, "unsupported", reason, f"call the function of PyTorch for {op}")
    else:
        builder.add(key, ABSENT, "advisory", *absence(op, found))


def _ops_of(rule: KernelRule, present: set[str]) -> tuple[str, ...]:
    if rule.match.op is not None:
        return (rule.match.op,)
    return tuple(op for op in OPS if op in present) or OPS


def _add(
    builder: ControlBuilder,
    key: str,
    ops: Sequence[str],
    kernel_names: tuple[str, ...],
    uncovered: UncoveredCalls | None,
    *,
    cuda: bool,
    compiled: bool,
) -> None:
    if kernel_names[0] == "auto":
        builder.add(key, PYTORCH_CHOICE, "enforced", "auto leaves the choice to PyTorch")
        return
    reasons: dict[str, str] = {}
    served: list[str] = []
    for kernel_name in kernel_names:
        why = [why_not(op, kernel_name, cuda=cuda) for op in ops]
        if all(why):
            reasons[kernel_name] = why[0]
        else:
            served.append(kernel_name)
    if not served:
        text = "; ".join(f"{kernel_name}: {reason}" for kernel_name, reason in reasons.items())
        builder.add(key, "-", "unsupported", text, "name another kernel (`xrt kernels` lists them)")
    elif uncovered is not None and uncovered.alone:
        builder.add(key, "-", "unsupported", uncovered.reason, uncovered.fix)
    elif compiled:
        reason = (
            "calls of the compiled program are decided one by one, but what the compiler fuses, such as norms, is no "
            "call any more"
        )
        if uncovered is not None:
            reason += f"; and {uncovered.reason}"
        builder.add(key, ", ".join(served), "advisory", reason, "state mode: eager for the torch engine")
    elif uncovered is not None:
        reason = f"each other call is served by it, but {uncovered.reason}"
        builder.add(key, ", ".join(served), "advisory", reason, uncovered.fix)
    else:
        reason = "each call is served by it, instead of PyTorch's own kernel; the evidence says which kernel ran"
        if reasons:
            reason += f". Not here: {'; '.join(f'{kernel_name}: {text}' for kernel_name, text in reasons.items())}"
        builder.add(key, ", ".join(served), "enforced", reason)


def why_not(op: str, kernel_name: str, *, cuda: bool) -> str:
    """Return why a kernel can serve no call of an operation on this device; empty where it may."""
    from xpuruntime import _core
    from xpuruntime.ops.call_context import prepare

    if kernel_name == "auto":
        return ""
    if kernel_name in NATIVE[op]:
        return f"{kernel_name} runs on CUDA" if kernel_name in _CUDA_ALONE and not cuda else ""
    prepare()
    name = kernel_name.partition("@")[0]
    ids = _core.KernelRegistry.instance().find(op, name)
    # What this build lacks, such as CUDA's, is known all the same.
    known = ids or [one for one, (ops, _) in KERNEL_IDS.items() if op in ops and name in (one, *one.split("."))]
    kind = "cuda" if cuda else "cpu"
    if known and all(_DEVICES.get(one.partition(".")[0], kind) != kind for one in known):
        return f"{kernel_name} does not run on {kind}"
    if not ids:
        return f"there is no kernel {kernel_name} for {op}"
    return ""


def _tuple(kernel_names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
