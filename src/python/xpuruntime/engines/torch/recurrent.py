# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent layers of a program: which of them run by one kernel of PyTorch's, inside which no product can be chosen.

A plan knows that from the names of operators, and from what an exported program calls their weights. Under fp16 on the
CPU it takes the one kernel for granted, which oneDNN has on some processors alone; what runs is seen when it runs.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.precision.names import precision_name
from xpuruntime.engines.torch.names import RECURRENT, RECURRENT_KERNELS
from xpuruntime.engines.torch.pinning import operation_of, placed_rules
from xpuruntime.evidence.carried.policy import module_of_node
from xpuruntime.policies import KernelPolicy
from xpuruntime.policies.kernel_ids import OPS

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.policies.kernel_rule import KernelRule

__all__ = ["Hidden", "hidden_products"]

#: What an LSTM with projections calls its weights for them; oneDNN has no such kernel.
_PROJECTION = "weight_hr"
_FLOATS = ("fp64", "fp32", "fp16", "bf16")
#: Kernels that a policy may ask for there.
_KEPT = frozenset(("auto", "torch", "torch.mm"))


class Hidden(NamedTuple):
    """Recurrent layers for whose products a key asks in vain.

    Attributes
    ----------
    nodes : tuple of str
    alone : bool
        Whether the program has nothing else that the key is for.
    """

    nodes: tuple[str, ...]
    alone: bool


def hidden_products(request: Request) -> dict[str, Hidden]:
    """Return the keys that ask for kernels where none can be chosen. Pure.

    Parameters
    ----------
    request : Request
    """
    nodes = request.model.nodes
    dtypes = _dtypes(request)
    layers = [node for node in nodes if _is_one_kernel(node, dtypes, cuda=request.device.startswith("cuda"))]
    if not layers:
        return {}
    rules = placed_rules(request.policy.kernels, nodes)
    placed = KernelPolicy(rules=tuple(rule for rule, _ in rules))
    keys = {f"kernels.rules[{place}]": key for place, (_, key) in enumerate(rules)}
    found: dict[str, dict[str, None]] = {}
    for node in layers:
        module = module_of_node(node.name) or None
        for dtype in dtypes or (None,):
            facts = {"dtype": dtype, "device": request.device, "phase": "infer", "node": module, "module": module}
            words, source = placed.choose("matmul", **facts)
            if not _KEPT.intersection(words):
                found.setdefault(keys[source], {})[node.name] = None
    others = [node for node in nodes if node not in layers]
    return {key: Hidden(tuple(names), not _has_more(key, rules, others)) for key, names in found.items()}


def _dtypes(request: Request) -> tuple[str, ...]:
    """Return the types that a layer may compute in, as far as the weights tell."""
    precision = request.policy.execution.precision
    if precision in ("fp16", "bf16"):
        return (precision,)
    known = (precision_name(name) for name in request.model.weights)
    return tuple(dict.fromkeys(name for name in known if name in _FLOATS))


def _is_one_kernel(node: NodeInfo, dtypes: tuple[str, ...], *, cuda: bool) -> bool:
    """Say whether cuDNN computes it on CUDA, or oneDNN on the CPU: that has the LSTM alone, and not in fp64."""
    name = node.op.rpartition(".")[2]
    if name in RECURRENT_KERNELS:
        return True
    if name not in RECURRENT or cuda:
        return name in RECURRENT
    projects = any(_PROJECTION in one for one in node.inputs)
    return name == "lstm" and dtypes != ("fp64",) and not projects


def _has_more(key: str, rules: tuple[tuple[KernelRule, str], ...], nodes: list[NodeInfo]) -> bool:
    """Say whether a key may be for one of these operators."""
    matches = [rule.match for rule, source in rules if source == key]
    return any(
        match.op in (None, op) and (match.module is None or fnmatchcase(module_of_node(node.name), match.module))
        for node in nodes
        if (op := operation_of(node)) in OPS
        for match in matches
    )
