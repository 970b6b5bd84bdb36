# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Uncovered calls: parts of a program that no policy reaches, such as fused recurrent layers and decomposed attention.

PyTorch computes ``nn.MultiheadAttention`` so where it has to return the weights, its default. Whether a call asks for
them is an argument: an exported program shows it by its operators, a module by the run on its example inputs. Programs
that were decomposed may have any attention so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.torch.pinning import facts_of_program_node, placed_rules
from xpuruntime.engines.torch.recurrent import dtypes_of, fused_layers
from xpuruntime.policies import KernelPolicy
from xpuruntime.policies.call_facts import UNKNOWN
from xpuruntime.policies.kernel_rules import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.policies.kernel_rules import KernelRule

__all__ = ["NATIVE_KERNELS", "UncoveredCalls", "uncovered_calls"]

#: Kernels that a policy may ask for there, by operation. Those of attention are as
#: `xpuruntime.pytorch.attention.entry_points.WITH_WEIGHTS` has them, which needs PyTorch.
NATIVE_KERNELS = {
    "matmul": frozenset(("auto", "torch", "torch.mm")),
    "attention": frozenset(("auto", "torch", "torch.sdpa", "math", "torch.math")),
}
#: Why no kernel of attention is called.
_BY_PRODUCTS = (
    "it is products and a softmax, as of nn.MultiheadAttention with need_weights=True, or of a decomposed program"
)
_FIX = {
    "matmul": "put a rule for its module with use: torch first, write the cell with nn.Linear",
    "attention": (
        "call nn.MultiheadAttention with need_weights=False and export without decomposing, put a rule with op: "
        "attention, its module and use: torch first"
    ),
}


class UncoveredCalls(NamedTuple):
    """Operators of a program for which a key asks in vain."""

    reason: str
    fix: str
    alone: bool


def uncovered_calls(request: Request) -> dict[str, UncoveredCalls]:
    """Return the keys that ask for kernels where none can be chosen. Pure."""
    nodes = request.model.nodes
    dtypes = dtypes_of(request)
    out_of_reach = {
        "matmul": fused_layers(request),
        "attention": [node for node in nodes if node.by_products is not None],
    }
    if not any(out_of_reach.values()):
        return {}
    rules = placed_rules(request.policy.kernels, nodes)
    placed = KernelPolicy(rules=tuple(rule for rule, _ in rules))
    cuda = request.device.startswith("cuda")
    keys = {f"kernels.rules[{place}]": key for place, (_, key) in enumerate(rules)}
    found: dict[str, dict[str, dict[str, None]]] = {}
    for op, uncovered in out_of_reach.items():
        for node in uncovered:
            for dtype in dtypes or (UNKNOWN,):
                facts = facts_of_program_node(node, device=request.device, dtype=dtype, phase="infer")
                facts = facts._replace(op=op, node=facts.module, arch=UNKNOWN if cuda else None)
                if node.by_products:
                    facts = facts._replace(head_dim=node.by_products)
                for wanted in placed.compiled_rules.match(facts).preferences:
                    if not NATIVE_KERNELS[op].intersection(wanted.use):
                        found.setdefault(keys[wanted.source], {}).setdefault(op, {})[node.name] = None
    names = {node.name for uncovered in out_of_reach.values() for node in uncovered}
    others = [node for node in nodes if node.name not in names]
    return {key: _told(by_op, alone=not _has_more(key, rules, others)) for key, by_op in found.items()}


def _told(by_op: dict[str, dict[str, None]], *, alone: bool) -> UncoveredCalls:
    reasons = [_reason(op, list(names)) for op, names in by_op.items()]
    fix = "; ".join(_FIX[op] for op in by_op)
    return UncoveredCalls("; and ".join(reasons), fix, alone)


def _reason(op: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if op == "attention":
        return f"no kernel of attention is called at {names[0]!r}{more}: {_BY_PRODUCTS}"
    return f"PyTorch runs {names[0]!r}{more} by one kernel, inside which none can be chosen for a product"


def _has_more(key: str, rules: tuple[tuple[KernelRule, str], ...], nodes: Iterable[NodeInfo]) -> bool:
    """Say whether a key may be for one of these operators."""
    asking = KernelPolicy(rules=tuple(rule for rule, source in rules if source == key)).compiled_rules
    places = (facts._replace(node=UNKNOWN) for node in nodes if (facts := facts_of_program_node(node)).op in OPS)
    return any(asking.matching(facts) for facts in places)
