# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Generate by captured decode steps under a kernel policy, and check what the model says by gates."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import xpuruntime.pytorch as xrt_torch
from xpuruntime.generation import check_gates

LIMITS = {"top1": 0.95, "kl": 1e-6, "perplexity": "0.1%", "tokens": 8}


def main() -> None:
    """Capture a tiny model with random weights; one from `from_pretrained` takes its place."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval().to(device)
    texts = [[(start * token) % 251 + 1 for token in range(24)] for start in range(1, 9)]
    policy = {"kernels": {"matmul": "auto" if device == "cuda" else "cpu.blas"}}

    captured = xrt_torch.capture_decode(model, max_length=256, batch=(1, 2))
    ids = torch.tensor([[11, 42, 7], [5, 9, 23]], device=device)
    with xrt_torch.kernel_policy(policy), captured.attached():
        print(model.generate(ids, max_new_tokens=12, do_sample=False)[:, 3:].tolist())
    print(captured.report)

    plain, ours = xrt_torch.logprobs_of(model), xrt_torch.logprobs_of(model, policy=policy, generate=captured.generate)
    print(check_gates(plain, ours, LIMITS, texts=texts))


if __name__ == "__main__":
    main()
