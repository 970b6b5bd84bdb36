# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Export the two test models of ``tests/models`` from PyTorch: a transformer encoder and a convnet.

Needs PyTorch and onnxscript::

    python tools/export_test_models.py
    python tools/export_test_models.py --check

Seeded and single-threaded: with one version of PyTorch, two runs write the same files. Nothing is trained: weights are
drawn, then batch normalization takes its statistics from drawn inputs and is folded into the convolutions and the last
product, so that outputs differ from one input to the next.
``--check`` writes nothing, and fails where a file does not compute what PyTorch computes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name everybody knows it by)
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

SEED = 0
FOLDER = Path(__file__).resolve().parent.parent / "tests" / "models"
VOCABULARY, LONGEST, WIDTH, HEADS, LAYERS, CLASSES = 256, 128, 64, 4, 3, 8
OPSETS = {"encoder": 20, "convnet": 18}


class Block(nn.Module):
    """One layer, normalized before attention and before the two products with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, length, WIDTH] to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Encoder(nn.Module):
    """`ids` int64 [batch, length], below 256 and at most 128 long, to `hidden` [batch, length, 64] and `logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.bn = nn.BatchNorm1d(CLASSES)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states, and logits of their mean over the sequence."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        hidden = self.ln(x)
        return hidden, self.bn(self.head(hidden.mean(dim=1)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which has a convolution of its own where the size changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()
        self.bn3 = nn.BatchNorm2d(outside) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, inside, h, w] to [n, outside, h / stride, w / stride]."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.bn3(self.short(x)))


class Convnet(nn.Module):
    """`image` float32 [batch, 3, 32, 32] to `logits` [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
        self.head = nn.Linear(64, 10)
        self.bn_head = nn.BatchNorm1d(10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.blocks(F.relu(self.bn(self.stem(image))))
        return self.bn_head(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)))


def drawn_images(count: int) -> torch.Tensor:
    """Return images with values 0..1: coarse patterns under fine noise, [count, 3, 32, 32]."""
    coarse = F.interpolate(torch.rand(count, 3, 4, 4), size=32, mode="bilinear")
    return (0.8 * coarse + 0.2 * torch.rand(count, 3, 32, 32)).clamp(0, 1)


def encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the encoder and example inputs. Some channels are louder than others, as in trained ones."""
    torch.manual_seed(SEED)
    model = Encoder()
    with torch.no_grad():
        for layer in model.layers:
            layer.ln_1.weight.copy_(torch.exp(0.4 * torch.randn(WIDTH)))
            layer.ln_2.weight.copy_(torch.exp(0.4 * torch.randn(WIDTH)))
        model.train()
        for _ in range(40):
            model(torch.randint(VOCABULARY, (64, 16)))
    model.eval()
    model.head, model.bn = fuse_linear_bn_eval(model.head, model.bn), nn.Identity()
    return model, (torch.randint(VOCABULARY, (2, 16)),)


def convnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the convnet with folded normalization, and example inputs."""
    torch.manual_seed(SEED)
    model = Convnet().train()
    with torch.no_grad():
        for _ in range(40):
            model(drawn_images(64))
    model.eval()
    model.stem, model.bn = fuse_conv_bn_eval(model.stem, model.bn), nn.Identity()
    model.head, model.bn_head = fuse_linear_bn_eval(model.head, model.bn_head), nn.Identity()
    for block in model.blocks:
        block.conv1, block.bn1 = fuse_conv_bn_eval(block.conv1, block.bn1), nn.Identity()
        block.conv2, block.bn2 = fuse_conv_bn_eval(block.conv2, block.bn2), nn.Identity()
        if not isinstance(block.short, nn.Identity):
            block.short, block.bn3 = fuse_conv_bn_eval(block.short, block.bn3), nn.Identity()
    return model, (drawn_images(2),)


def export(name: str, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    """Return the model as PyTorch exports it, without traces of the machine it was made on."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    length = torch.export.Dim("length", min=1, max=LONGEST)
    names, shapes = {
        "encoder": ((["ids"], ["hidden", "logits"]), ({0: batch, 1: length},)),
        "convnet": ((["image"], ["logits"]), ({0: batch},)),
    }[name]
    program = torch.onnx.export(
        model, inputs, dynamo=True, verbose=False, opset_version=OPSETS[name],
        input_names=names[0], output_names=names[1], dynamic_shapes=shapes,
    )  # fmt: skip
    proto = program.model_proto
    for value in (proto, proto.graph, *proto.graph.node, *proto.graph.initializer, *proto.graph.value_info,
                  *proto.graph.input, *proto.graph.output):  # fmt: skip
        value.ClearField("metadata_props")
        value.ClearField("doc_string")
    proto.graph.name = name
    onnx.checker.check_model(proto, full_check=True)
    return proto


def difference(proto: onnx.ModelProto, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the largest difference from PyTorch over all outputs, as a share of the largest magnitude."""
    import onnxruntime

    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {value.name: array.numpy() for value, array in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        wanted = model(*inputs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    pairs = zip(session.run(None, feeds), wanted, strict=True)
    return max(float(np.abs(got - want.numpy()).max() / want.abs().max()) for got, want in pairs)


def main() -> int:
    """Write or check both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the files with PyTorch and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for name, make in (("encoder", encoder), ("convnet", convnet)):
        model, inputs = make()
        path = FOLDER / f"{name}.onnx"
        proto = onnx.load(path) if options.check else export(name, model, inputs)
        error = difference(proto, model, inputs)
        worst = max(worst, error)
        if not options.check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_bytes(proto.SerializeToString(deterministic=True))
        print(f"{path.name}: {path.stat().st_size:,} bytes, {len(proto.graph.node)} nodes, {error:.1e} from PyTorch")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
