# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Calibration`: inputs of a model to quantize it with, from files, folders, arrays or generators."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from xpuruntime.engines.arrays import digest_parts
from xpuruntime.engines.input_binding import ConversionLog, InputValidator
from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of, reason_of, user_path
from xpuruntime.files.reading import open_regular, unpacked_too_large

if TYPE_CHECKING:
    import numpy as np

    from xpuruntime.engines.model import ModelInfo

#: A generator's samples stay in memory up to this many bytes, and go to a temporary file beyond.
_IN_MEMORY = 64 << 20

_WHAT = (
    "pass the path of an .npz file or of a folder, a mapping of input name to array, or an iterable of "
    "mappings, each of which is the inputs of one run"
)


class CalibrationSamples(Protocol):
    """Samples in an order that is always the same; may be gone through any number of times."""

    origin: str

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield where a sample is from, for messages, and its arrays by name."""


def open_source(data: Any, model: ModelInfo) -> CalibrationSamples:
    """Return `data` as samples; see `Calibration`."""
    if isinstance(data, (str, os.PathLike)):
        return _open_path(user_path(data, "the calibration inputs"), model)
    if isinstance(data, Mapping):
        return _Stacked(data, "the mapping", model)
    if hasattr(data, "__array__") or hasattr(data, "__dlpack__"):
        return _Stacked({_only_input(model): data}, "the array", model)
    if isinstance(data, (list, tuple)):
        return _Listed(data, f"a list of {len(data)}", model)
    if isinstance(data, Iterator):
        return _Spooled(data, model)
    if isinstance(data, Iterable) and not isinstance(data, (bytes, bytearray)):
        return _Spooled(iter(data), model)
    raise SampleError(f"takes no {type(data).__name__}. Fix: {_WHAT}", argument="calibration=")


def _open_path(path: Path, model: ModelInfo) -> CalibrationSamples:
    kind = kind_of(path)
    if kind == "folder":
        return _Folder(path, model)
    if kind == "missing":
        arrays = ", ".join(f"{info.name!r}: samples" for info in model.inputs)
        write = f"write it with numpy.savez({str(path.with_suffix('.npz'))!r}, **{{{arrays}}})"
        raise SampleError(
            f"there is no file or folder {str(path)!r}. Fix: {write}, or name an .npz file or a folder that is there"
        )
    if kind != "file":
        raise SampleError(f"{str(path)!r} is no regular file or folder ({kind}). Fix: {_WHAT}")
    if path.suffix == ".npz":
        return _Stacked(NpzArrays(path.absolute()), path.name, model)
    if path.suffix == ".npy":
        return _Stacked(NpzArrays(path.absolute(), name=_only_input(model)), path.name, model)
    raise SampleError(f"{path.name!r} is neither .npz nor .npy nor a folder. Fix: {_WHAT}")


def _only_input(model: ModelInfo) -> str:
    if len(model.inputs) != 1:
        names = ", ".join(repr(tensor.name) for tensor in model.inputs)
        raise SampleError(
            f"bare arrays are for models with one input, and this one has {len(model.inputs)}: {names}; "
            "give each array its input's name, in a mapping or an .npz file"
        )
    return model.inputs[0].name


class _Stacked:
    """Arrays by name: the first axis counts samples; or ``"<input>/<number>"``, one array for each sample."""

    def __init__(self, arrays: Mapping[str, Any], origin: str, model: ModelInfo) -> None:
        self.origin = origin
        self._arrays = arrays
        known = {tensor.name: tensor for tensor in (*model.inputs, *model.overridable_inputs)}
        self._tensors = known
        self._numbered = self._find_numbered()

    def _find_numbered(self) -> list[dict[str, str]]:
        """Return, for each sample, input name to key; empty where the first axis counts."""
        numbered: dict[int, dict[str, str]] = {}
        for key in self._arrays:
            name, slash, number = str(key).rpartition("/")
            if key in self._tensors or not slash or name not in self._tensors:
                continue
            if not number.isdecimal():
                raise SampleError(f"{self.origin} has the array {key!r}. Fix: write '{name}/0', '{name}/1', …")
            numbered.setdefault(int(number), {})[name] = key
        if not numbered:
            return []
        unnumbered = [key for key in self._arrays if key in self._tensors]
        if unnumbered:
            raise SampleError(
                f"{self.origin} has {unnumbered[0]!r} for all samples beside arrays for single ones such as "
                f"{next(iter(numbered[min(numbered)].values()))!r}. Fix: write all inputs in one of the two ways"
            )
        if sorted(numbered) != list(range(len(numbered))):
            gap = next(i for i in range(len(numbered)) if i not in numbered)
            raise SampleError(f"{self.origin} has no arrays numbered {gap}, but higher ones; number from 0 on")
        return [numbered[number] for number in range(len(numbered))]

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self._numbered:
            for number, keys in enumerate(self._numbered):
                yield f"number {number} of {self.origin}", {name: self._arrays[key] for name, key in keys.items()}
            return
        yield from self._rows()

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        arrays = self._arrays if isinstance(self._arrays, NpzArrays) else _InMemory(self._arrays)
        sizes: dict[str, tuple[int, int]] = {}
        for name in self._arrays:
            shape = arrays.shape(name)
            if not shape:
                raise SampleError(f"{name!r} of {self.origin} is a single number; its first axis counts samples")
            sizes[name] = (shape[0], self._rows_each(name, shape))
        counts = {name: rows // (each or 1) for name, (rows, each) in sizes.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name!r} {count}" for name, count in counts.items())
            raise SampleError(
                f"the inputs of {self.origin} have different numbers of samples: {told}. Fix: give equal ones"
            )
        streams = {name: arrays.rows(name, each) for name, (_, each) in sizes.items()}
        for number in range(next(iter(counts.values()), 0)):
            yield f"number {number} of {self.origin}", {name: next(stream) for name, stream in streams.items()}

    def _rows_each(self, name: str, shape: tuple[int, ...]) -> int:
        """Return how many rows make a sample; 0 where a row is a whole input."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape is None or len(shape) != len(tensor.shape):
            return 0
        batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
        if batch and shape[0] % batch:
            raise SampleError(
                f"{name!r} of {self.origin} has {shape[0]} rows, and the model takes {batch} at a time; "
                f"give a multiple of {batch}"
            )
        return batch or 1


