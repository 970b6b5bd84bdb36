# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Active policies: `active_policy` of the calling thread, `thread_policy`, `set_process_policy`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.overrides import fast_kernels

if TYPE_CHECKING:
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["active_policy", "forget_tuned_routes", "policy_version", "set_process_policy", "thread_policy"]


class _Local(threading.local):
    #: A policy for this thread, in a tuple of one; nothing: the process-wide one.
    active: tuple[CompiledPolicy | None] | None = None


_local = _Local()
_tracing_state = _private_api.tracing_state
_global: CompiledPolicy | None = None
_version = 0


def active_policy() -> CompiledPolicy | None:
    """Return the policy that holds for calls in this thread. None does where ``torch.jit.trace`` writes down calls."""
    own = _local.active
    found = _global if own is None else own[0]
    return found if found is None or _tracing_state() is None else None


def policy_version() -> int:
    """Return a number that is another one whenever another policy holds process-wide."""
    return _version


def forget_tuned_routes() -> None:
    """Have the policy that holds process-wide, and the one of this thread, decide tuned calls anew."""
    for active in (_global, active_policy()):
        if active is not None:
            active.forget_tuned()


def set_process_policy(active: CompiledPolicy | None) -> CompiledPolicy | None:
    """Let a policy hold in all threads that have none of their own, those of autograd included. Returns the former."""
    global _global, _version
    before, _global = _global, active
    if active is None:
        fast_kernels.set_policy(None)
    else:
        fast_kernels.set_policy(
            active.routes,
            active.call_context if active.by_call else None,
            phases=active.by_phase and active.in_fast_path,
            modules=active.by_module and active.in_fast_path,
        )
    _version += 1
    return before


class thread_policy:  # noqa: N801 - used like a function
    """Let a policy hold for the calls of this thread inside a ``with`` block, whatever holds process-wide.

    Autograd's threads do not see it: for inference. The overrides that it needs must be in place; see
    `xpuruntime.pytorch.dispatch.overrides.registry.require`.

    Parameters
    ----------
    active : CompiledPolicy or None
        ``None``: no policy, so that PyTorch's own kernels run.
    """

    __slots__ = ("_active", "_before", "_entered")

    def __init__(self, active: CompiledPolicy | None) -> None:
        self._active = (active,)
        self._before: tuple[CompiledPolicy | None] | None = None
        self._entered = False

    def _enter(self) -> None:
        self._before = _local.active
        self._entered = True
        fast_kernels.add_thread(self)
        _local.active = self._active

    def _leave(self, *_: object) -> None:
        if self._entered:
            _local.active = self._before
            fast_kernels.drop_thread(self)
            self._entered = False

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)
