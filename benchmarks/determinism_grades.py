# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The grade of determinism that each engine reaches on four models.

Prints a row for each model and engine: the highest grade that passed, and where results first differ. Engines that are
not installed are left out. The table of ``docs/guides/determinism.md`` is made by it.

    python benchmarks/determinism_grades.py [--device cpu] [--engines A,B] [--static-batch N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import xpuruntime as xrt
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.determinism import reason_text
from xpuruntime.testing import models

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("onnxruntime", "openvino", "qnn", "torch")
SIZES = (2, 3, 4, 8, 16)


def onnx_models(folder: Path) -> dict[str, Path]:
    """Return the files of the four models."""
    return {
        "digits": Path(xrt.demo_model_path()),
        "mlp-1024": models.save(models.mlp(1024), folder, "mlp.onnx"),
        "convnet": ROOT / "tests" / "models" / "convnet.onnx",
        "encoder": ROOT / "tests" / "models" / "encoder.onnx",
    }


def torch_models(folder: Path) -> dict[str, Path]:
    """Return exported programs like the last three of them, with an open batch."""
    sys.path.insert(0, str(ROOT / "tools"))
    from export_test_models import Convnet, Encoder

    linear = torch.nn.Linear
    made = {
        "mlp-1024": (torch.nn.Sequential(linear(1024, 1024), torch.nn.ReLU(), linear(1024, 1024)), (4, 1024)),
        "convnet": (Convnet(), (4, 3, 32, 32)),
        "encoder": (Encoder(), (4, 16)),
    }
    found = {}
    for name, (module, shape) in made.items():
        sample = torch.randint(0, 256, shape) if name == "encoder" else torch.randn(shape)
        sizes = ({0: torch.export.Dim("N", min=1, max=64)},)
        found[name] = folder / f"{name}.pt2"
        torch.export.save(torch.export.export(module.eval(), (sample,), dynamic_shapes=sizes), found[name])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--static-batch", type=int, help="execution.static_batch")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for engine in asked.engines.split(","):
            files = torch_models(Path(name)) if engine == "torch" else onnx_models(Path(name))
            for model, path in files.items():
                execution = {} if asked.static_batch is None else {"static_batch": asked.static_batch}
                if engine == "qnn":
                    execution |= {"precision": "fp16", "provider_options": {"qnn": {"soc": "sm8650"}}}
                device = "npu" if engine == "qnn" else asked.device
                try:
                    policy = {"execution": execution}
                    found = xrt.determinism(path, None, device, engine, policy=policy, trust=engine == "torch")
                    stopped = next((test for test in found.tests if test.verdict != "passed"), None)
                    why = "" if stopped is None else f"{stopped.grade} {stopped.verdict}: {reason_text(stopped)}"
                    rows.append({"model": model, "engine": engine, "observed": found.observed, "why": why})
                except XpuRuntimeError as error:
                    rows.append({"model": model, "engine": engine, "observed": "-", "why": str(error).splitlines()[-1]})
                if not asked.json:
                    one = rows[-1]
                    print(f"| {one['model']} | {one['engine']} | `{one['observed']}` | {one['why']} |", flush=True)
    if asked.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
