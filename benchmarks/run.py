# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run the benchmarks of one kind of machine: ``python benchmarks/run.py cpu|gpu|kernels|training [--out FOLDER]``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PLAN = {
    "cpu": [
        ["bench_session.py", "--device", "cpu"],
        ["bench_cold_start.py"],
        ["bench_pool.py", "--device", "cpu"],
        ["bench_profile.py", "--device", "cpu"],
        ["soak.py", "--device", "cpu"],
        ["bench_dispatch.py", "--device", "cpu"],
        ["bench_ort_custom_ops.py", "--device", "cpu"],
        ["bench_openvino_overhead.py"],
        ["bench_unit_times.py"],
        ["bench_rules.py"],
        ["bench_serving.py"],
        ["bench_serving_batches.py"],
    ],
    "gpu": [
        ["bench_session.py", "--device", "cuda:0"],
        ["bench_pool.py", "--device", "cuda:0"],
        ["bench_resnet.py"],
        ["bench_profile.py", "--device", "cuda:0"],
        ["bench_profile.py", "--device", "cuda:0", "--beside-torch"],
        ["bench_ort_custom_ops.py", "--device", "cuda:0"],
        ["bench_generation.py"],
        ["soak.py", "--device", "cuda:0", "--runs", "100000", "--sessions", "1000"],
        ["bench_serving_gpu.py"],
    ],
    "kernels": [
        ["bench_dispatch.py", "--device", "cuda:0"],
        ["bench_norms.py"],
        ["bench_depthwise_conv.py"],
        ["bench_matmul.py"],
        ["bench_attention.py"],
        ["bench_providers.py"],
    ],
    "training": [
        ["bench_override_overhead.py", "--device", "cpu"],
        ["bench_override_overhead.py", "--device", "cuda:0"],
        ["bench_training_step.py"],
        ["bench_training_kernels.py"],
        ["bench_model_steps.py", "--models", "llama,qwen3,gemma,gpt2,bert,vit"],
        ["bench_step_tuning.py"],
        ["bench_collectives.py"],
        ["bench_many_gpus.py"],
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(PLAN))
    parser.add_argument("--out", help="folder of the JSON files; default: benchmarks/results")
    options = parser.parse_args()
    failed = []
    for script, *arguments in PLAN[options.kind]:
        print(f"== {script} {' '.join(arguments)}", flush=True)
        out = options.out
        if out and script == "bench_training_step.py":  # it asks for the file
            out = f"{out}/training_step.json"
        extra = ["--out", out] if out else []
        if subprocess.run([sys.executable, str(HERE / script), *arguments, *extra], check=False).returncode:
            failed.append(script)
    for script in failed:
        print(f"FAILED: {script}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
