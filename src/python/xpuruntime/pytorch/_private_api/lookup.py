# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lookup of PyTorch's private names, its messages that are read, and the reset of ``fully_shard`` modules."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "NOT_FOUND",
    "REFUSES",
    "TABLE",
    "PrivateName",
    "attribute",
    "find",
    "has_no_sdp_backend",
    "is_capture_error",
    "is_kernel_gone",
    "is_second_backward",
    "later",
    "reset_fully_sharded",
    "sdp_reasons",
    "take",
    "without_source",
]


class PrivateName(NamedTuple):
    """One name of PyTorch's that is private."""

    path: str
    why: str
    without: str


#: All of them, in the order in which they are taken.
TABLE: list[PrivateName] = []

NOT_FOUND = object()
REFUSES = "what needs it is refused"


def find(path: str) -> Any:
    """Return what has this name, or `NOT_FOUND`; imports its module."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            located: Any = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:
            continue
        for part in parts[count:]:
            located = getattr(located, part, NOT_FOUND)
            if located is NOT_FOUND:
                break
        if located is not NOT_FOUND:
            return located
    return NOT_FOUND


def take(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Any:
    """Return what has this name; `otherwise` where it is missing, or a function that refuses."""
    TABLE.append(PrivateName(path, why, without))
    value = find(path)
    if value is not NOT_FOUND:
        return value
    return _refusing(path, why) if otherwise is NOT_FOUND else otherwise


def later(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Callable[[], Any]:
    """Return a function that returns what has this name, whose module is imported by its first call."""
    TABLE.append(PrivateName(path, why, without))

    @functools.cache
    def get() -> Any:
        value = find(path)
        if value is not NOT_FOUND:
            return value
        return _refusing(path, why) if otherwise is NOT_FOUND else otherwise

    return get


def attribute(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Callable[[Any], Any]:
    """Return a function that returns this attribute of an object; `otherwise` of one that lacks it, or it refuses."""
    TABLE.append(PrivateName(path, why, without))
    name = path.rpartition(".")[2]

    def get(owner: Any) -> Any:
        value = getattr(owner, name, otherwise)
        return _refusing(path, why)() if value is NOT_FOUND else value

    return get


def _refusing(path: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = f"this PyTorch {torch.__version__} has no {path}, {why}. Fix: install a release that xpuruntime supports"
        raise UnsupportedOperationError(msg, engine="torch")

    return refuse


def is_kernel_gone(error: RuntimeError) -> bool:
    """Whether a kernel that was looked up has been deregistered. Otherwise: the error goes to the caller."""
    return "has been invalidated" in str(error)


def has_no_sdp_backend(error: RuntimeError) -> bool:
    """Whether no enabled backend of attention serves a call. Otherwise: its arguments count as wrong."""
    return any(text in str(error) for text in ("No available kernel", "No viable backend"))


def sdp_reasons(warnings: list[str]) -> list[tuple[str, str]]:
    """Return the warnings that a backend is not used, each with the next one, which has the reason. Otherwise: none."""
    pairs = itertools.pairwise(warnings)
    return [(what, without_source(why)) for what, why in pairs if "not used because" in what]


def without_source(warning: str) -> str:
    """Return a warning without the line of PyTorch's source that it comes from. Otherwise: as it is."""
    return warning.split("(Triggered internally", 1)[0].strip(" .")


def is_capture_error(error: BaseException) -> bool:
    """Whether an error is about the capture of a CUDA graph. Otherwise: it goes to the caller as it is."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def is_second_backward(error: RuntimeError) -> bool:
    """Whether a graph has no saved tensors any more. Otherwise: the error goes to the caller."""
    return "backward through the graph a second time" in str(error)


def reset_fully_sharded(modules: Iterable[Any]) -> None:
    """Let modules of ``fully_shard`` begin anew after a step that was broken off: parameters are sharded again.

    PyTorch's own ``reset_iter_state``, of 2.13, waits for events of the failed step, which those of a capture refuse.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FSDPModule) and hasattr(module, "_get_fsdp_state"):
            _reset_fsdp_state(module._get_fsdp_state())


def _reset_fsdp_state(state: Any) -> None:
    idle = type(state._training_state).IDLE
    for shared, names in (
        (state._comm_ctx, ("all_gather_state", "reduce_scatter_state")),
        (state._state_ctx, ("iter_forward_root", "post_optim_event")),
    ):
        for name in names:
            if hasattr(shared, name):
                setattr(shared, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        getattr(state._comm_ctx, name, []).clear()
    state._state_ctx.post_backward_final_callback_queued = False
    state._modules_to_run_forward.clear()
    state._training_state = idle
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
            if hasattr(group, name):
                setattr(group, name, None)
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()


_HALF_WAY = "modules stay as a step that was broken off left them"
TABLE.append(PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "state to reset", _HALF_WAY))
TABLE.append(
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
        "which gives the memory of whole parameters back",
        _HALF_WAY,
    )
)
