# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Held`: a policy, compiled for PyTorch's operations, and which one holds where."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import XpuRuntimeWarning
from xpuruntime.ops.ambient import Place
from xpuruntime.policies.kernel_ids import FAMILIES
from xpuruntime.pytorch import _private_api, calls, module_paths
from xpuruntime.pytorch.attention.entries import SDPA
from xpuruntime.pytorch.call_facts import facts_of_call
from xpuruntime.pytorch.overriding import gates
from xpuruntime.pytorch.routing import DEFAULT_ID, NATIVE_WORDS, Route, place_for, reason_of, refuse
from xpuruntime.pytorch.rule_use import RuleUse

if TYPE_CHECKING:
    import torch

    from xpuruntime.policies import KernelRule, Policy
    from xpuruntime.pytorch.attention.entries import EntryPoint

__all__ = ["Held", "current", "forget_tuned", "holding", "set_global", "version"]

_numbers = itertools.count(1)
#: Routes that are kept of one policy; with one more, all are forgotten and made anew.
_MOST = 16384
#: Overrides beside `scaled_dot_product_attention`, for whatever names a kernel of attention.
_ENTRIES = frozenset(("flex_attention", "flex_options", "multi_head_attention", "varlen_attn"))
_FREE = frozenset(("auto", "torch", "torch.sdpa"))


