# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Scope of a policy: `set_kernel_policy`, `kernel_policy` and what they install."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError, PolicyError
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.pytorch.attention.advised import warn_of_any_choice
from xpuruntime.pytorch.call_scope import function_phases, generation_phases, module_paths
from xpuruntime.pytorch.capture.step_program import leave_torch_graph, patch_torch_graph
from xpuruntime.pytorch.compiler.compile_hooks import policy_changed
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy, coerce_policy
from xpuruntime.pytorch.dispatch.context import CONTEXT, PolicyFrame
from xpuruntime.pytorch.dispatch.overrides import registry
from xpuruntime.pytorch.dispatch.unmatched_rules import refuse_impossible, report
from xpuruntime.pytorch.switches.policy_switches import set_switches
from xpuruntime.pytorch.weights import check_storage, noting_placed
from xpuruntime.runtime.interruptible_waits import uninterrupted

if TYPE_CHECKING:
    import os

    from xpuruntime.lockfile.records import Lock
    from xpuruntime.pytorch.call_scope.generation_calls import LockedGeneration

_lock = threading.RLock()


class InstalledPolicy:
    """The overrides, hooks and switches of PyTorch that one policy needs, in place until `release`."""

    def __init__(self, active: CompiledPolicy, *, again: bool) -> None:
        self.active = active
        with contextlib.ExitStack() as undo:
            if not again:
                refuse_impossible(active)
            undo.callback(set_switches(active.policy, quiet=again).release)
            if not again:
                warn_of_any_choice(active)
            if active.by_module:
                module_paths.require(active.root)
                undo.callback(module_paths.release, active.root)
            if active.root is not None and active.policy.execution.weights.storage is not None:
                undo.callback(noting_placed(active.root, active.placed).close)
            if active.by_phase or any(override.startswith("unserved_") for override in active.overrides):
                function_phases.require()
                undo.callback(function_phases.release)
            generation_phases.require()
            undo.callback(generation_phases.release)
            if torch.backends.cuda.is_built():
                patch_torch_graph()
                undo.callback(leave_torch_graph)
            undo.callback(registry.release, registry.require(active.overrides))
            self._undo = undo.pop_all()

    def release(self) -> None:
        """Remove all of them. Idempotent."""
        self._undo.close()


class _Entered(NamedTuple):
    frame: PolicyFrame
    loss: _core.OnLoss


# All below that changes what is active runs by `uninterrupted`: a Ctrl-C is handled after it.
def _change(
    policy: Policy | CompiledPolicy | None,
    root: torch.nn.Module | None = None,
    generation: LockedGeneration | None = None,
) -> CompiledPolicy | None:
    with _lock, _busy():
        _forget_lost()
        before = CONTEXT.frames[-1].active
        install_policy(policy, root, generation)
        CONTEXT.frames[-1].active = None if CONTEXT.installed is None else CONTEXT.installed.active
        return before


def _enter(policy: Policy | None, root: torch.nn.Module | None, generation: LockedGeneration | None) -> _Entered:
    if policy is not None:
        check_storage(policy, root)
    with _lock, _busy():
        _forget_lost()
        install_policy(policy, root, generation)
        frame = PolicyFrame(None if CONTEXT.installed is None else CONTEXT.installed.active)
        CONTEXT.frames.append(frame)
        return _Entered(frame, _core.OnLoss(functools.partial(_lose, frame)))


def _leave(entered: _Entered) -> None:
    entered.loss.disarm()
    frame = entered.frame
    with _lock, _busy():
        _forget_lost()
        if frame is not CONTEXT.frames[-1]:  # one that was entered later stays active
            CONTEXT.frames.remove(frame)
            return
        CONTEXT.frames.pop()
        _install_last()


def _forget_lost() -> None:
    """End blocks that nobody can leave any more."""
    last = CONTEXT.frames[-1]
    while CONTEXT.lost_frames:
        CONTEXT.frames.remove(CONTEXT.lost_frames.pop())
    if last is not CONTEXT.frames[-1]:
        _install_last()


def _install_last() -> None:
    try:
        install_policy(CONTEXT.frames[-1].active)
    except BaseException:
        install_policy(None)
        raise


