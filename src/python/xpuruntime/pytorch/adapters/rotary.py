# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Functions ``apply_rotary_pos_emb`` of models, which compute ``rope``."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import (
    UNUSUAL,
    AdaptedClasses,
    AdaptedFunctions,
    decides,
    is_usual,
    own_call,
    report_compiled,
    run_original,
)
from xpuruntime.pytorch.dispatch.context import active_policy, capturing, in_clean_thread
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.providers.operations import rope
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from torch import Tensor

_UNKNOWN = "it rotates by none of the formulas that this library knows, which rotate halves"
_OTHER_FORM = "it is for queries and keys of four dimensions, and cos and sin for dimension 1 or 2 of them"
_LEARNED = "the gradient of its angles is recorded"
_lock = threading.RLock()
#: Pairs of cos and sin whose halves were looked at: a model may make several a forward, each for some layers.
_MOST_PAIRS = 4
_MOST_SHAPES = 256


def _rotate(form: str, rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of this form does: with all columns or the first ones, of one half, rounded or not."""
    columns = cos.shape[-1]
    if form == "half":
        return rotate(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))  # type: ignore[no-any-return]
    if form == "first":
        of_q, of_k = rotate(q[..., :columns], k[..., :columns], cos, sin)
        return torch.cat([of_q, q[..., columns:]], dim=-1), torch.cat([of_k, k[..., columns:]], dim=-1)
    of_q, of_k = rotate(q, k, cos, sin)
    return (of_q.to(q.dtype), of_k.to(k.dtype)) if form == "rounded" else (of_q, of_k)


def _by_kernel(
    repeat: Callable[[], bool] | bool, own: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    operands = {"q": q, "k": k, "cos": cos, "sin": sin}
    confirm = None if isinstance(repeat, bool) else ("mirrored", repeat)
    stated = {"mirrored": True if confirm else repeat}
    return perform("rope", operands, stated, confirm=confirm, own=own)  # type: ignore[no-any-return]


class _Looks:
    # Whether the halves of cos and sin repeat each other, looked at in each pair of eager calls by kernels that ask. A
    # model makes one pair a forward, which its layers share, and the device is waited for once a pair. A call that is
    # captured cannot look: it goes by the pairs of its shape that eager calls brought under the same policy, of which
    # those that rotate by nothing say nothing.

    def __init__(self) -> None:
        self._policy = -1
        self._pairs: tuple[tuple[Any, ...], ...] = ()
        self._shapes: dict[Any, bool] = {}

    def repeat(self, cos: Tensor, sin: Tensor) -> bool:
        active, shape = active_policy(), (cos.dtype, cos.shape)
        number = -1 if active is None else active.number
        if number != self._policy:
            self._policy, self._pairs, self._shapes = number, (), {}
        if capturing():
            return self._shapes.get(shape, False)
        versioned = not (cos.is_inference() or sin.is_inference())  # those do not say that they were written to
        versions = tuple(map(_private_api.tensor_version, (cos, sin))) if versioned else ()
        for of_cos, of_sin, seen, repeats in self._pairs if versioned else ():
            if of_cos() is cos and of_sin() is sin and seen == versions:
                return bool(repeats)
        repeats, rotates = _halves_repeat(cos.detach(), sin.detach())
        if rotates:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes = {}
            self._shapes[shape] = repeats and self._shapes.get(shape, True)
        if versioned:
            self._pairs = ((weakref.ref(cos), weakref.ref(sin), versions, repeats), *self._pairs[: _MOST_PAIRS - 1])
        return repeats


def _halves_repeat(cos: Tensor, sin: Tensor) -> tuple[bool, bool]:
    """Say whether the halves of both repeat each other, and whether they rotate at all, in one wait."""
    if cos.shape[-1] % 2 or sin.shape[-1] % 2:
        return False, True
    (of_cos, of_cos_too), (of_sin, of_sin_too) = cos.chunk(2, -1), sin.chunk(2, -1)
    repeat = (of_cos == of_cos_too).all() & (of_sin == of_sin_too).all()
    repeats, rotates = torch.stack((repeat, sin.any())).tolist()
    return repeats, rotates


def _picks(function: FunctionType) -> bool:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    return names[:4] == ("q", "k", "cos", "sin") and names[-1:] == ("unsqueeze_dim",) and not code.co_kwonlyargcount


def _adapter(original: FunctionType) -> Callable[..., Any]:
    def form_of(*facts: Any) -> str:
        return _form_of(original, *facts)

    _private_api.mark_constant(form_of)
    looks = _Looks()
    names = original.__code__.co_varnames[4 : original.__code__.co_argcount]
    default = original.__defaults__[-1] if original.__defaults__ else None

    # Traced by Dynamo: nothing but what it can follow, and the function that it takes for a constant.
    @functools.wraps(original)
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key = None
        if not torch.compiler.is_compiling():
            key, own = own_call("rope", original, q, k, cos, sin)
            if own:
                return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        more = {**dict(zip(names, args, strict=False)), **kwargs}
        dim = more.pop("unsqueeze_dim", default)
        used = [value for value in more.values() if value is not None]
        if len(used) > 0 or len(args) > len(names) or dim not in (1, 2) or q.dim() != 4:
            if torch.compiler.is_compiling():
                report_compiled("rope", original, q.dtype, q.device, _OTHER_FORM)
                return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
            if len(args) > len(names) or not decides("rope", q):
                return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
            run = functools.partial(original, **dict(zip(names, args, strict=False)), **kwargs)
            return run_original("rope", original, run, (q, k, cos, sin), q, _OTHER_FORM)  # type: ignore[no-any-return]
        columns, half = q.shape[-1], 2 * cos.shape[-1] == q.shape[-1]
        form = form_of(q.dtype, k.dtype, cos.dtype, cos.shape[-1] < columns, half, dim)
        if form == "":
            return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
        repeat: Callable[[], bool] | bool = form == "half"  # which it repeats itself
        if not torch.compiler.is_compiling():
            if not decides("rope", q):
                return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
            why = _LEARNED if learned else "" if is_usual(q, k, cos, sin) else UNUSUAL
            if why or form == "!":
                run = functools.partial(original, unsqueeze_dim=dim)
                return run_original("rope", original, run, (q, k, cos, sin), q, why or _UNKNOWN)  # type: ignore[no-any-return]
            repeat = repeat or functools.partial(looks.repeat, cos, sin)
        if form == "!" or learned:
            report_compiled("rope", original, q.dtype, q.device, _LEARNED if learned else _UNKNOWN)
            return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        rotate = functools.partial(_by_kernel, repeat, key)
        return _rotate(form, rotate, q, k, cos.unsqueeze(dim), sin.unsqueeze(dim))

    return apply_rotary_pos_emb


def _form_of(original: FunctionType, *facts: Any) -> str:
    # Return the form of a function where the active policy decides ``rope``; ``!`` where it has none of those known.
    # The policy that holds is part of the key of compiled code; see `compile_hooks`.
    active = active_policy()
    if active is None or "rope" not in active.ops or torch.compiler.is_exporting():
        return ""
    with _lock:
        return _recognized(original, *facts)


@functools.lru_cache(maxsize=1024)
def _recognized(original: FunctionType, *facts: Any) -> str:
    return in_clean_thread(_first_form, original, *facts)


def _first_form(
    original: FunctionType, q_dtype: torch.dtype, k_dtype: torch.dtype, dtype: torch.dtype, partial: bool, half: bool,
    dim: int,
) -> str:  # fmt: skip
    shape = (1, 2, 3, 16) if dim == 1 else (1, 3, 2, 16)
    count = torch.arange(96.0, device="cpu").view(shape)
    q, k = torch.sin(count * count * 0.7).to(q_dtype), torch.cos(count * count * 0.3).to(k_dtype)
    angles = torch.arange(24.0 if partial else 48.0, device="cpu").view(1, 3, -1) * 0.37
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    try:
        seen = original(q.clone(), k.clone(), cos.clone(), sin.clone(), unsqueeze_dim=dim)
    except Exception:
        return "!"
    for form in ("first", *["half"] * half) if partial else ("all", "rounded"):
        rotated = _rotate(form, rope, q, k, cos.unsqueeze(dim), sin.unsqueeze(dim))
        if len(seen) == len(rotated) and all(map(_same, seen, rotated)):
            return form
    return "!"


def _same(seen: Any, other: Tensor) -> bool:
    return isinstance(seen, torch.Tensor) and seen.dtype == other.dtype and torch.equal(seen, other)


def _adapted(function: FunctionType) -> Callable[..., Any] | None:
    if _picks(function):
        return _adapter(function)
    return _reporting(function) if function.__module__.startswith("transformers") else None


def _own_method(name: str, kind: type) -> Any:
    return kind.__dict__.get(name) if kind.__module__.startswith("transformers") else None


def _reporting(original: Any) -> Any:
    """Return a function that says what no kernel can stand in for, and refuses it where the policy is strict."""
    if isinstance(original, staticmethod):
        return staticmethod(_reporting(original.__func__))

    # Traced by Dynamo: nothing but what it can follow.
    @functools.wraps(original)
    def rotary(*args: Any, **kwargs: Any) -> Any:
        x = None
        for operand in (*args, *kwargs.values()):
            if x is None and isinstance(operand, torch.Tensor):
                x = operand
        if x is None:
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            report_compiled("rope", original, x.dtype, x.device, _UNKNOWN)
            return original(*args, **kwargs)
        if not decides("rope", x):
            return original(*args, **kwargs)
        return run_original("rope", original, functools.partial(original, **kwargs), args, x, _UNKNOWN)

    return rotary


#: The functions of models, of which those behind the first rotate in ways of their own, as methods do.
_NAMES = (
    "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb_vision", "apply_rotary_emb",
    "apply_rotary_pos_emb_2d", "apply_rotary_pos_emb_2d_cross_attn", "apply_rotary_pos_emb_2d_self_attn",
    "apply_rotary_time_emb", "vision_apply_rotary_emb",
)  # fmt: skip
_METHODS = ("_apply_rotary_embedding", "apply_rotary_embeddings", "apply_rotary_position_embeddings")
OVERRIDES = (
    Override(_NAMES[0], "rope", (CLASSES,), functools.partial(AdaptedFunctions, _NAMES, _adapted)),
    *(
        Override(
            name, "rope", (CLASSES,),
            functools.partial(AdaptedClasses, functools.partial(_own_method, name), _reporting),
        )
        for name in _METHODS
    ),
)  # fmt: skip
