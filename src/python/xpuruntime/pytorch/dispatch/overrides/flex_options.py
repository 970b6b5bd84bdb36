# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel of ``flex_attention`` in code that is being compiled: its option ``BACKEND``, from a policy.

PyTorch puts a call's options together in a function of its own, which Dynamo traces. The override is traced in its
place, and asks the policy for the option while it is; the answer is a constant of the graph, and so of every key under
which Inductor and AOTAutograd keep what they have compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention import flash_impl
from xpuruntime.pytorch.attention.call import FLEX
from xpuruntime.pytorch.attention.flash_impl import FlexChoice
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import IN_PYTHON, Override
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.explanation.requested import requests_other_kernel

if TYPE_CHECKING:
    from xpuruntime.policies.call_facts import CallFacts
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

_MODULE = "torch.nn.attention.flex_attention"
#: Id of a kernel to the value of ``kernel_options["BACKEND"]``.
BACKENDS = {
    "torch.flex": "AUTO",
    "torch.flex_triton": "TRITON",
    "torch.flex_decode": "TRITON_DECODE",
    "torch.flex_flash": "FLASH",
}
_IDS = {backend: kernel for kernel, backend in BACKENDS.items()}
#: Devices that these are for; for the CPU, Inductor writes C++ of its own.
_KIND = "cuda"
#: Calls with as many queries or more have no kernel for decoding.
_FEW = 128
_FOLLOWS = "the gradient of flex_attention runs by the backend of its forward"


