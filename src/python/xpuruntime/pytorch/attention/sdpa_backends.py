# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SDPA backends of PyTorch: which are enabled, in which order, and one of them for a call."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import lookup

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

#: Id of a kernel of PyTorch's to the number of its backend (``torch.nn.attention.SDPBackend``).
BACKENDS = {"torch.math": 0, "torch.flash": 1, "torch.efficient": 2, "torch.cudnn": 3}

#: Id of a kernel of PyTorch's to what the names of the operators have that run it.
_MARKS = {
    "torch.math": "_attention_math",
    "torch.flash": "_flash_attention",
    "torch.efficient": "_efficient_attention",
    "torch.cudnn": "_cudnn_attention",
}

_GETTERS = _private_api.sdp_getters
_SETTERS = _private_api.sdp_setters
_core.use_sdp_switches(_GETTERS, _SETTERS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core.after_fork_in_sdp_backend_scope)
#: In the request of a scope, beside 1 more than the number of a backend.
_ONLY_IF_ENABLED = 8
#: Held while the switches are written.
_lock = threading.RLock()


class SdpaBackends(NamedTuple):
    """PyTorch's switches for attention."""

    enabled: tuple[bool, ...]
    order: tuple[int, ...]


@functools.cache
def fix_backend_order() -> None:
    """Have PyTorch fix its order of backends now, where CUDA is there.

    It does so once in a process, with its first attention on CUDA: on Hopper it puts cuDNN first, over whatever order
    was set before.
    """
    if torch.cuda.is_available():
        q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        _private_api.sdp_choice(q, q, q)


def read() -> SdpaBackends:
    """Return the settings of the process."""
    with by_backend(None), _lock:
        return SdpaBackends(tuple(bool(get()) for get in _GETTERS), tuple(int(n) for n in _private_api.sdp_order()))


def write(settings: SdpaBackends) -> None:
    """Set them for the process."""
    with by_backend(None), _lock:
        _enable(settings.enabled)
        _private_api.set_sdp_order(list(settings.order))


def restore(before: SdpaBackends, applied: SdpaBackends) -> None:
    """Set what `applied` had changed of `before` as it was; what somebody has set since stays as it is."""
    with by_backend(None), _lock:
        now = read()
        triples = zip(before.enabled, applied.enabled, now.enabled, strict=True)
        _enable(tuple(was if mine != was and here == mine else here for was, mine, here in triples))
        if applied.order != before.order and now.order == applied.order:
            _private_api.set_sdp_order(list(before.order))


def _enable(enabled: Iterable[bool]) -> None:
    # Those to be enabled first: threads that go past the override never find none.
    for set_one, value in sorted(zip(_SETTERS, enabled, strict=True), key=lambda pair: not pair[1]):
        set_one(value)


def is_enabled(kernel: str) -> bool:
    """Say whether PyTorch's switches let it choose a kernel, a key of `BACKENDS`."""
    with by_backend(None):
        return bool(_GETTERS[BACKENDS[kernel]]())


def kernels_in(operators: Iterable[str]) -> dict[str, str]:
    """Return those operators that run attention, each with the id of its kernel."""
    return {name: kernel for name in operators for kernel, mark in _MARKS.items() if mark in name}


def by_backend(kernel: str | None, *, only_if_enabled: bool = False) -> AbstractContextManager[None]:
    """Return a block inside of which one backend alone serves attention, in this thread and whatever it calls.

    PyTorch's switches belong to the process, so threads wait for each other: those that want the same run together,
    and one that wants something else waits, so keep the block short. Threads that call PyTorch past the override see
    the switches meanwhile.
    """
    return _core.SdpBackendScope(0 if kernel is None else _request(kernel, only_if_enabled))


def _request(kernel: str, only_if_enabled: bool) -> int:
    return (BACKENDS[kernel] + 1) | (_ONLY_IF_ENABLED if only_if_enabled else 0)


def backend_request(kernel: str, *, tuned: bool) -> int:
    """Return what a call that PyTorch serves wants of its switches, as `_core` has it."""
    return _request(kernel, tuned) if kernel in BACKENDS else 0


