# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CallDecisions`: kernel decisions of the calls in one instrumented pass."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.torch.controls import why_not
from xpuruntime.engines.torch.pinning import kernel_names_of
from xpuruntime.engines.torch.uncovered_calls import MULTI_HEAD
from xpuruntime.evidence.kernel_records import DecisionSource, KernelCandidate, KernelDecision, merged
from xpuruntime.evidence.metadata import module_of_node

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.evidence.records import Control
    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.dispatch.route import Route


class CallDecisions:
    """Finds for each call which kernel served it, who asked for it, and what became of the others."""

    def __init__(
        self,
        policy: KernelPolicy,
        controls: Mapping[str, Control],
        keys: Mapping[str, str],
        decisions: Sequence[Decision],
        ran: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._policy = policy
        self._controls = controls
        self._keys = keys
        self._made = decisions
        self._ran = ran

    def kernel_decisions(self, seen: Sequence[SeenCall]) -> tuple[KernelDecision, ...]:
        """Return the decisions as a report holds them."""
        return merged(candidate for call in seen for candidate in self._of(call))

    def key_of(self, route: Route) -> str:
        """Return the key of the policy that a route stands for; ``"default"`` where nothing is asked."""
        return self._keys.get(route.source, route.source)

    def asked_of(self, call: SeenCall) -> tuple[tuple[str, ...], str]:
        """Return what the policy asks for a call that was not decided, and the key; nothing where PyTorch does it."""
        from xpuruntime.pytorch.dispatch.route import facts_of_call
        from xpuruntime.pytorch.explanation.requested import request_of

        facts = facts_of_call(
            call.op,
            device=call.device,
            dtype=call.dtype,
            phase="infer",
            module=module_of_node(call.node),
            node=call.node,
        )
        wanted, sure = request_of(self._policy, facts)  # a decision cannot say that a rule may be meant
        return (wanted.use, wanted.source) if wanted is not None and sure else ((), "default")

    def passed_over(self, route: Route) -> dict[str, str]:
        """Return the kernel names that cannot serve a route, each with the reason."""
        return dict(route.passed_over)

    def decisions_of(self, call: SeenCall) -> list[Decision]:
        """Return what the core decided for a call."""
        return [self._made[number] for number in sorted(call.served)]

    def instead(self, call: SeenCall) -> dict[str, str]:
        """Return the operators of attention that ran although a route names another kernel, with their kernels."""
        from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS

        ran = self._ran.get(call.node, {})
        if call.route is None or call.route.kernel not in BACKENDS or call.route.kernel in ran.values():
            return {}
        return dict(ran)

    def unsupported(self, key: str) -> str:
        """Return why the plan calls a key unsupported; empty where it does not."""
        control = self._controls.get(key)
        return control.reason if control is not None and control.enforceability == "unsupported" else ""

    def _of(self, call: SeenCall) -> Iterator[KernelDecision]:
        route = call.route
        if route is None:
            kernel_names, key = self.asked_of(call)
            if kernel_names:
                refused = self._refused(call, kernel_names, self.unsupported(key) or call.why)
                yield _native(call, kernel_names, key, "fallback", None, refused)
        elif not route.native:
            for number, count in sorted(call.served.items()):
                yield self._by_xpuruntime(call, route, self._made[number], count)
        elif why := self.unsupported(self.key_of(route)):
            key = self.key_of(route)
            kernel_names = kernel_names_of(self._policy, key)
            yield _native(call, kernel_names, key, "fallback", route.kernel, self._refused(call, kernel_names, why))
        elif route.tuned:
            yield self._measured(call, route)
        elif route.asked != ("auto",):
            yield self._by_torch(call, route)

    def _refused(self, call: SeenCall, kernel_names: Sequence[str], why: str) -> list[KernelCandidate]:
        """Return that nothing that is asked for serves: each with its own reason, or the one of all."""
        cuda = call.device.startswith("cuda")
        return [_refused(kernel_name, why_not(call.op, kernel_name, cuda=cuda) or why) for kernel_name in kernel_names]

    def _by_torch(self, call: SeenCall, route: Route) -> KernelDecision:
        """Return that a kernel of PyTorch's serves, because it is asked for or because none of those can."""
        key = self.key_of(route)
        source = "fallback" if route.status == "substituted" else _asking(key)
        passed = self.passed_over(route)
        rest = f"was not needed: {route.kernel} serves"
        left = [name for name in route.asked if name not in passed and not _names(call.op, name, route.kernel)]
        candidates = [_refused(name, passed[name]) for name in route.asked if name in passed]
        candidates += [_served(route.kernel), *(_refused(name, rest) for name in left)]
        chosen, notes = route.kernel, []
        ran = sorted(set(self._ran.get(call.node, {}).values()))
        if instead := self.instead(call):
            chosen, source = ", ".join(ran), "fallback"
            notes = [f"{route.kernel} was called for, and PyTorch ran {', '.join(sorted(instead))}"]
            candidates = [
                _refused(route.kernel, "PyTorch ran another one") if candidate.id == route.kernel else candidate
                for candidate in candidates
            ] + [_served(kernel) for kernel in ran]
        elif route.kernel == "torch.sdpa" and ran:
            notes = [f"PyTorch chose {', '.join(ran)}"]
        return _native(call, route.asked, key, source, chosen, candidates, notes)

    def _measured(self, call: SeenCall, route: Route) -> KernelDecision:
        times = {name: spent for name, spent, _ in route.times}
        own = times.get(route.kernel)
        candidates = [_served(route.kernel, own)]
        for name, spent in times.items():
            if name != route.kernel:
                text = "was measured" if not own else f"takes {spent / own:.2f} times as long as PyTorch's own"
                candidates.append(_candidate(_named(call.op, name), True, text, spent))
        return _native(call, route.asked, _tuning(self.key_of(route)), "tuned", route.kernel, candidates)

    def _by_xpuruntime(self, call: SeenCall, route: Route, decision: Decision, count: int) -> KernelDecision:
        """Return that an xpuruntime kernel serves, with what became of the kernel names before its own."""
        from xpuruntime.ops.decision_log import as_record
        from xpuruntime.pytorch.dispatch.route import DEFAULT_ID

        record = as_record(decision, (call.node,) if call.node else (), count=count)
        key = self.key_of(route)
        names, passed = route.asked, self.passed_over(route)
        if why := self.unsupported(key):
            names = kernel_names_of(self._policy, key)
            passed = {refusal.id: refusal.reason for refusal in self._refused(call, names, why)}
        known = {candidate.id for candidate in record.candidates}
        candidates = [_refused(kernel_name, why) for kernel_name, why in passed.items() if kernel_name not in known]
        candidates += [
            msgspec.structs.replace(candidate, accepted=False, reason=passed[candidate.id])
            if candidate.id in passed
            else candidate
            for candidate in record.candidates
        ]
        source: DecisionSource = "tuned" if route.tuned or decision.source == "tuned" else _asking(key)
        notes = record.notes
        if route.tuned:
            name = DEFAULT_ID[call.op]
            times = {kernel: spent for kernel, spent, _ in route.times}
            own = times.get(name)
            other = min((spent for kernel, spent in times.items() if kernel != name), default=0.0)
            if own and other:
                text = f"takes {own / other:.2f} times as long as xpuruntime's"
                candidates.append(_candidate(name, True, text, own))
                told = f"measured against PyTorch, as calls from Python: {own:.2f} us, xpuruntime's {other:.2f} us"
                notes = (*notes, told)
        return msgspec.structs.replace(
            record,
            asked=names,
            asked_by=_tuning(key) if route.tuned else key,
            source="fallback" if why else source,
            candidates=tuple(candidates),
            notes=notes,
        )


def _native(
    call: SeenCall,
    requested: tuple[str, ...],
    key: str,
    source: DecisionSource,
    chosen: str | None,
    candidates: Sequence[KernelCandidate],
    notes: Sequence[str] = (),
) -> KernelDecision:
    what = " x ".join(str(list(shape)) for shape in call.shapes)
    return KernelDecision(
        op=call.op,
        description=f"{' '.join(filter(None, (call.op, call.dtype, what)))}, by PyTorch",
        nodes=(call.node,) if call.node else (),
        module="" if call.route is None else call.route.module,
        shapes={},
        dtype=call.dtype,
        device=call.device,
        phase="infer",
        asked=requested,
        asked_by=key,
        source=source,
        chosen=chosen,
        config="",
        candidates=tuple(candidates),
        notes=tuple(notes),
        count=call.count,
    )


def _candidate(kernel_name: str, accepted: bool, reason: str, measured_us: float | None = None) -> KernelCandidate:
    name, _, config = kernel_name.partition("@")
    return KernelCandidate(id=name, config=config, accepted=accepted, reason=reason, measured_us=measured_us)


def _refused(kernel_name: str, reason: str) -> KernelCandidate:
    return _candidate(kernel_name, False, reason)


def _served(kernel: str, measured_us: float | None = None) -> KernelCandidate:
    return _candidate(kernel, True, "", measured_us)


def _names(op: str, kernel_name: str, kernel: str) -> bool:
    from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES

    return kernel_name == "auto" or NATIVE_NAMES[op].get(kernel_name) == kernel


def _named(op: str, name: str) -> str:
    """Return an id for what was measured: xpuruntime kernels as one are called by their operator."""
    return f"xpuruntime.{op}" if name == "auto" else name


def _asking(key: str) -> DecisionSource:
    return "rule" if key.startswith("kernels.rules") else "pinned"


def _tuning(key: str) -> str:
    return "kernels.auto_strategy" if key == "default" else key


class SeenCall:
    """Calls of one kind by one operator of the model."""

    __slots__ = ("count", "device", "dtype", "node", "op", "route", "served", "shapes", "why")

    def __init__(
        self,
        node: str,
        op: str,
        route: Route | None,
        shapes: tuple[tuple[int, ...], ...],
        dtype: str,
        device: str,
        why: str = "",
    ) -> None:
        self.node = node
        self.op = op
        self.route = route
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.why = why
        self.count = 0
        self.served: Counter[int] = Counter()


class SeenCalls:
    """Watches the calls of overridden operators in this thread; a `pytorch.dispatch.context.CallObserver`."""

    def __init__(self, log: _core.DecisionLog) -> None:
        self._log = log
        self._kinds: dict[Any, SeenCall] = {}
        self._node = ""
        self._thread = threading.get_ident()
        self._others: Any = None
        #: Calls that go on, the innermost last.
        self._stack: list[SeenCall] = []
        self._told: list[int] = []
        #: Operators of the model and operations of a policy of which some call was seen.
        self._touched: set[tuple[str, str]] = set()
        #: Whether attention by products was seen where the function that computes it was called.
        self._multi_head = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block is left."""
        from xpuruntime.pytorch.dispatch.context import CONTEXT

        self._others = CONTEXT.watch(self)
        try:
            yield
        finally:
            CONTEXT.watch(self._others)

    def at(self, node: str) -> None:
        """Say which operator of the model runs from now on."""
        self._node = node

    def call(
        self, name: str, op: str, route: Route | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Note a call, and run it; see `xpuruntime.pytorch.dispatch.context.CallObserver`."""
        from xpuruntime.pytorch.dispatch.tuning import measuring

        def go_on() -> Any:
            if self._others is not None:
                return self._others.call(name, op, route, run, args, kwargs)
            return run(*args, **kwargs)

        if threading.get_ident() != self._thread or measuring():
            return go_on()
        self._touched.add((self._node, op))
        self._multi_head |= name == _MULTI_HEAD
        decided = route is not None and (route.tuned or route.source != "default")
        if self._stack and not decided:  # a part of the call that goes on
            return go_on()
        seen = self._kind(op, route if decided else None, (*args, *kwargs.values()))
        self._attribute()
        self._stack.append(seen)
        try:
            result = go_on()
        finally:
            self._attribute()
            self._stack.pop()
        seen.count += 1
        return result

    def _kind(self, op: str, route: Route | None, args: Iterable[Any]) -> SeenCall:
        import torch

        from xpuruntime.pytorch.dispatch.context import DTYPES
        from xpuruntime.pytorch.explanation.call_recorder import LEFT

        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        first = tensors[0] if tensors else None
        dtype = "" if first is None else DTYPES.get(first.dtype, str(first.dtype).removeprefix("torch."))
        device = "" if first is None else str(first.device)
        key = (self._node, op, id(route), shapes, dtype, device)
        kind = self._kinds.get(key)
        if kind is None:  # which keeps the route alive, so that no id comes twice
            why = LEFT if route is None else ""
            kind = self._kinds[key] = SeenCall(self._node, op, route, shapes, dtype, device, why)
        return kind

    def _attribute(self) -> None:
        """Give what the core has served since the last time to the innermost call that goes on."""
        now = self._log.counts()
        if self._stack:
            before = [*self._told, *([0] * (len(now) - len(self._told)))]
            served = self._stack[-1].served
            for number, (old, new) in enumerate(zip(before, now, strict=True)):
                if new > old:
                    served[number] += new - old
        self._told = now

    def passed_by(self, node: str, operators: Sequence[str]) -> None:
        """Take note of what PyTorch ran in an operator of the model that no override was called for."""
        from xpuruntime.pytorch.coverage.operation_table import NOT_REACHED, uncovered_operator
        from xpuruntime.pytorch.explanation.call_recorder import LEFT

        for name in operators:
            escape = uncovered_operator(name)
            if escape is None or (node, escape.op) in self._touched or name in _NO_PRODUCTS:
                continue
            key = (node, escape.op, name)
            if key not in self._kinds:
                why = LEFT if escape.reason == NOT_REACHED else escape.reason
                self._kinds[key] = SeenCall(node, escape.op, None, (), "", "", why)
            self._kinds[key].count += 1

    def by_products(self, node: str, route: Route, dtype: str, device: str) -> None:
        """Take note of attention that ran by products, in a program that calls no function for it."""
        if self._multi_head:
            return
        seen_call = self._kinds.setdefault((node, route.source), SeenCall(node, "attention", route, (), dtype, device))
        seen_call.count += 1

    @property
    def kinds(self) -> tuple[SeenCall, ...]:
        """What was seen of calls that returned, in their order."""
        return tuple(kind for kind in self._kinds.values() if kind.count)


#: As `xpuruntime.pytorch.dispatch.overrides.report_only` reports its calls.
_MULTI_HEAD = f"nn::{MULTI_HEAD}"
#: Products with a vector, which are no matmul of a policy.
_NO_PRODUCTS = frozenset(("aten::mv", "aten::addmv", "aten::addmv_"))
