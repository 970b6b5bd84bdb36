# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CallContext`: a compiled policy that operations are called under; `use_policy` sets the ambient one."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from xpuruntime import _core
from xpuruntime.errors import InputError, PolicyError
from xpuruntime.policies import KernelPolicy, Policy, TuningPolicy, advisories
from xpuruntime.policies.call_facts import ANY_CALL, bounds_of
from xpuruntime.policies.document import Refused
from xpuruntime.policies.kernel_rules import ARRAY_OPS, RuleMatch, check_kernel
from xpuruntime.runtime.libraries.search import search_folders

if TYPE_CHECKING:
    import os

    from xpuruntime.policies.compiled_rules import CompiledRule

P = ParamSpec("P")
R = TypeVar("R")


class CallContext(_core.CallContext):
    """Context of a call in the core, with the policy that it is called under."""

    __slots__ = ("pinned", "policy")

    def __init__(
        self,
        site: _core.CallSite,
        *,
        allow_tf32: bool,
        deterministic: bool,
        policy: Policy,
        below_autograd: bool = False,
    ) -> None:
        super().__init__(site, allow_tf32=allow_tf32, deterministic=deterministic, below_autograd=below_autograd)
        self.policy = policy
        self.pinned: dict[tuple[str, str | tuple[str, ...]], CallContext] = {}


#: The innermost `use_policy` that is entered, as `_core.context_block` keeps it, with its place first; nothing outside
#: of all of them.
ambient: ContextVar[tuple[CallContext, Any, use_policy] | None] = ContextVar("xpuruntime_policy", default=None)
_ready = threading.RLock()
_prepared = False


def kernel_ids(op: str, name: str) -> tuple[str, ...]:
    """Return the ids of the core's kernels that a name means for an operation."""
    return tuple(_core.KernelRegistry.instance().find(op, name)) if op in ARRAY_OPS else ()


def prepare() -> None:
    """Tell the core once where the vendors' libraries and the measured times are, and what is wrong with kernels."""
    global _prepared
    with _ready:
        if _prepared:
            return
        _prepared = True  # before the plugins, which may call operations themselves
        from xpuruntime.ops.plugins import load_plugins
        from xpuruntime.ops.tuning_cache import use_tuning_cache

        use_advisories()
        use_vendor_libraries()
        use_tuning_cache()
        load_plugins()


_DEFAULT = Policy()
#: What was compiled, by policy. More than this many are forgotten, all at once.
_contexts: dict[Policy, CallContext] = {}
_default_context: CallContext | None = None
_MOST = 256


def _context_of(policy: Policy) -> CallContext:
    """Return the one context of a policy, so that all threads share the choices made in it."""
    context = _contexts.get(policy)
    if context is not None:
        return context
    prepare()
    with _ready:
        context = _contexts.get(policy)
        if context is None:
            context = _compile(policy, ())
            if len(_contexts) >= _MOST:
                _contexts.clear()
            _contexts[policy] = context
    return context


def _compile(policy: Policy, pin: tuple[str, ...]) -> CallContext:
    execution = policy.execution
    return CallContext(
        site=_core.CallSite(compile_rules(policy), pin=pin),
        allow_tf32=execution.tf32 is True or execution.precision == "tf32",
        deterministic=execution.deterministic,
        policy=policy,
    )


def _pin(under: CallContext, kernel: str | Sequence[str], op: str) -> CallContext:
    key = (op, kernel if isinstance(kernel, str) else _tuple_of(kernel))
    pinned = under.pinned.get(key)
    if pinned is not None:
        return pinned
    words = (key[1],) if isinstance(key[1], str) else key[1]
    for word in words:
        try:
            check_kernel(word, op)
        except Refused as refused:
            raise PolicyError(f"kernel=: {refused}") from None
    with _ready:
        pinned = under.pinned.get(key)
        if pinned is None:
            pinned = _compile(under.policy, words)
            if len(under.pinned) >= _MOST:
                under.pinned.clear()
            under.pinned[key] = pinned
    return pinned


def _tuple_of(kernel: Any) -> tuple[str, ...]:
    words = tuple(kernel) if isinstance(kernel, (list, tuple)) else ()
    if not words or not all(isinstance(word, str) for word in words):
        raise PolicyError(f"kernel= is {kernel!r}: name a kernel, or several in a list")
    return words


def _coerce(policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None) -> Policy:
    if policy is None:
        return _DEFAULT
    if isinstance(policy, KernelPolicy):
        return Policy(kernels=policy)
    return Policy.coerce(policy)


def ambient_context() -> CallContext:
    """Return the context of a call that names neither a policy nor a kernel: that of the ambient policy."""
    global _default_context
    block = ambient.get()
    if block is not None:
        return block[0]
    if _default_context is None:
        _default_context = _context_of(_DEFAULT)
    return _default_context


def call_context(policy: Any, kernel: str | Sequence[str] | None, op: str) -> CallContext:
    """Return where a call stands that names a policy, a kernel, or none of both.

    `op` is the operation's key in a `KernelPolicy`. Raises `PolicyError` for a policy or a kernel that is none.
    """
    context = ambient_context() if policy is None else _context_of(_coerce(policy))
    return context if kernel is None else _pin(context, kernel, op)


