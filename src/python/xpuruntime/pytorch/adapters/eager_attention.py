# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of models with ``attn_implementation="eager"``: led to ``scaled_dot_product_attention`` under a policy.

The mask of such a model says everything, the causal part included, so that it is handed on as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.attention_forms import NAME, form_of
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, AdaptedFunctions, is_usual, run_original
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.explanation.requested import requests_other_kernel

if TYPE_CHECKING:
    from torch import Tensor

#: Arguments that change what is computed.
_CHANGES = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")
_DEVICES = ("cpu", "cuda")
_UNKNOWN = "it is no plain attention of products and a softmax, which a kernel could stand in for"
_WEIGHTS = "the model returns the weights of its attention, which no kernel has"


def _adapter(original: FunctionType) -> Callable[..., Any]:
    def form(dtype: torch.dtype, device: torch.device, head_dim: int) -> str:
        return (form_of(original) or "!") if asks_for_kernel(dtype, device, head_dim) else ""

    _private_api.mark_constant(form)

    # Traced by Dynamo: nothing but what it can follow, and the function that it takes for a constant.
    @functools.wraps(original)
    def eager_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        known = form(query.dtype, query.device, query.shape[-1])
        if known == "":
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        same = key.shape[1] == query.shape[1]
        changed = [name for name in _CHANGES if kwargs.get(name) is not None]
        why = ""
        if known == "!" or (known == "plain" and not same) or len(args) > 0 or len(changed) > 0:
            why = _UNKNOWN
        elif _returns_weights(module, kwargs):
            why = _WEIGHTS
        elif not torch.compiler.is_compiling() and not is_usual(query, key, value):
            why = UNUSUAL
        if why != "":
            if torch.compiler.is_compiling():
                return original(module, query, key, value, attention_mask, *args, **kwargs)
            run = functools.partial(original, **kwargs)
            return run_original(
                "attention", original, run, (module, query, key, value, attention_mask, *args), query, why
            )
        mask = attention_mask
        if mask is not None:
            mask = mask[..., : key.shape[-2]]
        dropout = kwargs.get("dropout", 0.0)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout if module.training else 0.0,
            scale=kwargs.get("scaling"), enable_gqa=not same,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return eager_attention_forward


def _returns_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether the model is to return the weights, which a kernel of attention does not have."""
    config = getattr(module, "config", None)
    return bool(kwargs.get("output_attentions", False)) or bool(getattr(config, "output_attentions", False))


def asks_for_kernel(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Say whether the active policy asks for another kernel than PyTorch's own.

    The policy that holds is part of the key of compiled code; see `compile_hooks`.
    """
    active = active_policy()
    if active is None or "eager_attention" not in active.overrides or device.type not in _DEVICES:
        return False
    compiling = torch.compiler.is_compiling()
    if compiling and torch.compiler.is_exporting():
        return False
    phase, module = "", ""
    if active.by_phase:
        phase = ("train" if torch.is_grad_enabled() else "infer") if compiling else context.phase()
    if active.by_module:
        module = module_paths.in_dynamo() if torch.compiler.is_dynamo_compiling() else module_paths.current()
    facts = facts_of_call(
        "attention", device=device, dtype=dtype, phase=phase, module=module, sizes={"head_dim": head_dim}
    )
    if active.by_module and not compiling:
        active.rule_use.note(facts)
    return requests_other_kernel("attention", active.policy.kernels.compiled_rules.match(facts).use)


OVERRIDES = (
    Override(
        NAME, "attention", (CLASSES,), functools.partial(AdaptedFunctions, (NAME,), _adapter), "",
        "eager_attention",
    ),
)  # fmt: skip
