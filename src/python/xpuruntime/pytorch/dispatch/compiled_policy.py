# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CompiledPolicy`: a policy compiled for PyTorch's operations, with the routes found so far."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from xpuruntime import _core
from xpuruntime.errors import warn
from xpuruntime.ops.call_context import CallContext
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.policies.call_facts import SIZES
from xpuruntime.policies.kernel_rules import FAMILIES, KERNEL_IDS, ops_of
from xpuruntime.pytorch.attention.advised import rows_here
from xpuruntime.pytorch.attention.call import SDPA
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES, Route, call_fix, place_for, reason_of, refuse
from xpuruntime.pytorch.dispatch.unmatched_rules import RuleUse, impossible_rules
from xpuruntime.pytorch.explanation.requested import requests_other_kernel
from xpuruntime.pytorch.providers.bound import BoundKernel, bound_kernel, rejection_of_word

if TYPE_CHECKING:
    import os

    import torch

    from xpuruntime.errors import XpuRuntimeError
    from xpuruntime.policies import KernelRule
    from xpuruntime.policies.call_facts import CallFacts
    from xpuruntime.pytorch.attention.call import EntryPoint
    from xpuruntime.pytorch.call_scope.generation_calls import LockedGeneration
    from xpuruntime.pytorch.weights import LinearWeights

_Known = TypeVar("_Known")
_numbers = itertools.count(1)
#: Routes that are kept of one policy; with one more, all are forgotten and made anew.
_MOST = 16384
#: Overrides beside `scaled_dot_product_attention`, for whatever names a kernel of attention.
_ENTRIES = frozenset(("eager_attention", "flex_attention", "flex_options", "multi_head_attention", "varlen_attn"))
#: Operations whose kernels are measured where the policy leaves the choice.
_TUNED = frozenset(("matmul", "attention", "layer_norm", "rms_norm", "conv"))
_FREE = frozenset(("auto", "torch", "inductor", "torch.sdpa"))


