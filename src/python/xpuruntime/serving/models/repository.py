# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Versions of a model on disk: a file, a compiled artifact, or a folder of versions."""

from __future__ import annotations

import os
import re
from pathlib import Path

from xpuruntime.artifacts.reading import made_files
from xpuruntime.errors import InputError, ModelError
from xpuruntime.files.paths import reason_of

__all__ = ["find_versions", "size_on_disk"]

_MODELS = (".onnx", ".pt2")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def find_versions(source: str, wanted: str | tuple[int, ...]) -> dict[int, str]:
    """Return the versions of a model to serve, each with the path that a session is opened with.

    Parameters
    ----------
    source : str
        A model file or artifact is version 1; a folder has a model file or an artifact in each of ``1``, ``2``, ...
    wanted : {"latest", "all"} or tuple of int

    Raises
    ------
    ModelError
        There is no such path, no version, or a version that is wanted has no model, or several.
    InputError
        A version that is wanted is not there.
    """
    path = Path(source)
    found = {1: path} if path.is_file() or made_files(path) is not None else _versions(path)
    if wanted == "latest":
        chosen = [max(found)]
    elif wanted == "all":
        chosen = sorted(found)
    else:
        chosen = [int(version) for version in wanted]
    missing = [version for version in chosen if version not in found]
    if missing:
        raise InputError(
            f"{source} has no version {missing[0]}; it has {', '.join(map(str, sorted(found)))}. "
            "Fix: correct 'versions'"
        )
    if found.get(1) == path:
        return {1: source}
    return {version: str(_model_in(found[version])) for version in chosen}


def _versions(folder: Path) -> dict[int, Path]:
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {reason_of(error)}. Fix: correct 'source'") from None
    found = {int(name): folder / name for name in names if _VERSION.fullmatch(name)}
    if not found:
        raise ModelError(
            f"{folder} is neither a compiled artifact nor a folder of versions. Fix: put each version into a folder "
            "1, 2, ... of it"
        )
    return found


def _model_in(folder: Path) -> Path:
    if made_files(folder) is not None:
        return folder
    inside = sorted(folder.iterdir())
    models = [one for one in inside if one.suffix in _MODELS and one.is_file()]
    models += [one for one in inside if one.is_dir() and made_files(one) is not None]
    if len(models) != 1:
        names = f"several: {', '.join(one.name for one in models)}" if models else "none"
        raise ModelError(
            f"{folder} must hold one model ({', '.join(_MODELS)}, or a compiled artifact), and holds {names}. "
            "Fix: keep one"
        )
    return models[0]


def size_on_disk(path: str) -> int:
    """Return the bytes of a model file, without weights in other files, or of all files of an artifact."""
    place = Path(path)
    if place.is_dir():
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return place.stat().st_size
