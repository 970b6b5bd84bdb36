# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The kernel of ``flex_attention`` in code that is being compiled: its option ``BACKEND``, from a policy.

PyTorch puts a call's options together in a function of its own, which Dynamo traces. Ours is traced in its place, and
asks the policy for the option while it is; the answer is a constant of the graph, and so of every key under which
Inductor and AOTAutograd keep what they have compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api, calls, module_paths
from xpuruntime.pytorch.attention import flex_choices
from xpuruntime.pytorch.attention.entries import FLEX
from xpuruntime.pytorch.attention.flex_choices import FlexChoice
from xpuruntime.pytorch.call_facts import facts_of_call
from xpuruntime.pytorch.explaining.asking import means_more
from xpuruntime.pytorch.held import current
from xpuruntime.pytorch.overriding.native import IN_PYTHON, Override

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.held import Held
    from xpuruntime.pytorch.routing import Route

__all__ = ["BACKENDS", "OVERRIDES"]

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
    held = current()
    return held is not None and "torch.flex_decode" in held.attention_words


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
    """Return the backend for a call that is being traced, from the policy; empty where it is left as it is.

    Parameters
    ----------
    stated : str
        The backend that the call states itself.
    dtype, device, head_dim, heads
        Of the queries.
    kv_heads : int
    few : bool
        Whether there are so few queries that there may be a kernel for decoding.
    lse, scores : bool
        Whether the call returns the logarithm of its sums, or the greatest scores.
    recording : bool
        Whether gradients are recorded.

    Raises
    ------
    UnsupportedOperationError
        The policy is strict and nothing that it asks for can serve.
    """
    held = current()
    if held is None or "flex_options" not in held.overrides or torch.compiler.is_exporting() or not _fused():
        return ""
    phase, module = ("train" if recording else "infer"), module_paths.in_dynamo()
    facts: dict[str, Any] = {
        "device": device, "dtype": dtype, "head_dim": head_dim, "phase": phase if held.by_phase else "",
        "module": module if held.by_module else "",
    }  # fmt: skip
    doing = f"compiled flex_attention with head_dim {head_dim} {calls.DTYPES.get(dtype, dtype)} on {device}"
    if stated:
        _note_stated(held, stated, facts, module)
        return ""
    skip = _reasons(device, heads, kv_heads, few=few, lse=lse, scores=scores)
    key = ("compiled flex_attention", *facts.values(), skip)
    route = held.routes.get(key)
    if route is None:
        route = held.route(key, "attention", entry=FLEX, skip=skip, doing=doing, **facts)
    if held.by_phase and recording:
        _follow(held, key, route, {**facts, "phase": "backward", "doing": f"the gradient of {doing}"})
    source = route.source if means_more("attention", route.asked) else "default"
    status = route.status if source != "default" else "default"
    flex_choices.note(FlexChoice(route.kernel, route.asked, source, status, route.reasons, module))
    return "" if route.kernel == FLEX.default else BACKENDS[route.kernel]


for _constant in (_chosen, _names_decode):
    # As torch.compiler.assume_constant_result does, which imports Dynamo. Functions state no such attribute.
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


def _follow(held: Held, key: Any, route: Route, gradient: dict[str, Any]) -> None:
    """Say, or refuse, that a rule for the backward cannot hold, because it asks for another backend than `route`."""
    mark = ("gradient", key)
    if mark in held.routes:
        return
    asked = held.route(mark, "attention", entry=FLEX, **gradient)
    if asked.kernel not in (route.kernel, FLEX.default):
        held.route(mark, "attention", entry=FLEX, skip=tuple((word, _FOLLOWS) for word in asked.asked), **gradient)


def _note_stated(held: Held, stated: str, facts: dict[str, Any], module: str) -> None:
    """Keep for `explain` that a call has stated its own backend, which goes before any policy."""
    call = facts_of_call(
        "attention",
        device=facts["device"],
        dtype=facts["dtype"],
        phase=facts["phase"],
        module=facts["module"],
        sizes={"head_dim": facts["head_dim"]},
    )
    wanted = held.policy.kernels.compiled_rules.match(call)
    asked, source = wanted.use, wanted.source
    kernel = _IDS.get(stated, "")
    why = f"the call states its own backend, {stated}"
    if not means_more("attention", asked):
        choice = FlexChoice(kernel, (), "default", "default", why, module)
    else:
        status = "honoured" if any(FLEX.words.get(word) == kernel for word in asked) else "bypassed"
        choice = FlexChoice(kernel, asked, source, status, why, module)
    flex_choices.note(choice)


def _reasons(
    device: torch.device, heads: int, kv_heads: int, *, few: bool, lse: bool, scores: bool
) -> tuple[tuple[str, str], ...]:
    """Return the words for kernels that cannot serve such calls, each with the reason."""
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
    names = (getattr(compiler, name, None) for name in ("_compiler_name", "compiler_name", "__name__"))
    return not any("eager" in str(name) for name in names if name)


OVERRIDES = (Override("_apply_kernel_options", "attention", (IN_PYTHON,), _apply_kernel_options, _MODULE),)