def _lose(frame: PolicyFrame) -> None:
    if frame not in CONTEXT.lost_frames:
        CONTEXT.lost_frames.append(frame)
    uninterrupted(_repair)


def _repair() -> None:
    """End blocks that are lost, unless a change goes on, which does it or leaves it to the next one."""
    if not _lock.acquire(blocking=False):
        return
    try:
        if not CONTEXT.changing:
            with _busy():
                _forget_lost()
    finally:
        _lock.release()


def install_policy(
    policy: Policy | CompiledPolicy | None,
    root: torch.nn.Module | None = None,
    generation: LockedGeneration | None = None,
) -> None:
    """Activate a policy process-wide in place of the active one.

    The `CompiledPolicy` of a former one can be given, to activate it again with the routes that it has found. `root`
    and `generation` are those of a `Policy`.
    """
    with _lock:
        before = CONTEXT.installed
        # What both need stays in place, since PyTorch replaces no kernel safely while another thread is inside of it,
        # and code that Dynamo has compiled is compiled again for other hooks of modules.
        kept = () if before is None else registry.require(before.active.overrides)
        if follows := before is not None and before.active.by_module:
            module_paths.require()
        if before is not None:
            # PyTorch's switches go back to the caller's before others are set, so that they are what is restored later.
            CONTEXT.set_process_policy(None)
            before.release()
            CONTEXT.installed = None
        try:
            if policy is not None:
                again = isinstance(policy, CompiledPolicy)
                if not isinstance(policy, CompiledPolicy):
                    policy = CompiledPolicy(policy, root=root, generation=generation)
                CONTEXT.installed = InstalledPolicy(policy, again=again)
        except BaseException:
            if before is not None:
                CONTEXT.installed = InstalledPolicy(before.active, again=True)
                CONTEXT.set_process_policy(before.active)
            raise
        finally:
            registry.release(kept)
            if follows:
                module_paths.release()
        now = None if CONTEXT.installed is None else CONTEXT.installed.active
        CONTEXT.set_process_policy(now)
        policy_changed(now)


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keep the garbage collector from changing what is being changed."""
    before, CONTEXT.changing = CONTEXT.changing, True
    try:
        yield
    finally:
        CONTEXT.changing = before


def set_kernel_policy(
    policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    root: torch.nn.Module | None = None,
    lock: Lock | str | os.PathLike[str] | None = None,
    **kernels: Any,
) -> None:
    """Choose the kernels of PyTorch's operations, in all threads, forward and backward, until another frame.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path, dict, ``"auto"`` or None
        Of a `Policy`, kernels, mode, and ``tf32``, ``precision`` and ``determinism`` of ``execution`` count. With
        ``None`` and no kernels: as `clear_kernel_policy`.
    root : torch.nn.Module, optional
        The module at which paths begin that rules ask for; default: the largest one that has been called.
    lock : path or Lock, optional
        A training lock that `xpuruntime.pytorch.lock` wrote, instead of a policy: its kernels with their
        configurations, where its validators match. Nothing is tuned.
    **kernels
        The fields of a `KernelPolicy` instead: ``matmul="cublasLt", attention="flash_v2"``.

    Raises
    ------
    LockError
        The lock does not match, cannot be read, or is not one of training.
    PolicyError
        Both are given, one of them is no policy, or the policy is strict and PyTorch cannot do what it asks for. The
        former policy stays active.
    UnsupportedOperationError
        It names a kernel that does not exist, and the former policy stays active. Or the former policy is strict, and
        rules of it for modules matched no call: it is replaced all the same.

    Notes
    -----
    PyTorch's kernels below autograd are replaced for the operations that the policy decides call by call; what PyTorch
    has a switch for, such as one SDPA backend for all calls, is set by that switch. Autograd, optimizers and
    ``torch.compile`` stay PyTorch's.

    What `torch.compile` has compiled is compiled once for each policy, unless two of them differ in the kernels of
    products alone, and found again when a policy returns; the code of eight policies is kept. What of compiled code a
    policy does not reach is warned of, or refused where it is strict; see `gaps`.

    Products of integers and of complex numbers, empty ones, and products with a vector are PyTorch's own under every
    policy.

    PyTorch does not replace a kernel safely while another thread is inside of it. Let no other thread compute while
    the first policy that decides an operation is set, and while the last one is cleared; from one to the next, the
    kernels stay in place.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> xrt_torch.set_kernel_policy(matmul="cpu.reference")
    >>> torch.mm(torch.ones(2, 3), torch.ones(3, 2)).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    >>> xrt_torch.clear_kernel_policy()
    """
    stated, generation = _policy_of(policy, kernels, root, lock)
    if stated is not None:
        check_storage(stated, root)
    report(uninterrupted(_change, stated, root, generation))


def clear_kernel_policy() -> None:
    """Give PyTorch its own kernels and switches back."""
    report(uninterrupted(_change, None))


def get_kernel_policy() -> KernelPolicy | None:
    """Return the kernels of the policy that `set_kernel_policy` or `kernel_policy` has activated, or ``None``."""
    installed = CONTEXT.installed
    return None if installed is None else installed.active.policy.kernels


class kernel_policy:  # noqa: N801 - used like a function
    """Activate a policy inside a ``with`` block, and the former one afterwards.

    It is active in all threads and tasks, since backward runs in other threads: of blocks that overlap, in two threads,
    two tasks of asyncio or a generator that is suspended inside of one, the one entered last is active until it is
    left, whichever of the others is left before.

    A block is entered and left as a whole: a Ctrl-C that comes meanwhile is handled after it. A block that Python never
    leaves ends as soon as it is gone.

    Parameters
    ----------
    policy, root, lock, **kernels
        As for `set_kernel_policy`. Without a policy and kernels, PyTorch's own kernels run inside.

    Warns
    -----
    XpuRuntimeWarning
        A rule for a module matched no call, and others that it is for ran. A strict policy raises
        `UnsupportedOperationError` then, when the block is left without another error.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.kernel_policy(matmul="cpu.reference"):
    ...     product = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    """

    def __init__(
        self,
        policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        root: torch.nn.Module | None = None,
        lock: Lock | str | os.PathLike[str] | None = None,
        **kernels: Any,
    ) -> None:
        self._policy, self._generation = _policy_of(policy, kernels, root, lock)
        self._root = root
        self._entered: list[_Entered] = []
        self._exiting: list[_Entered] = []

    def __enter__(self) -> KernelPolicy | None:
        self._enter()
        return None if self._policy is None else self._policy.kernels

    def _enter(self) -> None:
        uninterrupted(lambda: self._entered.append(_enter(self._policy, self._root, self._generation)))

    def _begin_exit(self) -> None:
        if not self._entered:
            raise InputError("this kernel_policy() is not entered, or its with block has been left already")
        self._exiting.append(self._entered.pop())

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del error, trace
        active = self._exiting[-1].frame.active
        self._leave()
        if kind is None:
            report(active)
            if self._policy is not None:
                # A first forward may have changed them, or somebody in the block.
                check_storage(self._policy, self._root, active.placed if active is not None else ())

    def _leave(self) -> None:
        if self._exiting:
            uninterrupted(lambda: _leave(self._exiting.pop()))

    __exit__ = _core.guarded(_exit, _leave, _begin_exit)


def _policy_of(
    policy: Any, kernels: dict[str, Any], root: Any, lock: Any
) -> tuple[Policy | None, LockedGeneration | None]:
    if root is not None and not isinstance(root, torch.nn.Module):
        msg = f"root is {type(root).__name__!r}: give the torch.nn.Module at which the paths of modules begin"
        raise TypeError(msg)
    if lock is not None:
        if policy is not None or kernels:
            raise PolicyError("a lock contains a policy: leave out the policy and kernels, or lock")
        from xpuruntime.pytorch.training_lock import policy_of_lock

        return policy_of_lock(lock)
    if root is not None and policy is None and not kernels:
        raise PolicyError("root is where the paths in a policy's rules begin, and no policy is given")
    if policy is not None and kernels:
        msg = (
            f"both a policy and {', '.join(kernels)} are given. "
            "Fix: put the kernels into the policy, or pass them alone"
        )
        raise PolicyError(msg)
    if kernels:
        return Policy(kernels=KernelPolicy(**kernels)), None
    return None if policy is None else coerce_policy(policy), None