class Held:
    """A policy, compiled for PyTorch's operations, with the routes found so far. Threads share one.

    Parameters
    ----------
    policy : Policy
    log : DecisionLog, optional
        Where the core records what it decides under it, instead of the log of the process.
    source : str
        What asks for its kernels, where that is a call and no key of the policy: `routing.BY_CALL`.
    root : Module, optional
        At which the paths of modules begin.

    Attributes
    ----------
    number : int
        Another one for each that is made.
    ops : frozenset of str
        Operations whose calls the policy decides one by one; what it settles by PyTorch's own switches, or leaves
        alone, is not among them.
    overrides : frozenset of str
        What of `xpuruntime.pytorch.overriding.registry` the policy needs: `ops`, and the functions for attention that
        no switch settles.
    attention_words : frozenset of str
        All that it asks for in attention, in its short form and its rules.
    keys : dict of str to str
        What messages call a key of this policy, where it was made of another one.
    strict : bool
    by_phase, by_module : bool
        Whether some rule asks for it; otherwise nobody needs to find it out.
    by_call : bool
        Whether some rule asks for one of them.
    in_gates : bool
        Whether gates know by themselves all that rules ask for, so that they may call kernels of ours without Python.
    routes : dict
        From a key that an override makes of its arguments to the route; read without a lock.
    rule_use : RuleUse
    """

    def __init__(
        self,
        policy: Policy,
        log: _core.DecisionLog | None = None,
        *,
        source: str = "",
        root: torch.nn.Module | None = None,
    ) -> None:
        kernels = policy.kernels
        self.policy = policy
        self.log = log
        self.source = source
        self.root = root
        self.rule_use = RuleUse(policy)
        self.keys: dict[str, str] = {}
        self.number = next(_numbers)
        self.strict = policy.mode == "strict"
        self.by_phase = self.names_phases()
        self.by_module = self.names_modules()
        self.by_call = self.by_phase or self.by_module
        self.in_gates = not self.by_call or gates.knows_circumstances()
        self.tunes = kernels.auto_strategy == "best_performance"
        self.ops = frozenset(op for op in FAMILIES if self._decides(op))
        self.attention_words = self._words("attention")
        self.overrides = self.ops | (_ENTRIES if self.attention_words - _FREE else frozenset())
        self.routes: dict[Any, Route] = {}
        self._places: dict[Any, Place] = {}
        self._lock = threading.RLock()
        self._warned: set[tuple[Any, ...]] = set()

    def apart(self, log: _core.DecisionLog) -> Held:
        """Return the same policy once more, with routes of its own, whose decisions are recorded in `log` alone.

        What this one has warned of is not said again.
        """
        other = Held(self.policy, log, source=self.source, root=self.root)
        other._warned, other._lock, other.keys = self._warned, self._lock, self.keys
        return other

    def _decides(self, op: str) -> bool:
        from xpuruntime.pytorch.switches import settled_by_switches

        if self._rules(op):
            return True
        words = self.policy.kernels.get(op)
        if words is None:
            return self.tunes
        return not settled_by_switches(self.policy, op)

    def names_phases(self, op: str | None = None) -> bool:
        """Say whether a rule asks for the phase of a call: of an operation, or of any."""
        return any(rule.match.phase is not None for rule in self._rules(op))

    def names_modules(self, op: str | None = None) -> bool:
        """Say whether a rule asks for the module of a call: of an operation, or of any."""
        return any(rule.match.module is not None or rule.match.node is not None for rule in self._rules(op))

    def _rules(self, op: str | None) -> list[KernelRule]:
        rules = self.policy.kernels.rules
        return [rule for rule in rules if rule.use is not None and (op is None or rule.match.op in (None, op))]

    def _words(self, op: str) -> frozenset[str]:
        uses = [self.policy.kernels.get(op), *(rule.use for rule in self._rules(op))]
        return frozenset(word for use in uses if use for word in ((use,) if isinstance(use, str) else use))

    def circumstances(self) -> tuple[str, str]:
        """Return phase and module of the call that runs in this thread; empty where no rule asks for it."""
        return calls.phase() if self.by_phase else "", module_paths.current() if self.by_module else ""

    def decides(self, op: str) -> bool:
        """Say whether calls of `op` have to be looked at one by one."""
        return op in self.ops

    def route(
        self,
        key: Any,
        op: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        allow_tf32: bool = False,
        deterministic: bool = False,
        skip: tuple[tuple[str, str], ...] = (),
        phase: str = "",
        module: str = "",
        doing: str = "",
        natives: tuple[str, ...] | None = None,
        unable: str = "",
        entry: EntryPoint | None = None,
        keep: bool = True,
        **sizes: int,
    ) -> Route:
        """Return the route for calls of one kind, found once and kept under `key`.

        Parameters
        ----------
        key : hashable
            Everything that the route depends on, and the operation.
        op : str
        device, dtype
            Of the operands.
        allow_tf32, deterministic : bool
            PyTorch's own switches, for kernels of ours to obey.
        skip : tuple of (str, str)
            Words that cannot serve these calls after all, each with the reason.
        phase, module : str
            From `calls.phase` and `module_paths.current`, where `by_phase` and `by_module` say that they are needed.
        doing : str
            The call in words, for messages: ``"aten::mm of [4, 4] and [4, 4] fp32 on cpu"``.
        natives : tuple of str, optional
            Ids of PyTorch's kernels that can serve this operator; default: all of the operation.
        unable : str, optional
            Why no kernel of ours can serve these calls.
        entry : EntryPoint, optional
            Of attention, the function that is called; default: `SDPA`.
        keep : bool
            Whether the route is kept; otherwise the caller has more to ask of it, and keeps it.
        **sizes
            ``m``, ``n``, ``k``, ``head_dim``, as far as the operation has them.

        Raises
        ------
        UnsupportedOperationError
            The policy is strict and nothing that it asks for can serve.
        """
        facts = facts_of_call(op, device=device, dtype=dtype, phase=phase, module=module, sizes=sizes)
        if entry is None and op == "attention":
            entry = SDPA
        default = DEFAULT_ID[op] if entry is None else entry.default
        wanted = self.policy.kernels.compiled_rules.match(facts)
        asked, source = wanted.use, wanted.source
        self.rule_use.note(facts)
        if source != "default":
            source = self.source or source
        skipped = dict(skip)
        passed_over: list[tuple[str, str]] = []
        found: Route | None = None
        for word in asked:
            reason = skipped.get(word) or self._cannot(word, op, device, natives, unable, entry)
            if reason:
                passed_over.append((word, reason))
                continue
            kernel, place = self._resolve(op, word, source, module, allow_tf32, deterministic, entry)
            found = Route(
                op, asked, source, kernel, place=place, passed_over=tuple(passed_over), module=module, phase=phase
            )
            found.open = self.tunes and word == "auto" and entry in (None, SDPA)
            break
        if found is None:
            found = Route(op, asked, source, default, passed_over=tuple(passed_over), module=module, phase=phase)
            if self.strict:
                self.keep(key, None)
                raise refuse(found, doing or op, self.keys)
            self._warn(found, doing)
        if keep:
            self.keep(key, found)
        return found

    def leave(self, key: Any, op: str) -> Route:
        """Keep PyTorch's own kernel for calls of one kind that the policy does not speak of. Nothing is said."""
        found = Route(op, ("auto",), "default", DEFAULT_ID[op])
        self.keep(key, found)
        return found

    def _cannot(
        self,
        word: str,
        op: str,
        device: torch.device,
        natives: tuple[str, ...] | None,
        unable: str,
        entry: EntryPoint | None,
    ) -> str:
        """Return why a word can never serve on a device, or nothing."""
        reason = "" if entry is None else entry.reason_against(word)
        if reason:
            return reason
        native = (NATIVE_WORDS[op] if entry is None else entry.words).get(word)
        if native is not None:
            if natives is not None and native not in natives:
                return f"this operator does not run by {native}"
            if device.type != "cuda" and native in ("torch.cudnn", "torch.efficient"):
                return f"{native} runs on CUDA, and the operands are on {device.type}"
            return ""
        return "" if word == "auto" else unable

    def place(self, op: str, word: str, source: str, module: str, *, allow_tf32: bool, deterministic: bool) -> Place:
        """Return where `_core`'s operations stand that a word of the policy serves. One for all calls of a kind."""
        key = (op, word, source, module, allow_tf32, deterministic)
        with self._lock:
            found = self._places.get(key)
            if found is None:
                found = self._places[key] = place_for(
                    self.policy, op, (word,), source, module=module, allow_tf32=allow_tf32,
                    deterministic=deterministic, log=self.log,
                )  # fmt: skip
        return found

    def keep(self, key: Any, route: Route | None) -> None:
        """Keep a route for calls of one kind, or none, so that it is looked for again."""
        with self._lock:
            before = self.routes.pop(key, None)
            if len(self.routes) >= _MOST:
                self.routes.clear()
            if route is not None:
                self.routes[key] = route
        if before is not None and before.place is None:
            gates.forget()

    def forget_tuned(self) -> None:
        """Forget the routes that measured times have decided; the times themselves are kept."""
        with self._lock:
            for key in [key for key, route in self.routes.items() if route.tuned]:
                del self.routes[key]
        gates.forget()

    def _resolve(
        self,
        op: str,
        word: str,
        source: str,
        module: str,
        allow_tf32: bool,
        deterministic: bool,
        entry: EntryPoint | None,
    ) -> tuple[str, Place | None]:
        native = (NATIVE_WORDS[op] if entry is None else entry.words).get(word)
        if native is not None:
            return native, None
        if word == "auto":
            return DEFAULT_ID[op] if entry is None else entry.default, None
        return word, self.place(op, word, source, module, allow_tf32=allow_tf32, deterministic=deterministic)

    def refused(self, route: Route, error: Exception) -> tuple[tuple[str, str], ...]:
        """Return what to give `route` as `skip` after a kernel of ours has refused a call: the word and the reason."""
        return (*route.passed_over, (route.kernel, reason_of(error, route.op, route.kernel)))

    def _warn(self, route: Route, doing: str) -> None:
        if self.policy.mode == "auto":  # asks for no word about it
            return
        mark = (route.op, route.source, route.passed_over)
        with self._lock:
            if mark in self._warned:
                return
            self._warned.add(mark)
        key = self.keys.get(route.source, route.source)
        msg = (
            f"{doing or route.op} runs by {route.kernel}, though {key} asks for {', '.join(route.asked)}: "
            f"{route.reasons}"
        )
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=2)


