# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which gate catches which fault of captured decoding: small models of bytes of five families, and planted faults.

python benchmarks/bench_gates.py

Each family runs in a process of its own. The reference is plain ``generate`` of the sound model, in the same type.
"""

from __future__ import annotations

import argparse
import builtins
import copy
import functools
import inspect
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

_SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
#: Family to the names of its configuration and model, and what it has beside the sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 32, "layer_types": ["full_attention"] * 2}),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {}),
}
STEPS, ROWS, LENGTH, TEXTS = 60, 8, 64, 6
#: By type. In fp32 a sound step differs by the order of its sums alone; faults are planted there.
LIMITS: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"kl": 1e-9, "top1": 0.99, "perplexity": "0.1%", "tokens": 16},
    torch.bfloat16: {"kl": 1e-2, "tokens": 16},
}
_OUTPUTS = ("o_proj", "c_proj")


def _data() -> bytes:
    documented = [getattr(builtins, name) for name in sorted(dir(builtins)) if name[0].islower()]
    parts = [item for kind in documented for item in (kind, *(vars(kind).values() if isinstance(kind, type) else ()))]
    return "\n".join(dict.fromkeys(inspect.getdoc(part) or "" for part in parts)).encode()


def trained(family: str, device: str, steps: int) -> Any:
    import transformers

    config_name, model_name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**_SIZES, **more)
    model = getattr(transformers, model_name)(config).to(device).train()
    data = torch.tensor(list(_data()[: -TEXTS * LENGTH]), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (ROWS,)).tolist()
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.generation_config.repetition_penalty = 1.2
    return model.eval().requires_grad_(requires_grad=False)


def _output(model: Any) -> Any:
    """Return the product after the attention of the last layer."""
    return [part for name, part in model.named_modules() if name.endswith(_OUTPUTS) and "mlp" not in name][-1]


def _scaled(model: Any) -> None:
    weight = _output(model).weight  # half of it: a norm that follows, as of Gemma 3, divides by all of it
    weight[: len(weight) // 2].mul_(1.05)


def _other_eps(model: Any) -> None:
    for part in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 1e-4)


def _without_processor(model: Any) -> None:
    model.generation_config.repetition_penalty = 1.0


def _bf16_layer(model: Any) -> None:
    part = _output(model).to(torch.bfloat16)
    part.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    part.register_forward_hook(lambda *call: call[2].float())


FAULTS: dict[str, Callable[[Any], None]] = {
    "none": lambda _: None,
    "half of a product times 1.05": _scaled,
    "epsilon of norms 1e-4": _other_eps,
    "repetition penalty dropped": _without_processor,
    "a product in bfloat16": _bf16_layer,
}


class _Remembered:
    """A source that answers each question once."""

    def __init__(self, source: Any) -> None:
        self._logprobs = functools.cache(lambda tokens: source.logprobs(list(tokens)))
        self._generate = functools.cache(lambda tokens, count: source.generate(list(tokens), count))

    def logprobs(self, tokens: Any) -> Any:
        return self._logprobs(tuple(tokens))

    def generate(self, tokens: Any, count: int) -> Any:
        return self._generate(tuple(tokens), count)


def rows_of(family: str, device: str, steps: int) -> list[dict[str, Any]]:
    """Return a row for each fault, and for the sound model in bfloat16."""
    import xpuruntime.pytorch as xrt_torch
    from xpuruntime.generation import check_gates

    sound = trained(family, device, steps)
    held = _data()[-TEXTS * LENGTH :]
    texts = [list(held[start : start + LENGTH]) for start in range(0, len(held), LENGTH)]
    rows = []
    for dtype, faults in ((torch.float32, FAULTS), (torch.bfloat16, {"none": FAULTS["none"]})):
        model = copy.deepcopy(sound).to(dtype)
        reference = _Remembered(xrt_torch.logprobs_of(model))
        for fault, plant in faults.items():
            faulty = copy.deepcopy(model)
            plant(faulty)
            captured = xrt_torch.capture_decode(faulty, max_length=128, compile=False)
            ours = xrt_torch.logprobs_of(faulty, generate=captured.generate)
            report = check_gates(reference, ours, LIMITS[dtype], texts=texts)
            rows.append({
                "family": family, "dtype": str(dtype).removeprefix("torch."), "fault": fault, "verdict": report.verdict,
                "failed": [gate.name for gate in report.gates if gate.verdict == "fail"],
                "gates": {gate.name: [gate.verdict, gate.observed, gate.figures] for gate in report.gates},
                "replays": captured.report.replays, "reasons": captured.report.reasons,
                "fused": any("kernels each" in note and "not used" not in note for note in captured.report.notes),
                "positions": report.positions,
            })  # fmt: skip
            captured.reset()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, help="measure it in this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.family:
        torch.set_float32_matmul_precision("highest")
        print(json.dumps(rows_of(options.family, options.device, options.steps)))
        return 0
    from harness import write

    arguments = ["--device", options.device, "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, family in enumerate(FAMILIES):
            said, errors = Path(folder) / f"{number}.out", Path(folder) / f"{number}.err"
            with said.open("w") as out, errors.open("w") as err:
                command = [sys.executable, __file__, "--family", family, *arguments]
                runs[family] = (subprocess.Popen(command, stdout=out, stderr=err), said, errors)
        rows, failed = [], []
        for family, (run, said, errors) in runs.items():
            if run.wait():
                failed.append(family)
                print(f"FAILED: {family}\n{errors.read_text()[-2000:]}", flush=True)
                continue
            rows += json.loads(said.read_text().strip().splitlines()[-1])
    for row in rows:
        caught = ", ".join(row["failed"]) or "-"
        figures = " | ".join(observed for _, observed, _ in row["gates"].values())
        print(
            f"{row['family']} | {row['dtype']} | {row['fault']} | fused {row['fused']} | caught by {caught} | {figures}"
        )
        for reason in row["reasons"]:
            print(f"    eager: {reason}")
    write("gates_cuda", {"limits": {str(dtype): limits for dtype, limits in LIMITS.items()}, "rows": rows}, options.out)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
