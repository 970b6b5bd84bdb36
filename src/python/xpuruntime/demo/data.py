# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The files of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["demo_images", "demo_model_path"]

_FOLDER = Path(__file__).resolve().parent


def demo_model_path() -> Path:
    """Return the path of the shipped model.

    Returns
    -------
    pathlib.Path
        An ONNX file, opset 17. Input ``image``: float32 [N, 1, 8, 8], values 0..1. Output ``logits``: float32 [N, 10].
    """
    return _FOLDER / "digits.onnx"


def demo_images() -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the held-out images and their labels.

    The model was never trained on these images, nor were they used to choose when to stop.

    Returns
    -------
    images : numpy.ndarray
        float32 [360, 1, 8, 8], values 0..1, ready to be the model's input ``image``.
    labels : numpy.ndarray
        uint8 [360], values 0..9.
    """
    with np.load(_FOLDER / "digits_test.npz") as held_out:
        images: NDArray[np.float32] = held_out["images"].astype(np.float32)[:, None] / np.float32(16)
        labels: NDArray[np.uint8] = held_out["labels"]
    return images, labels
