# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parts of a program that no policy reaches: fused recurrent layers, decomposed attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.precision.types import precision_name
from xpuruntime.engines.torch.names import RECURRENT, RECURRENT_KERNELS
from xpuruntime.engines.torch.pinning import facts_of_program_node, placed_rules
from xpuruntime.policies import KernelPolicy
from xpuruntime.policies.call_facts import UNKNOWN
from xpuruntime.policies.kernel_rules import OPS, KernelRule

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import NodeInfo

#: Kernels that a policy may ask for there, by operation. Those of attention are as
#: `xpuruntime.pytorch.attention.call.WITH_WEIGHTS` has them, which needs PyTorch.
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
    keys = {f"kernels.rules[{index}]": key for index, (_, key) in enumerate(rules)}
    uncovered_by_key: dict[str, dict[str, dict[str, None]]] = {}
    for op, uncovered in out_of_reach.items():
        for node in uncovered:
            for dtype in dtypes or (UNKNOWN,):
                facts = facts_of_program_node(node, device=request.device, dtype=dtype, phase="infer")
                facts = facts._replace(op=op, node=facts.module, arch=UNKNOWN if cuda else None)
                if node.by_products:
                    facts = facts._replace(head_dim=node.by_products)
                for wanted in placed.compiled_rules.match(facts).preferences:
                    if not NATIVE_KERNELS[op].intersection(wanted.use):
                        uncovered_by_key.setdefault(keys[wanted.source], {}).setdefault(op, {})[node.name] = None
    names = {node.name for uncovered in out_of_reach.values() for node in uncovered}
    others = [node for node in nodes if node.name not in names]
    return {key: _told(by_op, alone=not _has_more(key, rules, others)) for key, by_op in uncovered_by_key.items()}


def _told(by_op: dict[str, dict[str, None]], *, alone: bool) -> UncoveredCalls:
    reasons = [_reason(op, list(names)) for op, names in by_op.items()]
    fix = "; ".join(_FIX[op] for op in by_op)
    return UncoveredCalls("; and ".join(reasons), fix, alone)


def _reason(op: str, names: Sequence[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if op == "attention":
        return f"no kernel of attention is called at {names[0]!r}{rest}: {_BY_PRODUCTS}"
    return f"PyTorch runs {names[0]!r}{rest} by one kernel, inside which none can be chosen for a product"


def _has_more(key: str, rules: tuple[tuple[KernelRule, str], ...], nodes: Iterable[NodeInfo]) -> bool:
    asking = KernelPolicy(rules=tuple(rule for rule, source in rules if source == key)).compiled_rules
    places = (facts._replace(node=UNKNOWN) for node in nodes if (facts := facts_of_program_node(node)).op in OPS)
    return any(asking.matching(facts) for facts in places)


#: The function that computes it.
MULTI_HEAD = "multi_head_attention_forward"
_FUNCTIONS = (MULTI_HEAD, "scaled_dot_product_attention")
_LAYER = "torch.nn.modules.activation.MultiheadAttention"
SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
_PRODUCTS = frozenset(("bmm", "baddbmm", "matmul"))
#: Operators between the product of queries and keys and the softmax: a mask is added, shapes are changed.
_NEAR = 6


def width_by_products(node: Any) -> int | None:
    """Return the width of a head where a node of an exported program is the softmax of such attention, or ``None``.

    Exported programs keep of each operator the function that called it, or at least its module. With
    ``need_weights=False``, and in `scaled_dot_product_attention`, there is no softmax but one operator of attention,
    unless the program was decomposed since. The width is 0 where it is not known.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    if getattr(packet, "__name__", "") not in SOFTMAX or not _in_attention(node.meta):
        return None
    near = [node]
    for near_node in near:
        packet = getattr(near_node.target, "overloadpacket", near_node.target)
        if getattr(packet, "__name__", "") in _PRODUCTS:
            width = near_node.args[-2].meta["val"].shape[-1]
            return width if isinstance(width, int) else 0
        near += near_node.all_input_nodes if len(near) < _NEAR else []
    return 0


def _in_attention(meta: Mapping[str, Any]) -> bool:
    if function := meta.get("torch_fn"):
        return str(function[1]).rpartition(".")[2] in _FUNCTIONS
    stack = meta.get("nn_module_stack") or {}
    kind = next(reversed(stack.values()))[1] if stack else ""
    return str(kind) == _LAYER


def head_width(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the width of a head where a call of a function is such attention, or ``None``."""
    if getattr(function, "__name__", "") != MULTI_HEAD:
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    stated = bound.arguments
    return int(stated["embed_dim_to_check"]) // int(stated["num_heads"]) if stated["need_weights"] else None


#: What an LSTM with projections calls its weights for them; oneDNN has no such kernel.
_PROJECTION = "weight_hr"
_FLOATS = ("fp64", "fp32", "fp16", "bf16")


def fused_layers(request: Request) -> list[NodeInfo]:
    """Return the recurrent layers of a program that PyTorch runs by one kernel. Pure."""
    dtypes = dtypes_of(request)
    cuda = request.device.startswith("cuda")
    return [node for node in request.model.nodes if _is_fused(node, dtypes, cuda=cuda)]


def dtypes_of(request: Request) -> tuple[str, ...]:
    """Return the types that a layer may compute in, as far as the weights tell."""
    precision = request.policy.execution.precision
    if precision in ("fp16", "bf16"):
        return (precision,)
    known = (precision_name(name) for name in request.model.weights)
    return tuple(dict.fromkeys(name for name in known if name in _FLOATS))


def _is_fused(node: NodeInfo, dtypes: tuple[str, ...], *, cuda: bool) -> bool:
    """Say whether cuDNN computes it on CUDA, or oneDNN on the CPU: that has the LSTM alone, and not in fp64."""
    name = node.op.rpartition(".")[2]
    if name in RECURRENT_KERNELS:
        return True
    if name not in RECURRENT or cuda:
        return name in RECURRENT
    projects = any(_PROJECTION in input_ for input_ in node.inputs)
    return name == "lstm" and dtypes != ("fp64",) and not projects
