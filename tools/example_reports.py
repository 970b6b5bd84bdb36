# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the reports of ``docs/examples``: ResNet-50 and an encoder of BERT's size on a GPU, in fp32 and fp16.

Needs an NVIDIA GPU, onnxruntime-gpu, PyTorch, torchvision and onnxscript::

    python tools/example_reports.py docs/examples

Weights are drawn (seed 0): what runs does not depend on them. Paths of the machine are shortened in what is written.
"""

from __future__ import annotations

import argparse
import site
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name everybody knows it by)

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, LENGTH = 8, 128
VOCABULARY, WIDTH, HEADS, LAYERS = 30522, 768, 12, 12
LARGEST = 2_000_000


class Layer(nn.Module):
    """A layer of BERT: normalized after attention and after the two products with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, length, WIDTH] to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = self.ln_1(x + self.proj(mixed))
        return self.ln_2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens, int64 [batch, length], to [batch, length, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.ln = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        x = self.ln(self.tokens(ids) + self.places)
        for layer in self.layers:
            x = layer(x)
        return x


def resnet50() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model and its inputs."""
    import torchvision

    return torchvision.models.resnet50(weights=None), {"image": torch.randn(ROWS, 3, 224, 224)}


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model and its inputs."""
    return Encoder(), {"ids": torch.randint(0, VOCABULARY, (ROWS, LENGTH))}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {"resnet50": resnet50, "encoder": encoder}


def export(model: nn.Module, inputs: dict[str, torch.Tensor], path: Path) -> None:
    """Write the ONNX file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), tuple(inputs.values()), str(path), input_names=list(inputs), output_names=["y"],
            opset_version=20, dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip


def shortened(report: xrt.Report, folder: Path) -> xrt.Report:
    """Return a report without the paths of this machine."""
    text = report.to_json()
    roots = {
        sys.prefix,
        sys.base_prefix,
        *site.getsitepackages(),
        *filter(None, sys.path),
        sysconfig.get_path("purelib"),
    }
    for root in sorted(roots - {"/", str(Path.cwd())}, key=len, reverse=True):
        text = text.replace(root, "...")
    text = text.replace(f"{folder}/", "").replace(str(Path.cwd()), ".").replace(str(Path.home()), "~")
    found = msgspec.json.decode(text, type=xrt.Report)
    return msgspec.structs.replace(found, command="python tools/example_reports.py docs/examples")


def main() -> None:
    """Write four reports, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    target.mkdir(parents=True, exist_ok=True)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs = make()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            export(model, inputs, path)
            feeds: dict[str, Any] = {key: np.asarray(value) for key, value in inputs.items()}
            for precision in ("fp32", "fp16"):
                with xrt.InferenceSession(path, device="cuda:0", engine="onnxruntime", precision=precision) as session:
                    report = shortened(session.explain(feeds, runs=20), Path(folder))
                page = report.save_html(target / f"{name}-{precision}.html")
                report.save(target / f"{name}-{precision}.json")
                size = page.stat().st_size
                joined = sum(bool(unit.device_kernels) for unit in report.units)
                print(f"{page.name}: {report.headline}, {len(report.units)} units, {joined} with kernels, {size} bytes")
                if size > LARGEST:
                    sys.exit(f"{page} has {size} bytes, and a page is to have {LARGEST} at most")


if __name__ == "__main__":
    main()
