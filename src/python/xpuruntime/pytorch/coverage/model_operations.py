# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What PyTorch's small operators are part of: operations of a policy that models spell out, and kinds of the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch.coverage.class_code import ACTIVATIONS, code_names, projections_of
from xpuruntime.pytorch.coverage.operation_table import UncoveredKernel, norm_by_operators, title_of

if TYPE_CHECKING:
    import torch

_SPELLED = "{title} computes it by elementwise operators of PyTorch"
#: Operators by which a model rotates queries and keys, and gates what a projection returns.
_ROTATES = re.compile(r"(mul|neg|add|sub|cat|stack|cos|sin|addcmul|split|slice|select)(_backward)?_?(\.\w+)?")
_GATES = re.compile(r"(mul|silu|gelu|sigmoid|tanh|pow|add|erf)(_backward)?_?(\.\w+)?")
#: What an operator without an operation of a policy does: the first row that fits its name, without namespace.
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"^(t|transpose|swapaxes|permute|movedim|view|view_as|reshape|flatten|unflatten|as_strided|narrow|slice|select"
         r"|(un)?squeeze|expand|expand_as|alias|detach|unbind|split\w*|chunk|resize|T|mT|diagonal"
         r"|_(unsafe_view|reshape_alias|conj|neg_view)|resolve_(conj|neg))_?$", "view"),
        (r"^(autograd engine|\w+Backward\d*|linear|matmul|result_type|type_as|to|contiguous|softmax|log_softmax)$",
         "dispatch"),
        (r"(_)?log_softmax|nll_loss|(binary_)?cross_entropy|\w+_loss(_backward|_forward)?$|kl_div|ctc", "loss"),
        (r"_?fused_(adam|adagrad|sgd)|_foreach_|_amp_", "optimizer"),
        (r"embedding", "embedding"),
        (r"Memcpy|copy_?$|_to_copy|clone|_local_scalar_dense|item$|^lift|expand_copy|repeat", "copy"),
        (r"Memset|fill_?$|zero_?$|zeros|ones|full|arange|empty", "fill"),
        (r"index|gather|scatter|take|masked_(fill|select)|where|nonzero|sort|topk|unique|bincount", "indexing"),
        (r"rand|bernoulli|dropout|multinomial|normal_?$|uniform_?$|exponential", "random"),
        (r"nccl|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast_?$|all_?to_?all", "communication"),
        (r"^(_?sum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm|argmax|argmin|all|any|cumsum|var|std|logsumexp"
         r"|_logcumsumexp)\w*$", "reduction"),
        (r"^(_?cat|stack|pad|constant_pad_nd|roll|flip|tril|triu|slice_backward|select_backward"
         r"|unfold\w*)$", "copy"),
        (r"^(_?(add|sub|rsub|mul|div|neg|pow|exp|log|sqrt|rsqrt|square|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu"
         r"|threshold|clamp|floor|ceil|round|eq|ne|lt|le|gt|ge|bitwise|logical|erf|reciprocal|addcmul|addcdiv|lerp"
         r"|maximum|minimum|softplus|hardtanh|elu|leaky|isnan|isfinite|remainder|fmod|log1p|expm1)\w*)$",
         "elementwise"),
        (r"^triton_(poi|red|per|for)|cpp_fused_", "elementwise"),
    )
)  # fmt: skip


def kind_of_rest(name: str, around: tuple[str, ...]) -> str:
    """Return what an operator or kernel that is of no operation does, by its name and those of what it ran in.

    Empty where that is not known.
    """
    if any(name.startswith("Optimizer.") for name in around):
        return "optimizer"
    if any("AccumulateGrad" in name for name in around):
        return "gradient accumulation"
    return _kind_of(name.rpartition("::")[2].partition(".")[0])


@lru_cache(maxsize=4096)
def _kind_of(short: str) -> str:
    return next((kind for pattern, kind in _KINDS if pattern.search(short)), "")


def operation_of_model(
    modules: Mapping[str, torch.nn.Module], path: str, operator: str
) -> tuple[str, UncoveredKernel] | None:
    """Return the operation that a module spells out with an operator, and a name for its calls; ``None``: none known.

    The code of its class says so: that of norms, of gated units, and of what calls ``apply_rotary_pos_emb``, where the
    caller knows which operators ran after it.
    """
    module, above = modules.get(path), modules.get(path.rpartition(".")[0])
    short = operator.rpartition("::")[2]
    if module is None:
        return None
    kind = type(module)
    foreign = kind.__module__.partition(".")[0] != "torch"
    norm = norm_by_operators(kind) if foreign and next(module.children(), None) is None else None
    if norm is not None:
        return _row(norm, kind)
    gates = _GATES.fullmatch(short) is not None
    if gates and foreign and (unit := _unit_of(module)):
        return _row(unit, kind)
    if gates and above is not None and next(module.parameters(), None) is None and (unit := _unit_of(above)):
        return _row(unit, type(above))
    if foreign and _ROTATES.fullmatch(short) is not None and _rotates(kind):  # type: ignore[arg-type]
        return _row("rope", kind)
    return None


def _row(op: str, kind: type) -> tuple[str, UncoveredKernel]:
    return f"nn::{kind.__name__}", UncoveredKernel(op, _SPELLED.format(title=title_of(kind)))


@lru_cache(maxsize=4096)
def _rotates(kind: type) -> bool:
    return any(name.startswith("apply_rotary") for name in code_names(kind))


def _unit_of(module: torch.nn.Module) -> str:
    """Return the operation of a module that multiplies a projection by the activation of another; empty: none."""
    names = code_names(type(module))  # type: ignore[arg-type]
    if not projections_of(names):
        return ""
    used: Any = next(
        (activation for name in ACTIVATIONS if (activation := getattr(module, name, None)) is not None), None
    )
    text = f"{getattr(used, '__name__', type(used).__name__)} {' '.join(names & {'silu', 'gelu'})}".lower()
    return "swiglu" if "silu" in text or "swish" in text else "geglu" if "gelu" in text else ""
