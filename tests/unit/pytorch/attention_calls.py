# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of `scaled_dot_product_attention`, rules for them, and what the core counted."""

from __future__ import annotations

import torch

import xpuruntime as xrt

sdpa = torch.nn.functional.scaled_dot_product_attention
FLASH = "ScaledDotProductFlashAttentionForCpuBackward0"


def strict(*words, rules=()):
    kernels = {"attention": list(words)} if words else {}
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {**kernels, "rules": list(rules)}}


def rule(use, **match):
    return {"match": {"op": "attention", **match}, "use": use}


def counts() -> dict[str, int]:
    results: dict[str, int] = {}
    for decision in xrt.decisions():
        results[decision.op] = results.get(decision.op, 0) + decision.count
    return results


def gradients(q, k, v, **more):
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(*operands, **more)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return (out.detach(), *torch.autograd.grad(out, operands, weights))


def operands(batch=2, heads=4, kv_heads=4, q_length=5, kv_length=7, head_dim=8, dtype=torch.float32):
    q = torch.randn(batch, heads, q_length, head_dim, dtype=dtype)
    return (q, *(torch.randn(batch, kv_heads, kv_length, head_dim, dtype=dtype) for _ in range(2)))


def packed():
    """Return q, k and v as parts of one array ``[batch, length, 3, heads, head_dim]``."""
    return [x.transpose(1, 2) for x in torch.randn(2, 5, 3, 4, 8).unbind(2)]
