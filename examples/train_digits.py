# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Train the model that `xrt demo` runs, and write it with its held-out images into the package.

A small convolutional network on scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels, of which 360
are held out and never trained on. Needs PyTorch and scikit-learn::

    python examples/train_digits.py

Seeded and single-threaded: two runs on one machine write the same files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name everybody knows it by)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED = 0
HELD_OUT = 360
EPOCHS = 40
BATCH = 64
TARGET = 0.98
PACKAGE = Path(__file__).resolve().parent.parent / "src" / "python" / "xpuruntime" / "demo"


class DigitsNet(nn.Module):
    """Three convolutions, each with batch normalization, then two matrix products: float32 [N, 1, 8, 8] to [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [N, 10] for images [N, 1, 8, 8] with values in 0..1."""
        x = F.relu(self.bn1(self.conv1(image)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.bn3(self.conv3(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(F.dropout(x, 0.3, self.training))


def load_split() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Return training images, held-out images [n, 8, 8] with values 0..16, and their labels: always the same split."""
    digits = load_digits()
    parts = train_test_split(
        digits.images.astype(np.uint8),
        digits.target.astype(np.uint8),
        test_size=HELD_OUT,
        random_state=SEED,
        stratify=digits.target,
    )
    return tuple(parts)


def as_batch(images: NDArray[np.uint8]) -> torch.Tensor:
    """Turn images with values 0..16 into float32 [n, 1, 8, 8] with values 0..1."""
    return torch.from_numpy(images.astype(np.float32)[:, None] / 16.0)


def jitter(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turn and shift each image a little, so that the network sees more handwriting than there is."""
    n = images.shape[0]
    angle = (torch.rand(n, generator=generator) - 0.5) * 0.5
    scale = 1.0 + (torch.rand(n, generator=generator) - 0.5) * 0.2
    shift = (torch.rand(n, 2, generator=generator) - 0.5) * 0.35
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1] = -angle.sin() * scale
    theta[:, 1, 0] = angle.sin() * scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(images: torch.Tensor, labels: torch.Tensor) -> DigitsNet:
    """Train for a fixed number of epochs. The held-out images play no part, not even to choose when to stop."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = DigitsNet()
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    model.train()
    for epoch in range(EPOCHS):
        total = 0.0
        for part in torch.randperm(len(images), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(jitter(images[part], generator)), labels[part], label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(part)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:3d}  training loss {total / len(images):.4f}")
    return model.eval()


def to_onnx(model: DigitsNet) -> onnx.ModelProto:
    """Write the graph by hand, with plain node names, so that evidence is easy to read. Opset 17, any batch size."""
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items() if value.ndim}
    nodes = []
    x = "image"
    for i in (1, 2, 3):
        norm = [f"bn{i}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        nodes += [
            helper.make_node("Conv", [x, f"conv{i}.weight"], [f"c{i}"], name=f"conv{i}", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", [f"c{i}", *norm], [f"n{i}"], name=f"bn{i}", epsilon=1e-5),
            helper.make_node("Relu", [f"n{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        x = f"r{i}"
        if i > 1:
            nodes.append(
                helper.make_node("MaxPool", [x], [f"p{i}"], name=f"pool{i}", kernel_shape=[2, 2], strides=[2, 2])
            )
            x = f"p{i}"
    nodes += [
        helper.make_node("Flatten", [x], ["flat"], name="flatten", axis=1),
        helper.make_node("Gemm", ["flat", "fc1.weight", "fc1.bias"], ["h"], name="fc1", transB=1),
        helper.make_node("Relu", ["h"], ["hr"], name="relu4"),
        helper.make_node("Gemm", ["hr", "fc2.weight", "fc2.bias"], ["logits"], name="fc2", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()],
        doc_string="Handwritten digits, 8 x 8 pixels in 0..1, to ten logits. Written by examples/train_digits.py.",
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="xpuruntime")
    proto.ir_version = 8
    onnx.checker.check_model(proto, full_check=True)
    return proto


def main() -> int:
    """Train, check against the target, and write `digits.onnx` and `digits_test.npz`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGE, help="folder to write to (default: the package)")
    out: Path = parser.parse_args().out
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    train_images, test_images, train_labels, test_labels = load_split()
    model = train(as_batch(train_images), torch.from_numpy(train_labels).long())
    with torch.inference_mode():
        predicted = model(as_batch(test_images)).argmax(1).numpy()
    accuracy = float((predicted == test_labels).mean())
    print(f"accuracy on {len(test_labels)} held-out images: {accuracy:.2%}")
    if accuracy < TARGET:
        print(f"error: below the target of {TARGET:.0%}; nothing was written", file=sys.stderr)
        return 1

    out.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(model), out / "digits.onnx")
    np.savez_compressed(out / "digits_test.npz", images=test_images, labels=test_labels)
    for name in ("digits.onnx", "digits_test.npz"):
        print(f"wrote {out / name} ({(out / name).stat().st_size:,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
