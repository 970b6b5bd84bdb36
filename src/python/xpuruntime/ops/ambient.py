# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The ambient policy: which policy holds where a call names none."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime import _core
from xpuruntime.errors import InputError, PolicyError
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.policies.kernel_ids import check_kernel
from xpuruntime.policies.refusal import Refused

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Mapping, Sequence

__all__ = ["Place", "current_policy", "place", "prepare", "use_policy"]


class Place(NamedTuple):
    """Where a call stands: the policy that holds, and what it says beyond kernels."""

    site: _core.CallSite
    allow_tf32: bool
    deterministic: bool
    policy: Policy


#: The place of the innermost `use_policy`; nothing outside of all of them.
ambient: ContextVar[Place | None] = ContextVar("xpuruntime_policy", default=None)
_ready = threading.RLock()
_prepared = False


def prepare() -> None:
    """Tell the core once where the vendors' libraries and the measured times are."""
    global _prepared  # noqa: PLW0603
    with _ready:
        if _prepared:
            return
        _prepared = True  # before the plugins, which may call operations themselves
        from xpuruntime.ops.libraries import use_vendor_libraries
        from xpuruntime.ops.plugins import load_plugins
        from xpuruntime.ops.tuning_cache import use_tuning_cache

        use_vendor_libraries()
        use_tuning_cache()
        load_plugins()


@lru_cache(maxsize=256)
def _make_place(policy: Policy, pin: tuple[str, ...]) -> Place:
    from xpuruntime.ops.rules import compile_rules

    prepare()
    execution = policy.execution
    return Place(
        site=_core.CallSite(compile_rules(policy), pin=pin),
        allow_tf32=execution.tf32 is True or execution.precision == "tf32",
        deterministic=execution.determinism == "run_to_run",
        policy=policy,
    )


_DEFAULT = Policy()


def _coerce(policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None) -> Policy:
    if policy is None:
        return _DEFAULT
    if isinstance(policy, KernelPolicy):
        return Policy(kernels=policy)
    return Policy.coerce(policy)


def _pin(kernel: str | Sequence[str] | None, op: str) -> tuple[str, ...]:
    if kernel is None:
        return ()
    words = (kernel,) if isinstance(kernel, str) else tuple(kernel)
    if not words:
        raise InputError("kernel= is empty: name a kernel, or leave it out")
    for word in words:
        try:
            check_kernel(word, op)
        except Refused as refused:
            raise PolicyError(f"kernel=: {refused}") from None
    return words


def place(policy: Any, kernel: str | Sequence[str] | None, op: str) -> Place:
    """Return where a call stands that names a policy, a kernel, or none of both.

    `op` is the operation's key in a `KernelPolicy`. Raises `PolicyError` for a policy or a kernel that is none.
    """
    if policy is None:
        found = ambient.get() or _make_place(_DEFAULT, ())
        if kernel is None:
            return found
        return _make_place(found.policy, _pin(kernel, op))
    return _make_place(_coerce(policy), _pin(kernel, op))


@contextlib.contextmanager
def use_policy(
    policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Generator[Policy, None, None]:
    """Let a policy hold for the operations called inside a ``with`` block.

    It holds in this thread and in tasks started here, not in other threads or tasks: it is a context variable. Blocks
    nest; the innermost holds, and does not inherit from those around it.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path, dict, ``"auto"`` or None
        ``None`` is the default policy.

    Yields
    ------
    Policy

    Raises
    ------
    PolicyError
        When it cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> import xpuruntime as xrt
    >>> a = np.ones((2, 3), np.float32)
    >>> with xrt.use_policy(xrt.KernelPolicy(matmul="cpu.reference")):
    ...     out = xrt.ops.matmul(a, a.T)
    >>> out.tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    token = ambient.set(_make_place(_coerce(policy), ()))
    try:
        yield ambient.get().policy  # type: ignore[union-attr]
    finally:
        ambient.reset(token)


def current_policy() -> Policy:
    """Return the policy that holds here for operations that name none."""
    found = ambient.get()
    return _DEFAULT if found is None else found.policy
