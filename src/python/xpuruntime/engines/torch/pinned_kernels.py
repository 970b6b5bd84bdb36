# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which kernels served the calls of a session, and whether the policy's keys were met."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.torch.kernel_controls import ABSENT
from xpuruntime.evidence.records import KeySeen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xpuruntime.engines.torch.pinning import Pins
    from xpuruntime.evidence.records import Control
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.routing import Route

__all__ = ["PinnedKernels"]


class PinnedKernels:
    """Watches the calls that the policy of a session decides, in this thread.

    Parameters
    ----------
    pins : Pins
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._routes: dict[str, list[Route]] = defaultdict(list)
        self._node = ""
        self._thread = threading.get_ident()
        self._others: Any = None
        self._chosen: dict[tuple[str, str, str], list[str]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block is left."""
        from xpuruntime.pytorch import calls

        if self._pins.held is None:
            yield
            return
        before = _counts()
        self._others = calls.watch(self)
        try:
            yield
        finally:
            calls.watch(self._others)
            for key, kernel in _new(before):
                kernels = self._chosen.setdefault(key, [])
                if kernel not in kernels:
                    kernels.append(kernel)

    def at(self, node: str) -> None:
        """Say which operator of the model runs from now on."""
        self._node = node

    def call(
        self, name: str, op: str, route: Route | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Keep the route of a call, and run it; see `xpuruntime.pytorch.calls.Recorder`."""
        if route is not None and threading.get_ident() == self._thread:
            self._routes[self._node].append(route)
        if self._others is not None:
            return self._others.call(name, op, route, run, args, kwargs)
        return run(*args, **kwargs)

    def kernel(self, node: str) -> str | None:
        """Return the kernels of ours that served an operator of the model, or ``None`` where PyTorch's own did."""
        ours = [self._ran(route) for route in self._routes.get(node, ()) if not route.native]
        return ", ".join(dict.fromkeys(ours)) or None

    def keys(self, controls: Mapping[str, Control], policy: KernelPolicy) -> dict[str, KeySeen]:
        """Return what was seen of each kernel key that the plan speaks of, held against the policy itself."""
        by_key: dict[str, list[tuple[str, Route]]] = defaultdict(list)
        for node, routes in self._routes.items():
            for route in routes:
                by_key[self._pins.keys.get(route.source, route.source)].append((node, route))
        found = {}
        for key, control in controls.items():
            if not key.startswith("kernels.") or key == "kernels.auto_strategy":
                continue
            if control.enforceability == "unsupported":
                continue
            if control.resolved == ABSENT:
                found[key] = KeySeen(observed="-", status="honoured", reason=control.reason)
            else:
                found[key] = self._seen(by_key.get(key, []), _words(policy, key))
        return found

    def _seen(self, calls: list[tuple[str, Route]], words: tuple[str, ...]) -> KeySeen:
        if not calls:
            reason = "no call of the observed runs was one that it is for"
            return KeySeen(observed="-", status="unobservable", reason=reason)
        nodes: dict[str, list[str]] = defaultdict(list)
        for node, route in calls:
            nodes[self._ran(route)].append(node)
        text = ", ".join(f"{kernel} ({_count(where)})" for kernel, where in sorted(nodes.items()))
        wrong = [(node, route) for node, route in calls if route.status == "substituted"]
        if wrong:
            node, route = wrong[0]
            return KeySeen(observed=text, status="substituted", reason=f"{node!r} ran {route.kernel}: {route.reasons}")
        other = [(node, route) for node, route in calls if route.asked != words or not self._own(route)]
        if other:
            node, route = other[0]
            reason = f"{node!r} ran {self._ran(route)}, and the policy asks for {', '.join(words)}"
            return KeySeen(observed=text, status="substituted", reason=reason)
        return KeySeen(observed=text, status="honoured", reason="every call that it is for was routed to it")

    def _ran(self, route: Route) -> str:
        """Return the kernel that served a route; of a family of ours, what the dispatcher chose of it."""
        if route.native:
            return str(route.kernel)
        chosen = self._chosen.get((route.op, route.source, route.module), ())
        name = str(route.kernel)
        if "@" in name or (not chosen):
            return name
        return ", ".join(self._own(route) or chosen)

    def _own(self, route: Route) -> list[str]:
        """Return what served a route and is what it names; empty where the dispatcher chose something else for it."""
        chosen = self._chosen.get((route.op, route.source, route.module), ())
        name = str(route.kernel)
        if route.native or "@" in name or not chosen:
            return [name]
        return [one for one in chosen if "." not in name or one.partition("@")[0] == name]


def _words(policy: KernelPolicy, key: str) -> tuple[str, ...]:
    """Return the kernels that a key of a policy asks for, in order."""
    name = key.removeprefix("kernels.")
    place = re.fullmatch(r"rules\[(\d+)\]", name)
    use = policy.rules[int(place[1])].use if place else policy.preferences[name]
    return (use,) if isinstance(use, str) else tuple(use or ())


def _counts() -> dict[int, int]:
    from xpuruntime.ops.decision_log import decisions

    return {place: one.count for place, one in enumerate(decisions())}


def _new(before: Mapping[int, int]) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield operation, key and module of each decision that served calls meanwhile, with its kernel."""
    from xpuruntime.ops.decision_log import decisions

    for place, one in enumerate(decisions()):
        if one.count > before.get(place, 0):
            yield (one.op, one.asked_by, one.module), one.kernel


def _count(nodes: list[str]) -> str:
    """Return how many operators these are; of a compiled program, which has none any more, how many calls."""
    number, what = (len(set(nodes)), "operator") if any(nodes) else (len(nodes), "call")
    return f"{number} {what}" + ("" if number == 1 else "s")