def _apply_kernel_options(native: Callable[..., Any]) -> Callable[..., Any]:
    # Traced by Dynamo: nothing but what it can follow, and `_chosen`, which it calls.
    def apply_kernel_options(
        query: Any, key: Any, value: Any, return_lse: Any, kernel_options: Any, return_aux: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            stated = ""
            if kernel_options is not None:
                stated = kernel_options.get("BACKEND", "")
                if kernel_options.get("FORCE_USE_FLEX_ATTENTION", False):
                    stated = "TRITON"
            torch._dynamo.mark_static(query, -1)  # as flex_attention does itself
            torch._dynamo.mark_static(query, -3)
            torch._dynamo.mark_static(key, -3)
            few = True
            if _names_decode():
                few = True if query.size(-2) < _FEW else False  # noqa: SIM210 - a constant, where a size is a symbol
            lse = return_lse
            scores = False
            if return_aux is not None:
                lse = return_aux.lse
                scores = return_aux.max_scores
            backend = _chosen(
                stated, query.dtype, query.device, query.size(-1), query.size(-3), key.size(-3), few, lse, scores,
                torch.is_grad_enabled(),
            )  # fmt: skip
            if backend:
                kernel_options = {**(kernel_options or {}), "BACKEND": backend}
                if backend == "TRITON_DECODE":
                    torch._dynamo.mark_static(query, 0)  # it is made for one number of sequences
        return native(query, key, value, return_lse, kernel_options, return_aux)

    return apply_kernel_options


def _names_decode() -> bool:
    active = active_policy()
    return active is not None and "torch.flex_decode" in active.attention_kernels


def _chosen(
    stated: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    heads: int,
    kv_heads: int,
    few: bool,
    lse: bool,
    scores: bool,
    recording: bool,
) -> str:
    """Return the backend for a call that is being traced, from the policy; empty where it is left as it is."""
    active = active_policy()
    if active is None or "flex_options" not in active.overrides or torch.compiler.is_exporting() or not _fused():
        return ""
    phase, module = ("train" if recording else "infer"), module_paths.in_dynamo()
    facts = facts_of_call(
        "attention", device=device, dtype=dtype, phase=phase if active.by_phase else "",
        module=module if active.by_module else "", sizes={"head_dim": head_dim},
    )  # fmt: skip
    description = f"compiled flex_attention with head_dim {head_dim} {context.DTYPES.get(dtype, dtype)} on {device}"
    if stated:
        _note_stated(active, stated, facts, module)
        return ""
    skip = _reasons(device, heads, kv_heads, few=few, lse=lse, scores=scores)
    key = ("compiled flex_attention", device, *facts, skip)
    route = active.routes.get(key)
    if route is None:
        route = active.resolve(key, facts, entry=FLEX, skip=skip, description=description)
    if active.by_phase and recording:
        _follow(active, key, route, facts._replace(phase="backward"), f"the gradient of {description}")
    source = route.source if requests_other_kernel("attention", route.asked) else "default"
    status = route.status if source != "default" else "default"
    flash_impl.note(FlexChoice(route.kernel, route.asked, source, status, route.reasons, module))
    return "" if route.kernel == FLEX.default else BACKENDS[route.kernel]


for _constant in (_chosen, _names_decode):
    _private_api.mark_constant(_constant)


def _follow(active: CompiledPolicy, key: Any, route: Route, facts: CallFacts, description: str) -> None:
    """Say, or refuse, that a rule for the backward cannot hold, because it asks for another backend than `route`."""
    mark = ("gradient", key)
    if mark in active.routes:
        return
    resolved = active.resolve(mark, facts, entry=FLEX, description=description)
    if resolved.kernel not in (route.kernel, FLEX.default):
        skip = tuple((name, _FOLLOWS) for name in resolved.asked)
        active.resolve(mark, facts, entry=FLEX, skip=skip, description=description)


def _note_stated(active: CompiledPolicy, stated: str, facts: CallFacts, module: str) -> None:
    """Keep for `explain` that a call has stated its own backend, which goes before any policy."""
    wanted = active.policy.kernels.compiled_rules.match(facts)
    use, source = wanted.use, wanted.source
    kernel = _IDS.get(stated, "")
    why = f"the call states its own backend, {stated}"
    if not requests_other_kernel("attention", use):
        choice = FlexChoice(kernel, (), "default", "default", why, module)
    else:
        status = "honoured" if any(FLEX.kernel_names.get(name) == kernel for name in use) else "bypassed"
        choice = FlexChoice(kernel, use, source, status, why, module)
    flash_impl.note(choice)


def _reasons(
    device: torch.device, heads: int, kv_heads: int, *, few: bool, lse: bool, scores: bool
) -> tuple[tuple[str, str], ...]:
    """Return the names of kernels that cannot serve such calls, each with the reason."""
    why = dict.fromkeys(("math", "torch.math"), "compiled code has no unfused form of flex_attention")
    if device.type != _KIND:
        where = f"the backends of flex_attention are for CUDA, and the operands are on {device.type}"
        why.update(dict.fromkeys(("torch.flex_triton", "torch.flex_decode", "torch.flex_flash"), where))
        return tuple(why.items())
    ratio = heads // kv_heads if kv_heads else 0
    if not few:
        why["torch.flex_decode"] = f"it is for less than {_FEW} queries"
    elif ratio < 1 or ratio & (ratio - 1):
        why["torch.flex_decode"] = f"{heads} heads share {kv_heads}, and it takes powers of two"
    elif scores:
        why["torch.flex_decode"] = "the call returns the greatest scores, which it does not"
    flash = _reason_against_flash(lse=lse, scores=scores)
    if flash:
        why["torch.flex_flash"] = flash
    return tuple(why.items())


def _reason_against_flash(*, lse: bool, scores: bool) -> str:
    if not _has_flash():
        return "FlashAttention 4 is not installed: flash_attn.cute cannot be imported"
    if scores:
        return "the call returns the greatest scores, which it does not"
    if lse and not _scales_statistics():
        return "the call returns the logarithm of its sums, which this PyTorch scales wrongly for it"
    return ""


def _has_flash() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


@functools.cache
def _scales_statistics() -> bool:
    """Say whether flex_attention knows that this backend gives natural logarithms; PyTorch 2.11 does not."""
    code = sys.modules[_MODULE].flex_attention.__code__
    return any("stats_are_log2" in getattr(part, "co_varnames", ()) for part in code.co_consts)


def _fused() -> bool:
    """Say whether what is traced now may be compiled into kernels: not by the backends for debugging."""
    compiler = _private_api.dynamo_translator().current_tx().output.compiler_fn
    names = (_private_api.wrapped_backend(compiler), *(getattr(compiler, x, "") for x in ("compiler_name", "__name__")))
    return not any("eager" in str(name) for name in names if name)


OVERRIDES = (
    Override("_apply_kernel_options", "attention", (IN_PYTHON,), _apply_kernel_options, _MODULE, "flex_options"),
)
