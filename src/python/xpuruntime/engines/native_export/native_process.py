# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`native_call`: a function of a stand-alone file, called in an interpreter that cannot import xpuruntime."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.native_export import native_side
from xpuruntime.engines.native_export.native_side import read_arrays, write_arrays
from xpuruntime.errors import EngineFailed, EngineUnavailable, InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.runtime.worker import Worker, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NativeAnswer", "native_call"]

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
