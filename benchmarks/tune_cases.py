# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that `bench_tune_gpu` searches policies for: their inputs, the engine, and what is tuned by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from decoder_model import decoder_step, step_inputs
from onnx_models import encoder, resnet, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES = 4
NHWC = {"layout": "nhwc", "cuda_graph": "require"}
#: Those of ``bench_resnet.py`` that are fastest, and those of an encoder and a decoder in ``bench_ort_custom_ops.py``.
CONV_BY_HAND: dict[str, dict[str, Any]] = {
    "default": {},
    "fp32 nhwc graph": {"execution": {"precision": "fp32", **NHWC}, "kernels": {"conv": "cudnn_exhaustive"}},
    "tf32 nhwc graph": {"execution": {"precision": "tf32", **NHWC}, "kernels": {"conv": "cudnn_exhaustive"}},
    "fp16 nhwc graph": {"execution": {"precision": "fp16", **NHWC}, "kernels": {"conv": "cudnn_exhaustive"}},
}
ENCODER_BY_HAND: dict[str, dict[str, Any]] = {
    "default": {},
    "tf32 graph": {"execution": {"precision": "tf32", "cuda_graph": "require"}},
    "fp16 graph": {"execution": {"precision": "fp16", "cuda_graph": "require"}},
}
DECODER_BY_HAND: dict[str, dict[str, Any]] = {
    "default": {},
    "graph": {"execution": {"cuda_graph": "require"}},
    "graph, own kernels": {
        "execution": {"cuda_graph": "require"},
        "kernels": {
            "matmul": ["cuda_raw.skinny", "cublasLt"],
            "attention": "cuda_raw.flash_attention_v2",
            "layer_norm": "cuda_raw",
        },
    },
}


@dataclass(frozen=True)
class Case:
    """A model and what its search is compared with.

    Attributes
    ----------
    suffix : str
        Of the file.
    make : callable
        Writes the model to a path.
    samples : callable
        Returns the inputs of the search, and those of the comparison.
    engine : str
    batch : int or None
        Rows of a run, where the model leaves them open.
    policies : dict
        By hand, by name.
    callables : callable, optional
        Returns functions by name that run the model on a path and inputs without xpuruntime.
    fixed : dict
        Settings of `execution` that the search may not change.
    """

    suffix: str
    make: Callable[[Path], None]
    samples: Callable[[], tuple[Any, dict[str, np.ndarray]]]
    engine: str = "onnxruntime"
    batch: int | None = None
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    callables: Callable[[Path, dict[str, Any]], dict[str, Callable[[], Any]]] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)


def _write(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _rows(name: str, row: tuple[int, ...], batch: int) -> tuple[Any, dict[str, np.ndarray]]:
    rows = rows_of(name, row, (SAMPLES + 1) * batch, 30522)
    return {name: rows[batch:]}, {name: rows[:batch]}


def _resnet(batch: int, **more: Any) -> Case:
    data, inputs = resnet()
    ((name, row),) = inputs.items()
    return Case(".onnx", _write(data), lambda: _rows(name, row, batch), batch=batch, **more)


def _encoder(batch: int) -> Case:
    data, inputs = encoder()
    ((name, row),) = inputs.items()
    return Case(".onnx", _write(data), lambda: _rows(name, row, batch), batch=batch, policies=ENCODER_BY_HAND)


def _decoder(batch: int, past: int) -> Case:
    def samples() -> tuple[Any, dict[str, np.ndarray]]:
        given = step_inputs(batch, past)
        other = {name: value if name == "position" else np.roll(value, 1, axis=-1) for name, value in given.items()}
        return [given, {**other, "tokens": (given["tokens"] + 1) % 50257}], given

    return Case(".onnx", _write(decoder_step(batch, past)), samples, policies=DECODER_BY_HAND)


def _program() -> Case:
    """Return torchvision's ResNet-50 as an exported program."""

    def make(path: Path) -> None:
        import torch
        import torchvision

        torch.manual_seed(0)
        model = torchvision.models.resnet50(weights=None).eval()
        torch.export.save(torch.export.export(model, (torch.zeros(1, 3, 224, 224),)), path)

    def by_hand(path: Path, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        import torch

        (image,) = given.values()
        found: dict[str, Callable[[], Any]] = {}
        for name, dtype in (("", torch.float32), (", fp16", torch.float16)):
            module = torch.export.load(path).module().to(image.device, dtype)
            x = image.to(dtype)
            compiled = torch.compile(module, mode="reduce-overhead")
            for kind, function in (("eager", module), ("torch.compile reduce-overhead", compiled)):
                found[kind + name] = torch.no_grad()(lambda f=function, x=x: f(x))
        return found

    def samples() -> tuple[Any, dict[str, np.ndarray]]:
        import torch

        given = torch.randn(SAMPLES + 1, 1, 3, 224, 224, generator=torch.Generator().manual_seed(1)).numpy()
        return [{"x": one} for one in given[1:]], {"x": given[0]}

    return Case(".pt2", make, samples, engine="torch", callables=by_hand)


CASES: dict[str, Callable[[], Case]] = {
    "resnet50, batch 1": lambda: _resnet(1, policies=CONV_BY_HAND),
    "resnet50, batch 32": lambda: _resnet(32, policies=CONV_BY_HAND),
    "resnet50, batch 1, fp32 kept": lambda: _resnet(
        1, policies={name: CONV_BY_HAND[name] for name in ("default", "fp32 nhwc graph")}, fixed={"precision": "fp32"}
    ),
    "encoder, batch 8": lambda: _encoder(8),
    "decoder step, batch 4": lambda: _decoder(4, 511),
    "resnet50.pt2, batch 1": _program,
}
