# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of untrusted ``.pt2`` archives: content that PyTorch would run or unpack without end.

`torch.export.load` unpickles, evaluates the expressions of sizes with SymPy, and writes the names of a graph into
Python code. Here every pickle is loaded with PyTorch's own list of harmless types (``weights_only=True``), and
`check_program` checks the rest. What passes can be loaded without running code of the file.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.torch.program.text_checks import Unsafe, check_program
from xpuruntime.files.reading import unpacked_too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

__all__ = ["check_archive", "check_sizes"]

_AGAIN = "copy it or export it again with torch.export.save"
_TRUST = (
    "load it only if you trust who made it, with trust=True (on the command line --trust); or export it again from "
    "plain tensors"
)
#: Folders of an archive that hold pickles as a whole, and files that do in the format before PyTorch 2.8.
_PICKLES = ("data/sample_inputs/",)
_OLD_PICKLES = re.compile(r"serialized_(state_dict|constants|example_inputs)\.(pt|json)")
_OLD_PROGRAM = "serialized_exported_program.json"
_GLOBAL = re.compile(r"(?:GLOBAL|class|type|global) '?([\w.]+)")


def check_sizes(path: str) -> tuple[str, ...]:
    """Return the members' names of a ``.pt2`` file."""
    file = Path(path)
    with _whole(path):
        whole = zipfile.is_zipfile(file)
    if not whole:
        raise refuse(path, "it is no archive, so no exported program, or it is cut off", "export or copy it again")
    with _whole(path), zipfile.ZipFile(file) as archive:
        reason = unpacked_too_large(archive, file.stat().st_size)
        names = tuple(archive.namelist())
    if reason is not None:
        raise refuse(path, reason, _AGAIN)
    return names


def check_archive(path: str) -> None:
    """Refuse an archive of which loading would run code, or take time or memory without bound."""
    from xpuruntime.pytorch._private_api import archive_reader

    with _whole(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if _OLD_PICKLES.fullmatch(member.filename):
                    _check_pickle(path, member.filename, archive.read(member))
                elif member.filename == _OLD_PROGRAM:
                    _check_json_program(path, member.filename, archive.read(member))
        reader = archive_reader(path)
        records = reader.get_all_records()

    def read(name: str) -> bytes:
        with _whole(path):
            found: bytes = reader.get_record(name)
        return found

    def size(name: str) -> int:
        with _whole(path):
            if hasattr(reader, "get_record_size"):
                return int(reader.get_record_size(name))
            return len(reader.get_record(name))  # PyTorch 2.11

    for name in records:
        if name.startswith("models/"):
            _check_json_program(path, name, read(name))
        elif name.startswith(_PICKLES):
            _check_pickle(path, name, read(name))
        elif name.startswith(("data/weights/", "data/constants/")):
            if name.endswith("_config.json"):
                _check_payloads(path, name, read, size, records)
            elif name.endswith(".pt"):
                _check_pickle(path, name, read(name))


def _check_payloads(
    path: str, name: str, read: Callable[[str], bytes], size: Callable[[str], int], records: list[str]
) -> None:
    """Check the table of weights or of constants: those that are pickles, and those without bytes."""
    folder = name.rpartition("/")[0]
    for weight, entry in _entries(path, name, read(name)):
        member = f"{folder}/{entry.get('path_name')}"
        base = member.rpartition("/")[2]
        if base.startswith(("opaque_obj", "custom_obj")):
            _untrusted(path, f"{weight!r} is a Python object ({member})")
        if member not in records:
            raise refuse(path, f"the data of {weight!r} is missing: it has no {member!r}", _AGAIN)
        if entry.get("use_pickle"):
            _check_pickle(path, member, read(member))
        elif not _holds(entry, size(member)):
            raise refuse(path, f"{weight!r} has no data and a size that is not 0", _AGAIN)


def _holds(entry: dict[str, Any], size: int) -> bool:
    """Say whether a member without bytes is for a tensor without elements: PyTorch makes zeros of any size else."""
    meta = entry.get("tensor_meta")
    sizes = meta.get("sizes") if isinstance(meta, dict) else None
    return size > 0 or (isinstance(sizes, list) and any(isinstance(s, dict) and s.get("as_int") == 0 for s in sizes))


def _entries(path: str, name: str, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    with _whole(path):
        table = json.loads(data)
    found = table.get("config") if isinstance(table, dict) else None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise refuse(path, f"{name} is no table of tensors", _AGAIN)
    yield from found.items()


def _check_json_program(path: str, name: str, data: bytes) -> None:
    with _whole(path):
        program = json.loads(data)
    try:
        check_program(program)
    except Unsafe as found:
        _untrusted(path, f"{found} ({name})")
    except RecursionError:
        raise refuse(path, f"{name} is nested too deeply", _AGAIN) from None


def _check_pickle(path: str, name: str, data: bytes) -> None:
    import torch

    if not data:
        return
    with _whole(path):
        packed = zipfile.is_zipfile(io.BytesIO(data))
    if packed:
        with _whole(path), zipfile.ZipFile(io.BytesIO(data)) as inner:
            reason = unpacked_too_large(inner, len(data))
        if reason is not None:
            raise refuse(path, f"{name}: {reason}", _AGAIN)
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        named = _GLOBAL.search(str(error))
        what = f"a pickle that names {named[1]}" if named else "a pickle of more than tensors and plain values"
        _untrusted(path, f"{name} is {what}")


def _untrusted(path: str, what: str) -> NoReturn:
    raise refuse(path, f"{what}, so loading it can run code of the file", _TRUST)


class _whole:  # noqa: N801 - reads as a statement
    """Turn what a damaged archive raises into a `ModelError`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not hasattr(error, "engine"):
            text = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise refuse(self._path, f"the archive is damaged: {text}", _AGAIN) from None
