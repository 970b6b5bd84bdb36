# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention over packed sequences for the CPU, where PyTorch has none: what its FlashAttention computes, by einsum."""

from __future__ import annotations

import torch


def _ranges(cu_seq_q, cu_seq_k):
    q, k = cu_seq_q.tolist(), cu_seq_k.tolist()
    return [(slice(*q[n : n + 2]), slice(*k[n : n + 2])) for n in range(len(q) - 1)]


def forward(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, dropout_p, is_causal, debug=False, *, scale=None, **more):
    del max_q, max_k, dropout_p, is_causal, debug, more
    factor = scale or q.shape[-1] ** -0.5
    outs, sums = [], []
    for queries, keys in _ranges(cu_seq_q, cu_seq_k):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) * factor
        sums.append(scores.logsumexp(-1).float())
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys]))
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outs), torch.cat(sums, 1), state, state.clone(), torch.empty(0)


def forward_into(out, *args, **kwargs):
    computed, sums, *_ = forward(*args, **kwargs)
    out.copy_(computed)
    return sums


def backward(
    grad, q, k, v, out, sums, cu_seq_q, cu_seq_k, max_q, max_k, dropout_p, is_causal, *state, scale=None, **more
):  # fmt: skip
    del out, sums, max_q, max_k, dropout_p, is_causal, state, more
    factor = scale or q.shape[-1] ** -0.5
    found = [], [], []
    for queries, keys in _ranges(cu_seq_q, cu_seq_k):
        weights = (torch.einsum("qhd,khd->hqk", q[queries], k[keys]) * factor).softmax(-1)
        inner = torch.einsum("qhd,khd->hqk", grad[queries], v[keys])
        scores = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * factor
        found[0].append(torch.einsum("hqk,khd->qhd", scores, k[keys]))
        found[1].append(torch.einsum("hqk,qhd->khd", scores, q[queries]))
        found[2].append(torch.einsum("hqk,qhd->khd", weights, grad[queries]))
    return tuple(torch.cat(part) for part in found)


def kernels_for_the_cpu():
    """Register them; returns what takes them away when it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # PyTorch 2.11 has no form into `out`
        library.impl("_flash_attention_forward_no_dropout_inplace", forward_into, "CPU")
    return library
