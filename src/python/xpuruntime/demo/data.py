# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The files of the demo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

__all__ = ["demo_images", "demo_model_path", "write_demo_files"]

_FOLDER = Path(__file__).resolve().parent
_POLICY = """\
schema: xpuruntime.policy/1
mode: strict # refuse what cannot be enforced
execution: { engine: onnxruntime, device: cpu, precision: fp32, fallback: error }
"""


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


def write_demo_files(folder: str | PathLike[str]) -> list[Path]:
    """Write the files that the commands of the documentation name.

    Returns
    -------
    list of pathlib.Path
        ``model.onnx``, the shipped model; ``retrained.onnx``, the same graph with other weights; ``policy.yaml``.

    Raises
    ------
    InputError
        A file of that name is there.
    """
    import onnx
    from onnx import numpy_helper

    paths = [Path(folder) / name for name in ("model.onnx", "retrained.onnx", "policy.yaml")]
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists, and is not overwritten. Fix: xrt demo --files new-folder")
    Path(folder).mkdir(parents=True, exist_ok=True)
    retrained = onnx.load(_FOLDER / "digits.onnx")
    weight = retrained.graph.initializer[0]
    values = (numpy_helper.to_array(weight) * 1.01).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    shutil.copy(_FOLDER / "digits.onnx", paths[0])
    onnx.save(retrained, paths[1])
    paths[2].write_text(_POLICY, encoding="utf-8")
    return paths
