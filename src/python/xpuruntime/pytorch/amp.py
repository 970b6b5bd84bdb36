# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`autocast`: PyTorch's mixed precision, checked against the precision of the active policy."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch

from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.errors import InputError, PolicyError, warn
from xpuruntime.pytorch.dispatch import context

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_WORDS: dict[Any, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    "fp16": "fp16",
    "bf16": "bf16",
}
_MADE_OUTSIDE = "an autocast object that was made outside is entered; call autocast(...) in the compiled function"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(
    dtype: Any = None,
    enabled: bool = True,
    cache_enabled: bool = True,
    *,
    fp16: bool | None = None,
    device_type: Literal["cuda", "cpu"] | str | None = None,
) -> Autocast:
    """Run the operations that `torch.autocast` lists in half precision, inside a ``with`` block or a function.

    Parameters
    ----------
    dtype : {torch.float16, torch.bfloat16, "fp16", "bf16"}, optional
        What to cast to. Default: ``execution.precision`` of the active policy, where that is ``fp16`` or ``bf16``;
        else ``fp16``.
    fp16 : bool, optional
        ``True`` is another way to write ``dtype="fp16"``; ``False`` without a `dtype`, ``enabled=False``.
    enabled : bool
        ``False`` turns autocasting off inside the block, also one that is on around it, as in PyTorch.
    cache_enabled : bool
        Keep a weight that was cast until the outermost block ends.
    device_type : str, optional
        ``"cuda"`` or ``"cpu"``, or another that PyTorch can autocast. Default: ``"cuda"`` where CUDA is available, else
        ``"cpu"``.

    Raises
    ------
    InputError
        `dtype` is another one, or contradicts `fp16`; the device type is unknown.
    PolicyError
        On entering, when the active policy is strict and states another precision.

    Warns
    -----
    XpuRuntimeWarning
        On entering, when a policy that is not strict states another precision. The request of this call is done.

    Returns
    -------
    Autocast
        A context manager, which also decorates functions.

    Notes
    -----
    The policy is looked at on entering, so a decorated function follows the policy of each call; a function that
    ``torch.compile`` compiles, that of its compilation, which a change of the policy repeats. There ``autocast(...)``
    has to be called: an object made outside is refused. One object may be entered by several threads and several
    times; the state of autocasting belongs to a thread. A rule of a policy that states a precision for one module is
    not followed here: put ``autocast(enabled=False)`` into that module. Backward passes belong outside of the block.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.autocast(dtype=torch.bfloat16, device_type="cpu"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    if torch.compiler.is_compiling():
        # PyTorch's own object is what its compiler understands.
        word, device_name, enabled = _while_compiling(dtype, enabled, cache_enabled, fp16, device_type)
        return torch.autocast(  # type: ignore[no-any-return]
            device_name, dtype=_DTYPES[word], enabled=enabled, cache_enabled=cache_enabled
        )
    return Autocast(dtype, enabled, cache_enabled, fp16=fp16, device_type=device_type)


def _while_compiling(
    dtype: Any, enabled: bool, cache_enabled: bool, fp16: bool | None, device_type: str | None
) -> tuple[str, str, bool]:
    autocast_context = Autocast(dtype, enabled, cache_enabled, fp16=fp16, device_type=device_type)
    return autocast_context.dtype_name(), autocast_context.device_type, autocast_context.enabled


# What torch.compiler.assume_constant_result sets, which takes seconds to import the compiler.
_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Autocast:
    """A block in which PyTorch casts to half precision. Made by `autocast`, which takes the same arguments."""

    def __init__(
        self,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool = True,
        *,
        fp16: bool | None = None,
        device_type: Literal["cuda", "cpu"] | str | None = None,
    ) -> None:
        flags = {"enabled": enabled, "cache_enabled": cache_enabled, "fp16": fp16}
        check_types(dict.fromkeys(flags, FLAG), flags, optional=["fp16"])
        word = _WORDS.get(dtype) if isinstance(dtype, (str, torch.dtype)) else None
        if dtype is not None and word is None:
            msg = f"autocast: dtype {dtype!r} is none of torch.float16, torch.bfloat16, 'fp16' and 'bf16'"
            raise InputError(msg)
        if (fp16 and word == "bf16") or (fp16 is False and word == "fp16"):
            msg = f"autocast: fp16={fp16} and dtype={dtype!r} contradict each other. Fix: leave one of them out"
            raise InputError(msg)
        if device_type is not None and not _available(device_type):
            msg = f"autocast: PyTorch does not autocast on device_type={device_type!r}; it does on 'cuda' and 'cpu'"
            raise InputError(msg)
        self._word = "fp16" if fp16 else word
        self.enabled = enabled and not (fp16 is False and word is None)
        self._cache_enabled = cache_enabled
        self._device_type = device_type
        self._local = threading.local()

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            raise InputError(_MADE_OUTSIDE)
        dtype = _DTYPES[self.dtype_name()]
        inner = torch.autocast(self.device_type, dtype=dtype, enabled=self.enabled, cache_enabled=self._cache_enabled)
        inner.__enter__()
        self._entered().append(inner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered()
        if not entered:
            raise InputError("this autocast is not entered in this thread, or its with block has been left already")
        entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: _Function) -> _Function:
        """Return `function` with each call inside of this block. Raises `InputError` for one that suspends itself."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            name = getattr(function, "__qualname__", function)
            msg = (
                f"autocast: {name} suspends itself, and autocasting would stay on in its caller; "
                f"write a with block between two of its yields or awaits instead"
            )
            raise InputError(msg)

        word, enabled, cache_enabled, device_type = (
            self._word, self.enabled, self._cache_enabled, self._device_type,
        )  # fmt: skip

        @functools.wraps(function)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with autocast(word, enabled, cache_enabled, device_type=device_type):
                return function(*args, **kwargs)

        return cast  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        # A copy, such as that of a module which keeps one, is entered by nobody.
        make = functools.partial(Autocast, device_type=self._device_type)
        return make, (self._word, self.enabled, self._cache_enabled)

    def __repr__(self) -> str:
        shown = {"enabled": self.enabled, "cache_enabled": self._cache_enabled, "device_type": self._device_type}
        return f"autocast(dtype={self._word!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _entered(self) -> list[Any]:
        entered: list[Any] | None = getattr(self._local, "entered", None)
        if entered is None:
            entered = self._local.entered = []
        return entered

    @property
    def device_type(self) -> str:
        """Where operations are cast."""
        return self._device_type or ("cuda" if torch.cuda.is_available() else "cpu")

    def dtype_name(self) -> str:
        """Return ``"fp16"`` or ``"bf16"``, after checking it against the active policy."""
        active = context.active_policy()
        stated = "model" if active is None else active.policy.execution.precision
        if self._word is None and stated in _DTYPES:
            return stated
        word = self._word or "fp16"
        if self.enabled and active is not None and stated not in ("model", word):
            _contradicted(word, stated, active.policy)
        return word


def _contradicted(word: str, stated: str, policy: Policy) -> None:
    msg = (
        f"autocast asks for {word}, and execution.precision of the active policy is {stated}; "
        f"make them the same, or leave the precision out of the policy"
    )
    if policy.mode == "strict":
        raise PolicyError(msg)
    warn(f"{msg}. Autocasting to {word}.")


def _available(device_type: str) -> bool:
    try:
        return bool(torch.amp.autocast_mode.is_autocast_available(device_type))
    except RuntimeError:  # a word that names no device
        return False