class use_policy:  # noqa: N801 - used like a function
    """Let a policy hold for the operations called inside a ``with`` block, or inside a function it decorates.

    It holds in this thread and in tasks started here, not in other threads or tasks: it is a context variable. Blocks
    nest; the innermost holds, and does not inherit from those around it. One may be entered many times, also by
    several threads at once.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path, dict, ``"auto"`` or None
        ``None`` is the default policy. A file is read once, here.

    Raises
    ------
    PolicyError
        When it cannot be read.

    Notes
    -----
    ``with use_policy(...) as policy`` gives the `Policy`. In a generator, do not yield inside the block: the policy
    would hold for whoever asks for the next value.

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

    def __init__(self, policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None) -> None:
        self._place = _context_of(_coerce(policy))
        self._policy = self._place.policy

    def __repr__(self) -> str:
        return f"use_policy({self._place.policy!r})"

    __enter__, __exit__ = _core.context_block(
        ambient, "_place", "_policy", "use_policy is left in another context than it was entered in"
    )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` with the policy around each call; of an ``async def``, until it returns."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InputError(
                f"use_policy cannot decorate {function.__qualname__}, which yields: the policy would hold for its"
                " caller too. Fix: use a with block around the operations inside it"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", call_async)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return call


def current_policy() -> Policy:
    """Return the policy that holds here for operations that name none."""
    block = ambient.get()
    return _DEFAULT if block is None else block[0].policy


def compile_rules(policy: Policy | KernelPolicy) -> _core.KernelRules:
    """Return the kernel rules that may match calls of no node and module, compiled once for each value."""
    if isinstance(policy, Policy):
        return _compile_kernels(policy.kernels, "strict" if policy.mode == "strict" else "prefer")
    return _compile_kernels(policy, "prefer")


@lru_cache(maxsize=256)
def _compile_kernels(policy: KernelPolicy, enforcement: str) -> _core.KernelRules:
    facts = ANY_CALL._replace(node=None, module=None)
    return core_rules(policy, policy.compiled_rules.matching(facts), enforcement)


def core_rules(
    policy: KernelPolicy, rules: Iterable[CompiledRule], enforcement: str, log: _core.DecisionLog | None = None
) -> _core.KernelRules:
    """Return rules as the core holds them, which compares sizes, types, devices and phases, and no names."""
    defaults = [
        {"match": {"op": op}, "use": list(preference.use), "source": preference.source}
        for op, preference in policy.compiled_rules.short_forms.items()
        if op in ARRAY_OPS
    ]
    return _core.KernelRules(
        **tuning_rule(policy),
        rules=[
            {"match": _match(rule.rule.match), "use": list(rule.use), "source": rule.source}
            for rule in rules
            if rule.use and rule.rule.match.op in (None, *ARRAY_OPS)
        ],
        defaults=defaults,
        enforcement=enforcement,
        auto_strategy=policy.auto_strategy,
        log=log,
    )


def tuning_rule(policy: KernelPolicy) -> dict[str, Any]:
    """Return the argument of `_core.KernelRules` that says how kernels are measured; none for the usual way."""
    rule = policy.tuning
    if rule == TuningPolicy():
        return {}
    return {"tuning": {"min_effect": rule.min_effect, "confidence": rule.confidence, "budget": rule.budget}}


def _match(match: RuleMatch) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for name in ("op", "device"):
        if (text := getattr(match, name)) is not None:
            stated[name] = text
    for name in ("m", "n", "k", "head_dim", "kv"):
        if (condition := getattr(match, name)) is not None:
            stated[name] = bounds_of(condition)
    for name, plural in (("dtype", "dtypes"), ("phase", "phases")):
        if (words := getattr(match, name)) is not None:
            stated[plural] = [words] if isinstance(words, str) else list(words)
    return stated


def use_vendor_libraries() -> None:
    """Tell the core the folders that may hold cuBLAS, cuDNN and others: wheels first, then the system's.

    The folders are listed, not searched; the core opens a library when a kernel of it is first asked for. What the
    process has loaded by then, PyTorch's own copy for example, is taken before any folder. Call it again after
    `sys.path` or the environment has changed.
    """
    _core.set_search_folders([folder.path for folder in search_folders()])


def use_advisories() -> None:
    """Have the core pass over kernels for calls in which they are known to be wrong."""
    rows = advisories.advisories()
    kernels = {kernel for row in rows for kernel in row.kernels if not kernel.startswith("torch.")}
    _core.Dispatcher.instance().set_advisor(_advice, kernels)


def _advice(kernel: str, version: str, call: dict[str, Any]) -> str:
    number = re.search(r"\d+(\.\d+)+", version)
    arch = "sm{}{}".format(*call["compute_capability"]) if call["device"] != "cpu" else ""
    library = tuple(map(int, number[0].split("."))) if number else ()
    operands, op = call["operands"], call["op"].removesuffix("_backward")
    facts = advisories.AdvisedCall(gradient=call["op"] != op, mask="", causal=False, queries=None, keys=None)
    if op == "attention":
        kinds = {"bool": "boolean", operands["q"]["dtype"]: "same"}
        facts = facts._replace(
            mask=kinds.get(operands["mask"]["dtype"], "other") if "mask" in operands else "",
            causal=call["attributes"]["causal"] != "none", queries=operands["q"]["shape"][2],
            keys=operands["k"]["shape"][2],
        )  # fmt: skip
    rows = advisories.holding(advisories.Platform((), library, arch or "cpu"))
    return next((str(row) for row in rows if row.op == op and row.concerns(kernel, facts)), "")
