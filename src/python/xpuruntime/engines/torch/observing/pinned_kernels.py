# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PinnedKernels`: kernels that served the calls of a session, and whether the policy's keys were met."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.engines.torch.controls import ABSENT
from xpuruntime.engines.torch.observing.decisions import CallDecisions, SeenCall, SeenCalls
from xpuruntime.engines.torch.pinning import Pins, kernel_names_of
from xpuruntime.evidence.metadata import module_of_node
from xpuruntime.evidence.records import Control, KeySeen
from xpuruntime.ops.call_context import kernel_ids

if TYPE_CHECKING:
    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.dispatch.route import Route

#: In a value of a key: what PyTorch's own kernels serve that no override was called for.
_OWN = "PyTorch's own"


class PinnedKernels:
    """Watches the calls that the policy of a session decides, in this thread, in one instrumented pass.

    What the core decides in it stands in a log of its own: neither the session's own runs nor those of others are in
    it, and how full the log of the process is makes no difference.
    """

    def __init__(
        self,
        pins: Pins,
        policy: KernelPolicy,
        controls: Mapping[str, Control],
        nodes: Iterable[NodeInfo],
        device: str,
    ) -> None:
        self._pins = pins
        self._policy = policy
        self._controls = controls
        self._by_products = {node.name: node for node in nodes if node.by_products is not None}
        self._device = device
        self._log = _core.DecisionLog()
        self._seen = SeenCalls(self._log)
        self._ran: dict[str, dict[str, str]] = defaultdict(dict)
        self._decided: CallDecisions | None = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let the session's kernels hold in this thread by routes of this pass alone; for all of its runs."""
        with self._pins.apart(self._log):
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block is left."""
        if self._pins.held is None:
            yield
            return
        with self._seen.watching():
            yield

    def at(self, node: str) -> None:
        """Say which operator of the model runs from now on."""
        self._seen.at(node)

    def ran(self, node: str, operators: Sequence[str], dtype: str) -> None:
        """Say which operators of PyTorch the profiler saw in an operator of the model in one run, and its type."""
        from xpuruntime.pytorch.attention.sdpa_backends import kernels_in

        if self._pins.held is None:
            return
        if kernels := kernels_in(operators):
            self._ran[node].update(kernels)
        self._seen.passed_by(node, operators)
        self.attended(node, dtype)

    def attended(self, node: str, dtype: str) -> None:
        """Say that an operator of the model ran: where it is the softmax of an attention, no other one ran for it."""
        import torch

        from xpuruntime.engines.torch.names import precision_dtype
        from xpuruntime.pytorch.attention.call import WITH_WEIGHTS
        from xpuruntime.pytorch.dispatch.route import facts_of_call

        held, product = self._pins.current, self._by_products.get(node)
        if held is None or product is None or not held.decides("attention"):
            return
        kind = precision_dtype(dtype)
        key = (WITH_WEIGHTS.name, node, kind)
        route = held.routes.get(key)
        if route is None:
            facts = facts_of_call(
                "attention", device=torch.device(self._device), dtype=kind, phase="infer", module=module_of_node(node),
                sizes={"head_dim": product.by_products} if product.by_products else {},
            )  # fmt: skip
            route = held.resolve(key, facts, entry=WITH_WEIGHTS, description=f"the attention of {node!r}")
        if route.source != "default":
            self._seen.by_products(node, route, dtype, self._device)

    def kernel(self, node: str) -> str | None:
        """Return the xpuruntime kernels that served an operator of the model, or ``None`` where PyTorch's own did."""
        ours = [
            name
            for call in self._seen.kinds
            if call.node == node and call.route is not None and not call.route.native
            for name in self._kernels(call, call.route)
        ]
        return ", ".join(dict.fromkeys(ours)) or None

    def decisions(self) -> tuple[KernelDecision, ...]:
        """Return what was decided about the calls of the pass."""
        return self._call_decisions.kernel_decisions(self._seen.kinds)

    def notes(self) -> list[str]:
        """Return what of the decisions could not be kept."""
        if not self._log.dropped:
            return []
        return [f"{self._log.dropped} decisions of the pass are not in the report: the dispatcher keeps no more of one"]

    def keys(self) -> dict[str, KeySeen]:
        """Return the observation of each kernel key in the plan, compared with the policy itself."""
        by_key: dict[str, list[tuple[SeenCall, Route]]] = defaultdict(list)
        left: dict[str, list[SeenCall]] = defaultdict(list)
        for call in self._seen.kinds:
            if call.route is not None:
                by_key[self._call_decisions.key_of(call.route)].append((call, call.route))
            elif (request := self._call_decisions.asked_of(call))[0]:
                left[request[1]].append(call)
        keys_seen = {}
        for key, control in self._controls.items():
            if not key.startswith("kernels.") or key == "kernels.auto_strategy":
                continue
            if control.enforceability == "unsupported":
                continue
            if control.resolved == ABSENT and not (left.get(key) or by_key.get(key)):
                keys_seen[key] = KeySeen(observed="-", status="unobservable", reason=control.reason)
            else:
                keys_seen[key] = self._key_seen(
                    by_key.get(key, []), left.get(key, []), kernel_names_of(self._policy, key)
                )
        return keys_seen

    @property
    def _call_decisions(self) -> CallDecisions:
        if self._decided is None:
            from xpuruntime.ops.decision_log import recorded

            self._decided = CallDecisions(self._policy, self._controls, self._pins.keys, recorded(self._log), self._ran)
        return self._decided

    def _key_seen(
        self, calls: list[tuple[SeenCall, Route]], left: list[SeenCall], kernel_names: tuple[str, ...]
    ) -> KeySeen:
        if not calls and not left:
            reason = "no call of the observed runs was one that it is for"
            return KeySeen(observed="-", status="unobservable", reason=reason)
        nodes: dict[str, list[SeenCall]] = defaultdict(list)
        for call, route in calls:
            nodes[", ".join(self._kernels(call, route))].append(call)
        if left:
            nodes[_OWN] += left
        text = ", ".join(f"{kernel} ({_count(where)})" for kernel, where in sorted(nodes.items()))
        why = next(filter(None, (self._deviation(call, route, kernel_names) for call, route in calls)), "")
        if not why and left:
            why = f"{left[0].node!r} ran by PyTorch's own kernel: {left[0].why}"
        if why:
            return KeySeen(observed=text, status="substituted", reason=why)
        return KeySeen(observed=text, status="honoured", reason="every call that it is for was routed to it")

    def _deviation(self, call: SeenCall, route: Route, kernel_names: tuple[str, ...]) -> str:
        """Return how a call was served otherwise than a policy asks; empty where it was as it asks."""
        if route.status == "substituted":
            passed = self._call_decisions.passed_over(route)
            return f"{call.node!r} ran {route.kernel}: {'; '.join(f'{name}: {why}' for name, why in passed.items())}"
        if instead := self._call_decisions.instead(call):
            return f"{call.node!r} was to run {route.kernel}, and PyTorch ran {', '.join(sorted(instead))}"
        if route.asked != kernel_names or not self._meets(call, route):
            ran = ", ".join(self._kernels(call, route))
            return f"{call.node!r} ran {ran}, and the policy asks for {', '.join(kernel_names)}"
        return ""

    def _kernels(self, call: SeenCall, route: Route) -> list[str]:
        """Return the kernels that served a call: of xpuruntime by the dispatcher, of PyTorch by the profiler."""
        # What was routed to, where neither knows more.
        if route.native:
            return sorted(set(self._call_decisions.instead(call).values())) or [str(route.kernel)]
        return list(dict.fromkeys(decision.kernel for decision in self._call_decisions.decisions_of(call))) or [
            str(route.kernel)
        ]

    def _meets(self, call: SeenCall, route: Route) -> bool:
        kernel_name, _, config = str(route.kernel).partition("@")
        if route.native or kernel_name == "auto":
            return True
        ids = kernel_ids(route.op, kernel_name)
        return all(
            decision.chosen in ids and config in ("", decision.config)
            for decision in self._call_decisions.decisions_of(call)
        )


def _count(calls: list[SeenCall]) -> str:
    """Return how many operators these are; of a compiled program, which has none any more, how many calls."""
    nodes = {call.node for call in calls if call.node}
    number, what = (len(nodes), "operator") if nodes else (sum(call.count for call in calls), "call")
    return f"{number} {what}" + ("" if number == 1 else "s")