class _InMemory:
    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def shape(self, name: str) -> tuple[int, ...]:
        array = self._arrays[name]
        if not hasattr(array, "shape"):
            raise SampleError(f"{name!r} is a {type(array).__name__}, not an array. Fix: pass np.asarray(x)")
        return tuple(int(size) for size in array.shape)

    def rows(self, name: str, each: int) -> Iterator[Any]:
        array = self._arrays[name]
        for start in range(0, len(array), each or 1):
            yield array[start : start + each] if each else array[start : start + 1].reshape(array.shape[1:])


class _Folder:
    """A folder: each file is one sample."""

    def __init__(self, folder: Path, model: ModelInfo) -> None:
        self.origin = f"the folder {folder.name!r}"
        self._model = model
        try:
            self._files = sorted(path for path in folder.absolute().iterdir() if path.suffix in (".npz", ".npy"))
        except OSError as error:
            raise SampleError(f"the folder {str(folder)!r} cannot be read: {reason_of(error)}") from None
        if not self._files:
            raise SampleError(f"the folder {str(folder)!r} holds no .npz or .npy file. Fix: write each sample to one")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self._files:
            if path.suffix == ".npz":
                yield path.name, dict(NpzArrays(path))
            else:
                name = _only_input(self._model)
                yield path.name, dict(NpzArrays(path, name=name))


class _Listed:
    def __init__(self, items: list[Any] | tuple[Any, ...], origin: str, model: ModelInfo) -> None:
        self.origin = origin
        self._items, self._model = items, model

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, item in enumerate(self._items):
            yield f"item {number} of {self.origin}", _as_mapping(item, self._model)


class _Spooled:
    """What an iterator gave, kept so that it can be gone through again."""

    origin = "the iterable"

    def __init__(self, items: Iterator[Any], model: ModelInfo) -> None:
        import numpy as np

        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  (lives as long as this)
        weakref.finalize(self, self._file.close)
        self._places: list[dict[str, int]] = []
        try:
            for number, item in enumerate(items):
                places = {}
                for name, value in _as_mapping(item, model).items():
                    places[name] = self._file.tell()
                    array = _numpy(name, value, number)
                    np.save(self._file, array, allow_pickle=False)
                self._places.append(places)
        except OSError as error:
            raise SampleError(
                f"{len(self._places)} samples were read, and there is no room for more in the temporary "
                f"folder ({error.strerror}). Fix: give fewer, or write them to a folder and pass its path"
            ) from None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import numpy as np

        for number, places in enumerate(self._places):
            sample = {}
            for name, offset in places.items():
                self._file.seek(offset)
                sample[name] = np.load(self._file, allow_pickle=False)
            yield f"item {number} of {self.origin}", sample


