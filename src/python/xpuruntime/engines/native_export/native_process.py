# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files of a model in an export, and `native_call`: a function of a stand-alone file, called without xpuruntime."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.external import is_external
from xpuruntime.engines.model.graph import tensors
from xpuruntime.engines.native_export import native_side
from xpuruntime.engines.native_export.native_side import read_arrays, write_arrays
from xpuruntime.errors import EngineFailed, EngineUnavailable, InputError, ModelError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.runtime.worker import Worker, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xpuruntime.engines.model_source import ModelSource

__all__ = [
    "NativeAnswer",
    "free_place",
    "native_call",
    "write_model",
]

#: Seconds that loading and running a model may take.
_TIMEOUT = 600.0


class NativeAnswer(NamedTuple):
    """What the function returned, the outputs that it wrote, and the folder of its other files."""

    value: dict[str, Any]
    outputs: dict[str, Any]
    folder: Path


@contextlib.contextmanager
def native_call(
    worker_file: Path, script: Path, feeds: Mapping[str, Any], python: str | None, engine: str, **arguments: Any
) -> Iterator[NativeAnswer]:
    """Call ``run(script, inputs, outputs, folder, ...)`` of a stand-alone file in a fresh interpreter."""
    with ScratchFolder("export") as scratch:
        folder = Path(scratch)
        for source in (Path(native_side.__file__), worker_file):
            shutil.copyfile(source, folder / source.name)
        inputs, outputs = str(folder / "inputs"), str(folder / "outputs")
        try:
            write_arrays(inputs, feeds)
        except ValueError as error:
            raise InputError(f"the inputs cannot be handed to another interpreter: {error}") from None
        try:
            with Worker(
                python, pythonpath=[folder], environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, timeout=_TIMEOUT
            ) as worker:
                value = worker.call(
                    f"{worker_file.stem}:run",
                    script=str(script),
                    inputs=inputs,
                    outputs=outputs,
                    folder=str(folder),
                    **arguments,
                )
        except WorkerFailure as failure:
            if "ImportError" in failure.exceptions:
                raise EngineUnavailable(
                    f"{script} does not run: {failure.reason}. Fix: pip install -r "
                    f"{script.with_name('requirements.txt')}, or name another interpreter with --python",
                    engine=engine,
                ) from None
            raise EngineFailed(f"{script} does not run: {failure}", engine=engine) from None
        yield NativeAnswer(value, read_arrays(outputs), folder)


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