class CompiledPolicy:
    """A policy, compiled for PyTorch's operations, with the routes found so far. Threads share one."""

    def __init__(
        self,
        policy: Policy,
        log: _core.DecisionLog | None = None,
        *,
        source: str = "",
        root: torch.nn.Module | None = None,
        generation: LockedGeneration | None = None,
    ) -> None:
        kernels = policy.kernels
        self.policy = policy
        self.log = log
        self.source = source
        self.root = root
        self.generation = generation
        #: Weights that were put into the model while the policy was active.
        self.placed: list[LinearWeights] = []
        self.rule_use = RuleUse(policy)
        self.keys: dict[str, str] = {}
        #: Sentences on classes of models whose calls go to the kernels of this policy.
        self.adapted: dict[str, None] = {}
        #: What adapters of classes and functions know of their eager calls.
        self.adapted_calls: dict[Any, Any] = {}
        #: Calls of a model's own code that measured times have left to it, which asks for nothing else.
        self.own_calls: set[Any] = set()
        self.number = next(_numbers)
        self.strict = policy.mode == "strict"
        self.by_phase = self.names_phases()
        self.by_module = self.names_modules()
        self.by_call = self.by_phase or self.by_module
        self.tunes = kernels.auto_strategy == "best_performance"
        self.ops = frozenset(op for op in FAMILIES if self._decides(op))
        self.attention_kernels = self.kernel_names("attention")
        self.overrides = self.ops | (_ENTRIES if self.attention_kernels - _FREE else frozenset())
        if self.ops & {"layer_norm", "rms_norm"}:
            self.overrides |= {"norm_classes"}
        if self.ops & {"swiglu", "geglu"}:
            self.overrides |= {"gated_units"}
        self.avoids = bool(rows_here()) and "auto" in self.attention_kernels
        if self.avoids:
            self.overrides |= {"attention"}
        if self.strict:
            self.overrides |= {f"unserved_{op}" for op in FAMILIES if requests_other_kernel(op, self.kernel_names(op))}
        self.routes: dict[Any, Route] = {}
        self.kinds: dict[Any, Route] = {}
        #: Routes by measured times that are not kept yet, since kept ones may serve without Python, where the device is
        #: not observed.
        self._waiting: dict[Any, Route] = {}
        self._by_size = frozenset(op for op in SIZES if any(map(_states_size, self._rules(op))))
        self._places: dict[Any, CallContext] = {}
        self._lock = threading.RLock()
        self._warned: set[tuple[Any, ...]] = set()

    def apart(self, log: _core.DecisionLog) -> CompiledPolicy:
        """Return the same policy once more, with routes of its own, whose decisions are recorded in `log` alone.

        What this one has warned of is not said again.
        """
        other = CompiledPolicy(self.policy, log, source=self.source, root=self.root)
        other._warned, other._lock, other.keys = self._warned, self._lock, self.keys
        return other

    def _decides(self, op: str) -> bool:
        from xpuruntime.pytorch.switches.policy_switches import decided_by_switches

        if self._rules(op):
            return True
        kernel_names = self.policy.kernels.get(op)
        if kernel_names is None:
            return self.tunes and op in _TUNED
        return not decided_by_switches(self.policy, op)

    def names_phases(self, op: str | None = None) -> bool:
        """Say whether a rule asks for the phase of a call: of an operation, or of any."""
        return any(rule.match.phase is not None for rule in self._rules(op))

    def names_modules(self, op: str | None = None) -> bool:
        """Say whether a rule asks for the module of a call: of an operation, or of any."""
        return any(rule.match.module is not None or rule.match.node is not None for rule in self._rules(op))

    def impossible_rules(self, root: torch.nn.Module | None) -> list[tuple[str, str, str, str]]:
        """Return the rules that can match no call, with the modules of `root`: operation, rule, reason and a fix."""
        return impossible_rules(self.policy, root)

    def _rules(self, op: str | None) -> list[KernelRule]:
        return [rule for rule in self.policy.kernels.rules if rule.use is not None and _is_for(rule, op)]

    def kernel_names(self, op: str) -> frozenset[str]:
        """Return all words that the policy states for an operation."""
        uses = [self.policy.kernels.get(op), *(rule.use for rule in self._rules(op))]
        return frozenset(
            kernel_name for use in uses if use for kernel_name in ((use,) if isinstance(use, str) else use)
        )

    def leaves_kernels_open(self) -> bool:
        """Say whether it names no kernel and has no rule: all of an operation's calls are left to ``auto``."""
        return not self.policy.kernels.rules and not any(self.kernel_names(op) - {"auto"} for op in FAMILIES)

    def call_context(self) -> tuple[str, str]:
        """Return phase and module of the call that runs in this thread; empty where no rule asks for it."""
        return context.phase() if self.by_phase else "", module_paths.current() if self.by_module else ""

    def decides(self, op: str) -> bool:
        """Say whether calls of `op` have to be looked at one by one."""
        return op in self.ops

    def resolve(
        self,
        key: Any,
        facts: CallFacts,
        *,
        description: str = "",
        allow_tf32: bool = False,
        deterministic: bool = False,
        skip: tuple[tuple[str, str], ...] = (),
        unsupported_reason: str = "",
        by_own_code: bool = False,
        entry: EntryPoint | None = None,
        keep: bool = True,
    ) -> Route:
        """Return the route for calls of one kind, found once and kept under `key`.

        With `by_own_code`, a model computes the call itself: no kernel of PyTorch's that a policy names does it.
        """
        op, module, phase = str(facts.op), str(facts.module or ""), str(facts.phase or "")
        if entry is None and op == "attention":
            entry = SDPA
        wanted = self.policy.kernels.compiled_rules.match(facts)
        use, source = wanted.use, wanted.source
        if CONTEXT.thread.route_pin is not None:
            use, source = ("auto",), "default"
        if self.by_module:
            self.rule_use.note(facts)
        if source != "default":
            source = self.source or source
        skipped = dict(skip)
        passed_over: list[tuple[str, str]] = []
        route: Route | None = None
        for name in use:
            reason = skipped.get(name) or self._rejection(name, facts, unsupported_reason, entry)
            if by_own_code and not reason and NATIVE_NAMES[op].get(name, DEFAULT_ID[op]) != DEFAULT_ID[op]:
                reason = unsupported_reason
            if reason:
                passed_over.append((name, reason))
                continue
            kernel, target = self._kernel_of(op, name, source, module, allow_tf32, deterministic, entry)
            route = Route(
                op, use, source, kernel, place=target, passed_over=tuple(passed_over), module=module, phase=phase
            )
            route.open = self.tunes and name == "auto" and (entry is None or entry.name == SDPA.name)
            break
        if route is None:
            default = DEFAULT_ID[op] if entry is None else entry.default
            route = Route(op, use, source, default, passed_over=tuple(passed_over), module=module, phase=phase)
            if self.strict:
                self.keep(key, None)
                raise refuse(route, description or op, self.keys, with_vector=op == "matmul" and facts.n == 1)
            self._warn(route, description)
        if keep:
            self.keep(key, route)
        return route

    def keep_native(self, key: Any, op: str) -> Route:
        """Keep PyTorch's own kernel for calls of one kind that the policy does not speak of. Nothing is said."""
        native = Route(op, ("auto",), "default", DEFAULT_ID[op])
        self.keep(key, native)
        return native

    def _rejection(self, name: str, facts: CallFacts, unsupported_reason: str, entry: EntryPoint | None) -> str:
        """Return why a kernel name can never serve on a device, or nothing."""
        reason = "" if entry is None else entry.rejection(name)
        if reason:
            return reason
        native = (NATIVE_NAMES[str(facts.op)] if entry is None else entry.kernel_names).get(name)
        if native is not None:
            device = str(facts.device).partition(":")[0]
            if device != "cuda" and native in ("torch.cudnn", "torch.efficient"):
                return f"{native} runs on CUDA, and the operands are on {device}"
            return ""
        if name == "auto":
            return ""
        ops = KERNEL_IDS.get(name.partition("@")[0], ((), ""))[0]
        if ops and facts.op not in ops:  # by a rule that states no operation
            return f"it has no kernel for {facts.op}. Fix: state op: {ops[0]} in the match of the rule"
        return rejection_of_word(name, str(facts.op)) or unsupported_reason

    def place(
        self, op: str, kernel_name: str, source: str, module: str, *, allow_tf32: bool, deterministic: bool
    ) -> CallContext:
        """Return the context of `_core`'s operations for a kernel name of the policy. One for all calls of a kind."""
        key = (op, kernel_name, source, module, allow_tf32, deterministic)
        with self._lock:
            call_context = self._places.get(key)
            if call_context is None:
                call_context = self._places[key] = place_for(
                    self.policy, op, (kernel_name,), source, module=module, allow_tf32=allow_tf32,
                    deterministic=deterministic, log=self.log,
                )  # fmt: skip
        return call_context

    def keep(self, key: Any, route: Route | None) -> None:
        """Keep a route for calls of one kind, or none, so that it is looked for again."""
        with self._lock:
            before = self.routes.pop(key, None)
            self._waiting.pop(key, None)
            if len(self.routes) >= _MOST:
                self.routes.clear()
            if route is not None:
                self.routes[key] = route
        if before is not None and before.place is None:
            _core.forget_native_calls()

    def keep_adapted(self, key: Any, known: _Known) -> _Known:
        """Keep, and return, what an adapter knows of calls of one kind, which holds as long as the policy does."""
        if CONTEXT.thread.route_pin is None:
            with self._lock:
                if len(self.adapted_calls) >= _MOST:
                    self.adapted_calls.clear()
                self.adapted_calls[key] = known
        return known

    def keep_own(self, key: Any) -> None:
        """Keep that calls of one kind run the code of the model, until measured times are asked anew."""
        with self._lock:
            if len(self.own_calls) >= _MOST:
                self.own_calls.clear()
            self.own_calls.add(key)

    def of_kind(self, key: Any, kind: Any) -> Route | None:
        """Return, and keep under `key`, the route of calls that differ in sizes alone; ``None`` where none is known.

        A kernel may refuse some of them: then the call is resolved as any other.
        """
        if CONTEXT.thread.route_pin is not None:
            return None
        if (waiting := self._waiting.get(key)) is not None:
            CONTEXT.observe_device(waiting.lags[0].device)
            if key in self._waiting:
                if any(lag.settled for lag in waiting.lags):
                    self.keep(key, waiting)
                return waiting
        known = self.kinds.get(kind)
        if known is None:
            return None
        route = known.for_other_sizes()
        self.keep(key, route)
        return route

    def keep_later(self, key: Any, route: Route) -> None:
        """Have `of_kind` return a route, observe the device at each such call, and keep it when enough was observed."""
        with self._lock:
            self._waiting[key] = route

    def keep_kind(self, kind: Any, route: Route) -> None:
        """Keep a route for calls that differ in sizes alone, unless that is what it depends on; no `kind`: it is."""
        sizes_count = route.passed_over or route.open or route.tuned or route.op in self._by_size
        if kind is not None and not sizes_count:
            with self._lock:
                if len(self.kinds) >= _MOST:
                    self.kinds.clear()
                self.kinds[kind] = route

    def forget_tuned(self) -> None:
        """Forget the routes that measured times have decided; the times themselves are kept."""
        with self._lock:
            self._waiting.clear()
            self.own_calls.clear()
            for key in [key for key, route in self.routes.items() if route.tuned or route.open]:
                del self.routes[key]
        _core.forget_native_calls()

    def _kernel_of(
        self,
        op: str,
        kernel_name: str,
        source: str,
        module: str,
        allow_tf32: bool,
        deterministic: bool,
        entry: EntryPoint | None,
    ) -> tuple[str, CallContext | BoundKernel | None]:
        native = (NATIVE_NAMES[op] if entry is None else entry.kernel_names).get(kernel_name)
        if native is not None:
            return native, None
        if kernel_name == "auto":
            return DEFAULT_ID[op] if entry is None else entry.default, None
        bound = bound_kernel(kernel_name, op)
        if bound is not None:
            return bound.kernel.id, bound
        return kernel_name, self.place(
            op, kernel_name, source, module, allow_tf32=allow_tf32, deterministic=deterministic
        )

    def refused(self, route: Route, error: XpuRuntimeError) -> tuple[tuple[str, str], ...]:
        """Return what to give `route` as `skip` after its kernel has refused: name and reason."""
        if isinstance(route.place, BoundKernel):
            word = route.place.word
            return (*route.passed_over, (word, error.reason.removeprefix(f"{word}: ")))
        return (*route.passed_over, (route.kernel, reason_of(error, route.op, route.kernel)))

    def is_first(self, mark: tuple[Any, ...]) -> bool:
        """Say whether what a mark stands for is to be warned of, which is once."""
        with self._lock:
            first = mark not in self._warned
            self._warned.add(mark)
        return first

    def _warn(self, route: Route, description: str) -> None:
        if self.policy.mode == "auto":  # asks for no word about it
            return
        if not self.is_first((route.op, route.source, route.passed_over)):
            return
        key = self.keys.get(route.source, route.source)
        msg = (
            f"{description or route.op} runs by {route.kernel}, though {key} asks for {', '.join(route.asked)}: "
            f"{route.reasons}"
        )
        if "Fix: " not in msg:
            msg += f". Fix: {call_fix(route)}"
        warn(msg)


def _is_for(rule: KernelRule, op: str | None) -> bool:
    return op is None or (rule.match.op == op if rule.match.op else op in ops_of(rule.use))


def _states_size(rule: KernelRule) -> bool:
    sizes = ("m", "n", "k", "kv")  # calls of one kind have one head_dim
    return any(getattr(rule.match, size) is not None for size in sizes)


def coerce_policy(policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any]) -> Policy:
    """Return the `Policy` that any form of one means. Raises `PolicyError`."""
    if isinstance(policy, KernelPolicy):
        return Policy(kernels=policy)
    return Policy.coerce(policy)
