# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`NpzArrays`: the arrays of an ``.npz`` or ``.npy`` file, whole or row by row, without holding the file in memory."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from xpuruntime.engines.quantisation.sample_error import SampleError
from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular, unpacked_too_large

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NpzArrays"]

_DAMAGE = (OSError, MemoryError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class NpzArrays(Mapping[str, Any]):
    """Name to array. An ``.npy`` file has one array, called `name`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._path, self._name = path, name
        self._names: list[str] = [name] if name is not None else []
        if name is None:
            with self._named(""), open_regular(path) as file, zipfile.ZipFile(file) as archive:
                reason = unpacked_too_large(archive, path.stat().st_size)
                if reason is not None:
                    raise ValueError(f"{reason}; np.savez does not compress")
                members = [member for member in archive.namelist() if member.endswith(".npy")]
            self._names = [member.removesuffix(".npy") for member in members]

    def __getitem__(self, name: str) -> Any:
        import numpy as np

        if name not in self._names:
            raise KeyError(name)
        with self._open(name) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape; reads no data."""
        with self._open(name) as file:
            return _header(file)[0]

    def rows(self, name: str, each: int) -> Iterator[Any]:
        """Yield `each` rows at a time, or with 0 one row without the first axis."""
        import numpy as np

        with self._open(name) as file:
            shape, fortran, dtype = _header(file)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            if fortran and len(shape) > 1:  # columns lie together: only the whole can be read
                whole = self[name]
                for start in range(0, shape[0], each or 1):
                    yield whole[start : start + each] if each else whole[start]
                return
            part = (each, *shape[1:]) if each else shape[1:]
            size = math.prod(part) * dtype.itemsize
            for _ in range(shape[0] // (each or 1)):
                data = file.read(size)
                if len(data) != size:
                    raise ValueError("it is cut off")
                yield np.frombuffer(data, dtype).reshape(part)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with self._named(name), contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(self._path))
            if self._name is not None:
                yield file
            else:
                archive = stack.enter_context(zipfile.ZipFile(file))
                yield stack.enter_context(archive.open(f"{name}.npy"))

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except _DAMAGE as error:
            what = (
                f"the array {name!r} of {self._path.name!r}" if name and self._name is None else f"{self._path.name!r}"
            )
            raise SampleError(
                f"{what} cannot be read: {reason_of(error)}. Write it again with np.savez or np.save"
            ) from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    import numpy as np

    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype
