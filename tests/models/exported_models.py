# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The two models exported from PyTorch, and inputs for them; on the path of every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
ENCODER = FOLDER / "encoder.onnx"
CONVNET = FOLDER / "convnet.onnx"
NAMES = ("encoder", "convnet")


def exported(name: str) -> Path:
    """Return the path of ``"encoder"`` or ``"convnet"``."""
    return {"encoder": ENCODER, "convnet": CONVNET}[name]


def example(name: str, batch: int = 2, length: int = 16, seed: int = 1) -> dict[str, Any]:
    """Return inputs: `ids` int64 [batch, length], or `image` float32 [batch, 3, 32, 32]. Same seed, same inputs."""
    rng = np.random.default_rng(seed)
    if name == "encoder":
        return {"ids": rng.integers(0, 256, (batch, length))}
    coarse = np.repeat(np.repeat(rng.random((batch, 3, 4, 4)), 8, axis=2), 8, axis=3)
    return {"image": (0.8 * coarse + 0.2 * rng.random((batch, 3, 32, 32))).astype(np.float32)}


def samples(name: str, count: int = 32, length: int = 16, seed: int = 100) -> list[dict[str, Any]]:
    """Return `count` inputs of batch 1 to calibrate with; none of them is an `example`."""
    return [example(name, 1, length, seed + index) for index in range(count)]
