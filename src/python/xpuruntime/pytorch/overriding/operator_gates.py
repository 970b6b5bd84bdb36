# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates before operators that take more than tensors, norms and attention: called without Python.

PyTorch has no C function for these operators, but its libraries have the C++ functions that the dispatcher calls. A
gate calls them where it knows a call to be native. Nothing promises what they look like, so each is tried first. Where
one is not there, or gives anything else than Python's call, a kernel in Python stands in its place: `why_not` says so.

Where gates before products are called as PyTorch's own kernels are, these are, too; with values of PyTorch's
interpreter otherwise, which costs more and does the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.overriding.gates import (
    Kernel,
    is_own,
    keyset_of,
    why_no_layout,
    why_not_direct,
    why_not_in_c,
    why_not_plain,
)
from xpuruntime.pytorch.overriding.operator_trials import try_operator
from xpuruntime.pytorch.overriding.undisturbed import find_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["operator_gate", "why_not"]

#: Operator and dispatch key to why no gate in C stands there; empty where one does.
_reasons: dict[tuple[str, str], str] = {}


class _OperatorKernel(Kernel):
    """A gate before an operator that takes more than tensors. `otherwise` is the kernel in Python."""

    def __init__(self, native: Native, slow: Callable[..., Any]) -> None:
        super().__init__(native, slow, slow)

    def place(self) -> Callable[[], None] | None:
        native = self._native
        plain = not (why_not_plain() or _why_not_as_known(native.name))
        return _core.place_operator(
            native.name, native.key, self._slow, keyset_of(native.key), functools.partial(_try, native), plain
        )


#: The operators that gates without values of PyTorch's interpreter are written for, as PyTorch says them.
_KNOWN = {
    "native_layer_norm": "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    "native_layer_norm_backward": "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
    " Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    "_fused_rms_norm": "(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    "_fused_rms_norm_backward": "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight,"
    " bool[2] output_mask) -> (Tensor, Tensor)",
    "scaled_dot_product_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,"
    " float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor",
}


def _why_not_as_known(name: str) -> str:
    """Return what this PyTorch says of an operator that a gate is written for otherwise; empty where it agrees."""
    found = str(getattr(torch.ops.aten, name).default._schema)
    return "" if found == f"aten::{name}{_KNOWN[name]}" else f"this PyTorch has {found}"


def operator_gate(native: Native, slow: Callable[..., Any]) -> Callable[..., Any] | Kernel:
    """Return a gate before a native kernel: one in C, or `slow` itself where that cannot be.

    Parameters
    ----------
    native : Native
    slow : callable
        Called with a keyset, then the operator's arguments. It keeps routes under `calls.call_key` of what the C++ part
        calls the mark of a call and the operator's arrays in their order, with ``None`` for one that is not given.
    """
    mark = (native.name, native.key)
    _reasons[mark] = _why_not(native)
    if not _reasons[mark] and native.key != "CUDA":  # where it is tried with the first call, when CUDA has begun
        _try(native)
    return slow if _reasons[mark] else _OperatorKernel(native, slow)


def why_not(name: str, key: str) -> str:
    """Return why no gate in C stands before an operator, such as ``"native_layer_norm"`` at ``"CUDA"``.

    Empty where one does, and where none was needed so far. On CUDA, PyTorch's function is tried with the first call.
    """
    return _reasons.get((name, key), "")


def _why_not(native: Native) -> str:
    reason = why_not_direct() or why_not_in_c() or _why_not_values() or _why_not_state()
    if reason:
        return reason
    if not is_own(native):
        return f"the kernel of aten::{native.name} at {native.key} is not PyTorch's own"
    return _core.why_no_function(native.name, native.key)


def _try(native: Native) -> str | None:
    """Return why PyTorch's C++ function is not to be called; ``None`` where that cannot be found out now."""
    reason = _tried(native.name, native.key, native)
    if reason is not None:
        _reasons[native.name, native.key] = reason
    return reason


_results: dict[tuple[str, str], str] = {}


def _tried(name: str, key: str, native: Native) -> str | None:
    found = _results.get((name, key))
    if found is None:
        if key == "CUDA" and torch.cuda.is_current_stream_capturing():
            return None
        found = _results[name, key] = try_operator(native)
    return found


@functools.cache
def _why_not_state() -> str:
    """Return why it is not known what tells plain tensors, and threads that a mode looks on, from others."""
    return why_no_layout() or find_out(_core.open_torch_state)


@functools.cache
def _why_not_values() -> str:
    """Return why PyTorch's way to hand arguments to a kernel in C is not understood, found by handing some over."""
    return find_out(lambda: _core.open_torch_values() or _why_not_passed())


def _why_not_passed() -> str:
    space = "_xpuruntime_values"
    library = torch.library.Library(space, "DEF")
    library.define(
        "passes(Tensor a, Tensor? b, Tensor? c, SymInt[] d, float e, float? f, float? g, bool h, bool[3] i)"
        " -> (Tensor, Tensor, Tensor)"
    )
    a, c = torch.ones(2, device="cpu"), torch.zeros(3, device="cpu")
    given: tuple[Any, ...] = (a, None, c, [5, 7], 0.5, None, 0.25, True, [True, False, True])
    seen: list[tuple[Any, ...]] = []

    def kernel(_: Any, *args: Any) -> tuple[Any, ...]:
        seen.append(args)
        return args[2], None, args[0]

    remove = _core.place_probe(space, kernel)
    if remove is None:
        return "this PyTorch takes no kernel in C"
    try:
        found = torch.ops._xpuruntime_values.passes(*given)
    except RuntimeError as error:
        return f"this PyTorch does not hand arguments to a kernel in C: {error}"
    finally:
        remove()
        library._destroy()
    arrived = len(seen) == 1 and all(
        one is other if one is None or isinstance(one, torch.Tensor) else one == other
        for one, other in zip(seen[0], given, strict=True)
    )
    returned = found[0] is given[2] and found[1] is None and found[2] is given[0]
    return "" if arrived and returned else "this PyTorch hands other arguments to a kernel in C than it was given"
