# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SeenCalls`: calls of one instrumented pass that rules of the policy match, and what the core did for each."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.torch.multi_head import MULTI_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xpuruntime import _core
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["SeenCall", "SeenCalls"]


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

        from xpuruntime.pytorch.dispatch.call_state import DTYPES
        from xpuruntime.pytorch.explanation.call_recorder import LEFT

        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        shapes = tuple(tuple(one.shape) for one in tensors)
        first = tensors[0] if tensors else None
        dtype = "" if first is None else DTYPES.get(first.dtype, str(first.dtype).removeprefix("torch."))
        device = "" if first is None else str(first.device)
        key = (self._node, op, id(route), shapes, dtype, device)
        found = self._kinds.get(key)
        if found is None:  # which keeps the route alive, so that no id comes twice
            why = LEFT if route is None else ""
            found = self._kinds[key] = SeenCall(self._node, op, route, shapes, dtype, device, why)
        return found

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
        found = self._kinds.setdefault((node, route.source), SeenCall(node, "attention", route, (), dtype, device))
        found.count += 1

    @property
    def kinds(self) -> tuple[SeenCall, ...]:
        """What was seen of calls that returned, in their order."""
        return tuple(one for one in self._kinds.values() if one.count)


#: As `xpuruntime.pytorch.dispatch.overrides.report_only` reports its calls.
_MULTI_HEAD = f"nn::{MULTI_HEAD}"
#: Products with a vector, which are no matmul of a policy.
_NO_PRODUCTS = frozenset(("aten::mv", "aten::addmv", "aten::addmv_"))
