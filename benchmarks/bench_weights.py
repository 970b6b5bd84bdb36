# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decode steps with quantized weights: what is stored and computed, time against the floor of bf16, and gates.

python benchmarks/bench_weights.py --mode fp8/fp8 --out rows.json
python benchmarks/bench_weights.py --mode int8/float --device cpu --quick

Run each mode in a process of its own. The model is a random decoder of Llama's shape in bf16; gates compare it, as it
is, with the quantized one on random texts. Random weights are more sensitive than trained ones: only a KL divergence
that a broken product has is a failure here. Times are those of the device's work inside of the layers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from xpuruntime.generation import check_gates

MODES = ("int8/float", "int8/int8", "fp8/float", "fp8/fp8", "int4/float")


def decoder(device: str, *, quick: bool) -> Any:
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # an incomplete one ends the import
    import transformers

    torch.manual_seed(0)
    width, layers = (64, 2) if quick else (4096, 4)
    config = transformers.LlamaConfig(
        vocab_size=512 if quick else 32000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32 if quick else 32, num_key_value_heads=2 if quick else 8,
        max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def measure(mode: str, device: str, *, quick: bool) -> dict[str, Any]:
    storage, _, compute = mode.partition("/")
    weights = {"storage": storage, "compute": compute, "exclude": ["lm_head"]}
    policy = xrt.Policy(mode="strict", execution={"weights": weights})
    plain = decoder(device, quick=quick)
    model = xrt_torch.quantize(copy.deepcopy(plain), policy)
    draw = torch.Generator().manual_seed(1)
    texts = torch.randint(1, plain.config.vocab_size, (2, 24), generator=draw).tolist()
    limits = {"kl": 1.0, "tokens": 8}
    gates = check_gates(xrt_torch.logprobs_of(plain), xrt_torch.logprobs_of(model, policy=policy), limits, texts=texts)
    ids = torch.tensor([texts[0][:1]], device=device)
    with torch.no_grad(), xrt_torch.kernel_policy(policy, root=model):
        cache = model(ids, use_cache=True).past_key_values
        model(ids, past_key_values=cache, use_cache=True)
        with xrt_torch.explain(root=model) as found:
            for _ in range(2 if quick else 5):
                model(ids, past_key_values=cache, use_cache=True)
    counted = [weight for weight in found.weights if weight.module != "lm_head"]
    return {
        "mode": mode,
        "device": device,
        "storage": sorted({weight.storage for weight in counted}),
        "compute": sorted({weight.compute for weight in counted}),
        "operators": sorted({name for weight in counted for name in weight.operators}),
        "deviations": found.weight_deviations,
        "traffic": found.weight_traffic.verdict if found.weight_traffic else "none",
        "layers_us": found.weight_traffic.layers_us if found.weight_traffic else 0.0,
        "floor_us": found.weight_traffic.floor_us if found.weight_traffic else 0.0,
        "reason": found.weight_traffic.reason if found.weight_traffic else "",
        "gates": {gate.name: [gate.verdict, gate.figures] for gate in gates.gates},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    stated = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        row = measure(stated.mode, stated.device, quick=stated.quick)
    except xrt.XpuRuntimeError as error:
        row = {"mode": stated.mode, "device": stated.device, "refused": str(error)}
    if stated.out is not None:
        rows = json.loads(stated.out.read_text()) if stated.out.exists() else []
        stated.out.write_text(json.dumps([*rows, row], indent=1))
    told = [f"{name} {verdict}" for name, (verdict, _) in row.get("gates", {}).items()]
    print(stated.mode, row.get("refused", f"{row.get('traffic')}: {row.get('reason')}"), *told, sep=" | ")
    print("  ", row.get("storage"), row.get("compute"), row.get("operators"), row.get("deviations"))


if __name__ == "__main__":
    main()