class _Local(threading.local):
    #: A policy for this thread, in a tuple of one; nothing: the process-wide one.
    held: tuple[Held | None] | None = None


_local = _Local()
_tracing_state = _private_api.tracing_state
_global: Held | None = None
_version = 0


def current() -> Held | None:
    """Return the policy that holds for calls in this thread. None does where ``torch.jit.trace`` writes down calls."""
    own = _local.held
    found = _global if own is None else own[0]
    return found if found is None or _tracing_state() is None else None


def version() -> int:
    """Return a number that is another one whenever another policy holds process-wide."""
    return _version


def forget_tuned() -> None:
    """Have the policy that holds process-wide, and the one of this thread, decide tuned calls anew."""
    for held in (_global, current()):
        if held is not None:
            held.forget_tuned()


def set_global(held: Held | None) -> Held | None:
    """Let a policy hold in all threads that have none of their own, those of autograd included. Returns the former."""
    global _global, _version
    before, _global = _global, held
    if held is None:
        gates.set_policy(None)
    else:
        gates.set_policy(
            held.routes,
            held.circumstances if held.by_call else None,
            phases=held.by_phase and held.in_gates,
            modules=held.by_module and held.in_gates,
        )
    _version += 1
    return before


class holding:  # noqa: N801 - used like a function
    """Let a policy hold for the calls of this thread inside a ``with`` block, whatever holds process-wide.

    Autograd's threads do not see it: for inference. The overrides that it needs must be in place; see
    `xpuruntime.pytorch.overriding.registry.require`.

    Parameters
    ----------
    held : Held or None
        ``None``: no policy, so that PyTorch's own kernels run.
    """

    __slots__ = ("_before", "_entered", "_held")

    def __init__(self, held: Held | None) -> None:
        self._held = (held,)
        self._before: tuple[Held | None] | None = None
        self._entered = False

    def _enter(self) -> None:
        self._before = _local.held
        self._entered = True
        gates.add_thread(self)
        _local.held = self._held

    def _leave(self, *_: object) -> None:
        if self._entered:
            _local.held = self._before
            gates.drop_thread(self)
            self._entered = False

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)
