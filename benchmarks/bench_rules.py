# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cost of many kernel rules: the time of a plan, and of one PyTorch call whose route is cached.

python benchmarks/bench_rules.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from harness import interleaved, table, write

if TYPE_CHECKING:
    from collections.abc import Callable

NODES = (100, 1000)
RULES = (1, 100, 1000, 5000)
#: Seconds: the plan of 5,000 rules over 1,000 nodes.
TARGETS = {"plan_s": 1.0}


def model_of(nodes: int) -> onnx.ModelProto:
    """Return a chain of products, each a node of a module of its own."""
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    body = [helper.make_node("MatMul", [f"x{i}", "w"], [f"x{i + 1}"], name=f"layers.{i}/MatMul") for i in range(nodes)]
    graph = helper.make_graph(
        body,
        "chain",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info(f"x{nodes}", TensorProto.FLOAT, ["batch", 8])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rules_of(count: int, nodes: int) -> xrt.KernelPolicy:
    """Return rules as a lock states them: a node, a type and one size of the batch each."""
    return xrt.KernelPolicy(
        rules=[
            {
                "match": {
                    "op": "matmul",
                    "node": f"layers.{i % nodes}/MatMul",
                    "dtype": "fp32",
                    "m": 1 + i // nodes,
                },
                "use": "cpu.blas",
            }
            for i in range(count)
        ]
    )


def plans(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return seconds of `plan`, for each number of rules and of nodes; the cases take turns."""
    cases: dict[str, Callable[[], Any]] = {}
    for nodes in NODES:
        model = folder / f"chain-{nodes}.onnx"
        onnx.save(model_of(nodes), model)
        for rules in RULES:
            policy = xrt.Policy(kernels=rules_of(rules, nodes))
            cases[f"{rules} rules, {nodes} nodes"] = lambda model=model, policy=policy: xrt.plan(
                model, policy=policy, device="cpu", engine="onnxruntime"
            )
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()  # the first round opens and compiles what is kept
            samples[name].append(time.perf_counter() - begun)
    return samples


def calls(rounds: int, count: int) -> dict[str, list[float]]:
    """Return microseconds of a product in PyTorch whose route is cached, under each number of rules."""
    import torch

    import xpuruntime.pytorch as xrt_torch

    a, b = torch.ones(8, 8), torch.ones(8, 8)
    cases: dict[str, Callable[[], Any]] = {"no policy": lambda: torch.mm(a, b)}
    found = interleaved(cases, calls=count, rounds=rounds)
    # A policy is of the process: one after the other, and all of them once more in each turn.
    turns = 5
    for _ in range(turns):
        for rules in RULES:
            stated = [
                {"match": {"op": "matmul", "dtype": "fp32", "m": 8 + i, "n": 8, "k": 8}, "use": "torch.mm"}
                for i in range(rules)
            ]
            with xrt_torch.kernel_policy(xrt.KernelPolicy(rules=stated)):
                name = f"{rules} rules"
                samples = interleaved({name: lambda: torch.mm(a, b)}, calls=count, rounds=max(1, rounds // turns))
                found.setdefault(name, []).extend(samples[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of plans")
    parser.add_argument("--call-rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", help="folder of the JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan_s = {name: values[1:] for name, values in plans(Path(folder), options.rounds + 1).items()}
    call_us = calls(options.call_rounds, options.calls)
    print("one plan")
    table(plan_s, "s")
    print("one torch.mm of 8 x 8, its route cached")
    table(call_us)
    record = {"calls": options.calls, "samples_s": plan_s, "samples_us": call_us, "targets": TARGETS}
    write("rules_cpu", record, options.out)


if __name__ == "__main__":
    main()