def choice(*args: Any, scale: float | None, enable_gqa: bool) -> int:
    """Return the number of the backend that PyTorch takes for a call as its switches are; -1 where none can serve."""
    if not _is_traced_for_cuda(args[0]):
        return _private_api.sdp_choice(*args, scale=scale, enable_gqa=enable_gqa)
    with _private_api.without_modes():
        fix_backend_order()
    for number in _private_api.sdp_order():
        kernel = next((id_ for id_, own in BACKENDS.items() if own == number), None)
        if kernel is not None and _can_use(kernel, False, *args, enable_gqa):
            return number
    return -1


def _is_traced_for_cuda(query: torch.Tensor) -> bool:
    """Say whether PyTorch's own function would find no device: in the dispatcher, that of traced tensors is meta."""
    return query.device.type == "cuda" and _private_api.dispatch_modes() > 0 and not query.is_nested


def _can_use(kernel: str, debug: bool, *args: Any) -> bool:
    """Say whether a backend is enabled and can serve a call; where it cannot and `debug` is set, PyTorch warns why."""
    cuda = torch.backends.cuda
    if kernel == "torch.math":
        return bool(cuda.math_sdp_enabled())
    ask = {
        "torch.flash": cuda.can_use_flash_attention,
        "torch.efficient": cuda.can_use_efficient_attention,
        "torch.cudnn": cuda.can_use_cudnn_attention,
    }
    return bool(ask[kernel](cuda.SDPAParams(*args), debug))


def rejection(kernel: str, *args: Any, scale: float | None, enable_gqa: bool) -> str:
    """Return why PyTorch cannot serve a call by one of its kernels; empty where it can."""
    if kernel == "torch.math":
        return ""
    query, mask = args[0], args[3]
    if kernel == "torch.efficient" and mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {mask.dtype}, and this one takes a boolean mask, or one of the queries' {query.dtype}"
    said: list[str] = []
    number = -1
    traced = _private_api.dispatch_modes() > 0 and not query.is_nested
    if traced and query.device.type == "cpu":
        like = (_like(x) if isinstance(x, torch.Tensor) else x for x in args)
        with _private_api.without_modes():
            return rejection(kernel, *like, scale=scale, enable_gqa=enable_gqa)
    with by_backend(kernel), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if _is_traced_for_cuda(query):
                if _can_use(kernel, False, *args, enable_gqa):
                    return ""
                _warning_here(lambda: _can_use(kernel, True, *args, enable_gqa))
                return next((lookup.without_source(str(warning.message)) for warning in caught), _unknown(kernel))
            number = _private_api.sdp_choice(*args, scale=scale, enable_gqa=enable_gqa)
        except RuntimeError as error:
            if not lookup.has_no_sdp_backend(error):
                return ""  # the call itself is wrong, and says so when it is made
        said = [str(warning.message) for warning in caught]
    if number == BACKENDS[kernel]:
        return ""
    reasons = (why for what, why in lookup.sdp_reasons(said) if _named(kernel, what))
    return next(reasons, _unknown(kernel))


def _warning_here(ask: Callable[[], bool]) -> None:
    """Call a function whose warnings PyTorch would otherwise hold back until the operator around has returned."""
    with _private_api.without_modes(), _private_api.without_torch_function():
        torch.zeros(1, device="cpu").apply_(lambda _: float(ask()))  # whose binding hands on what was warned of inside


def _unknown(kernel: str) -> str:
    return f"PyTorch finds that {kernel} cannot serve these arguments"


def static_size(size: Any) -> int:
    """Return a size as a number, also while code is traced for any size: then the one of the example, unguarded."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else 1024


def _like(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the looks of one that is traced: of those on the CPU, PyTorch says that math serves."""
    # Its memory is never touched.
    size, stride = ([static_size(n) for n in numbers] for numbers in (x.shape, x.stride()))
    return torch.empty_strided(size, stride, dtype=x.dtype, device="cpu").requires_grad_(x.requires_grad)


def _named(kernel: str, text: str) -> bool:
    kernel_names = {"torch.flash": "flash", "torch.efficient": "memory efficient", "torch.cudnn": "cudnn"}
    return text.lower().startswith(kernel_names[kernel])