def _numpy(name: str, value: Any, number: int) -> Any:
    from xpuruntime.engines.arrays import kind_of, to_host

    try:
        array = to_host(name, value, kind_of(name, value))
    except InputError as error:
        raise SampleError(f"sample {number}: {error}", argument="calibration") from None
    if array.dtype.kind == "O":
        raise SampleError(
            f"sample {number}: input {name!r} holds Python objects. Fix: give numbers of one dtype",
            argument="calibration",
        )
    return array


def _as_mapping(item: Any, model: ModelInfo) -> Mapping[str, Any]:
    return item if isinstance(item, Mapping) else {_only_input(model): item}


class SampleError(InputError):
    """Samples that cannot be read."""

    def __init__(self, reason: str, *, argument: str = "calibration:") -> None:
        super().__init__(f"{argument} {reason}")
        self.reason = reason


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
                array = self[name]
                for start in range(0, shape[0], each or 1):
                    yield array[start : start + each] if each else array[start]
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


class Calibration:
    """Inputs to quantize a model with: each sample is what one `run` of the model would get.

    Everything is read once when this is made: each sample is checked against the model, counted, and goes into the
    digest. A generator is kept in a temporary file from then on; files and lists are read again where they are.

    Parameters
    ----------
    data : path, array, mapping, list or iterable
        * The path of an ``.npz`` file, or a mapping of input name to array: the first axis counts samples. An array
          with as many dimensions as the input is cut into batches of the size that the model fixes, else of 1; one
          with one dimension more holds whole inputs. Or one array for each input and sample, ``"<input>/0"``,
          ``"<input>/1"``, …
        * The path of an ``.npy`` file, or an array: the same for a model with one input.
        * The path of a folder: each ``.npz`` file in it is one sample, an array for each input; with one input also
          ``.npy``. In the order of their names.
        * A list or any iterable of mappings of input name to array, or of arrays for a model with one input: each item
          is one sample.
    model : ModelInfo
        As the policy's shapes make it.

    Attributes
    ----------
    count : int
        Samples.
    digest : str
        SHA-256 in hex over names, dtypes, shapes and values of all samples in their order.
    content : str
        The same over the samples in any order.
    origin : str
        Where they come from, for messages.

    Raises
    ------
    InputError
        There are no samples, or one does not fit the model, or has NaN or infinity in it; the sample is named.
    """

    def __init__(self, data: Any, model: ModelInfo) -> None:
        self._source: CalibrationSamples = open_source(data, model)
        self.origin = self._source.origin
        self._check = InputValidator(
            (*model.inputs, *model.overridable_inputs), [t.name for t in model.overridable_inputs]
        )
        digest, count, each = hashlib.sha256(), 0, []
        for sample in self._checked():
            own = hashlib.sha256()
            for part in digest_parts(sample):
                digest.update(part)
                own.update(part)
            digest.update(b"\n")
            each.append(own.digest())
            count += 1
        if not count:
            raise InputError(
                f"calibration: {self.origin} holds no samples; quantizing needs inputs like those that the model will "
                "get, some tens to some hundreds of them"
            )
        self.count = count
        self.digest = digest.hexdigest()
        self.content = hashlib.sha256(b"".join(sorted(each))).hexdigest()

    @classmethod
    def of(cls, data: Any, model: ModelInfo) -> Calibration | None:
        """Return `data` as a calibration of `model`; ``None``, and what is one already, stays as it is."""
        return data if data is None or isinstance(data, cls) else cls(data, model)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Yield name to array, C-contiguous, one sample at a time: the same samples each time."""
        seen = 0
        for sample in self._checked():
            seen += 1
            yield sample
        if seen != self.count:
            raise InputError(
                f"calibration: {self.origin} held {self.count} samples when it was checked, and holds {seen} now; "
                "leave it as it is until the session is open"
            )

    def __repr__(self) -> str:
        return f"<Calibration {self.count} samples of {self.origin}, sha256 {self.digest[:12]}>"

    def _checked(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        import numpy as np

        log = ConversionLog()
        for index, (origin, sample) in enumerate(self._source):
            try:
                ready = self._check.on_host(sample, strict=False, log=log)
                for name, array in ready.items():
                    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufV":
                        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                        raise InputError(f"input {name!r} is {kind}. Fix: give tensors of numbers")
                    if array.dtype.kind == "f" and not np.isfinite(array).all():
                        raise InputError(
                            f"input {name!r} has NaN or infinity, which would become its range. Fix: leave it out"
                        )
            except InputError as error:
                raise InputError(f"calibration sample {index} ({origin}): {error}") from None
            yield ready
