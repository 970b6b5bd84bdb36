# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Common ground of both sides of a native run: arrays in a folder, and a script that is loaded by its path.

The interpreter that runs a native configuration imports a copy of this file, and cannot import xpuruntime.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def refuse_xpuruntime() -> None:
    """Let every import of xpuruntime fail in this process. Raises RuntimeError where it is imported already."""
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "xpuruntime")
    if loaded:
        raise RuntimeError(f"the interpreter has imported {loaded[0]} by itself")
    sys.modules["xpuruntime"] = None  # type: ignore[assignment]


def load_script(path: str) -> Any:
    """Return a script as a module, without running what stands under ``__main__``."""
    spec = importlib.util.spec_from_file_location("native_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_run(script: str, inputs: str, outputs: str, opener: str = "open_model") -> tuple[Any, Any, dict[str, Any]]:
    """Run a script on the inputs and write the outputs; return it, the model that it opened, and the inputs."""
    refuse_xpuruntime()
    native = load_script(script)
    feeds = read_arrays(inputs)
    model = getattr(native, opener)()
    write_arrays(outputs, native.run(model, feeds))
    return native, model, feeds


def write_arrays(folder: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name into a new folder."""
    import numpy as np

    path = Path(folder)
    path.mkdir()
    for number, array in enumerate(arrays.values()):
        np.save(path / f"{number}.npy", np.asarray(array, order="C"), allow_pickle=False)
    (path / "names.json").write_text(json.dumps(list(arrays)), encoding="utf-8")


def read_arrays(folder: str) -> dict[str, Any]:
    """Return what `write_arrays` wrote, in the same order."""
    import numpy as np

    path = Path(folder)
    names = json.loads((path / "names.json").read_text(encoding="utf-8"))
    return {name: np.load(path / f"{number}.npy", allow_pickle=False) for number, name in enumerate(names)}
