# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files of a model in an export: the graph with its external data, beside what the export itself writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.model.external import is_external
from xpuruntime.engines.model.graph import tensors
from xpuruntime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.model_source import ModelSource

__all__ = ["free_place", "write_model"]


def write_model(source: ModelSource, folder: Path, *, also: Sequence[str] = ()) -> None:
    """Write a prepared model as ``model.onnx``, and its external data at the same relative places, into a folder."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.onnx"
    if isinstance(source.model, bytes):
        target.write_bytes(source.model)
        base = source.folder
    else:
        shutil.copyfile(source.model, target)
        base = str(Path(source.model).resolve().parent) if source.folder is None else source.folder
    proto = onnx.load(str(target), load_external_data=False)
    places = {
        entry.value
        for tensor in tensors(proto)
        if is_external(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for place in sorted(places):
        if Path(place).is_absolute() or ".." in Path(place).parts or base is None:
            raise ModelError(f"{source.label}: its data {place!r} is outside of its folder. Fix: save the model again")
        target = free_place(folder, place, also=also)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(base) / place, target)


def free_place(folder: Path, name: str, *, also: Sequence[str] = ()) -> Path:
    """Return the place of a file of a model in an export."""
    if os.path.normpath(name) in also or os.path.lexists(folder / name):
        raise ModelError(
            f"{name!r} is a file of the model, and an export writes a file of that name. Fix: save the model again "
            "with its data in a file of another name, such as weights.bin"
        )
    return folder / name
