# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Model, inputs and session of a command line: inputs are files, JSON values, or probe inputs."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.cli.output import error_line, working
from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular, unpacked_too_large

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from xpuruntime.cli.options import SessionOptions
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.inference import InferenceSession


def locked_model(lock: str) -> str | None:
    """Return the model of a lock that is given in place of a model; ``None`` where it is no lock."""
    from xpuruntime.engines.model.file import looks_like
    from xpuruntime.files.paths import kind_of
    from xpuruntime.lockfile.canonical import load_lock, model_beside

    if kind_of(lock) != "file":
        return None
    with open_regular(lock) as file:
        known = looks_like(file.read(4096))
    if known is None or not known[0].startswith("a lock"):
        return None
    try:
        return str(model_beside(load_lock(lock), Path(lock)))
    except InputError as error:
        raise InputError(error.reason, fix=f"xrt verify MODEL --lock {shlex.quote(lock)}") from None


def prepare(
    model: str, values: list[str] | None, dims: list[str] | None, *, trust: bool = False, defer: bool = False
) -> tuple[ModelInfo, Feeds]:
    """Read the model's facts and its inputs; `defer` where a session is opened next, which refuses the model."""
    from xpuruntime.artifacts.manifest import artifact_model
    from xpuruntime.engines.registry import read_model

    info = artifact_model(model) or read_model(model, trust=trust, defer=defer)
    return info, read_feeds(info, values, dims)


def report_probe_inputs(feeds: Feeds) -> None:
    """Print on stderr which inputs are generated."""
    note = feeds.note()
    if note:
        error_line(note, label="note")


def open_session(
    model: str,
    session_options: SessionOptions,
    feeds: Feeds,
    *,
    as_json: bool,
    lock: str | None = None,
    frozen: bool = False,
) -> tuple[InferenceSession, float]:
    """Plan and load a model. Return the session and how long that took, in microseconds.

    What `feeds` generated is said once the session is open: a policy that is wrong is said alone. Inputs that are given
    are those with which a converted model is compared with fp32.
    """
    from xpuruntime.inference import InferenceSession

    start = time.perf_counter_ns()
    with working("planning and loading", as_json=as_json):
        arguments = session_options.arguments()
        if lock is None and _probes_with(session_options, feeds):
            arguments["calibration"] = [dict(feeds.arrays)]
        session = InferenceSession(model, lock=lock, frozen=frozen, **arguments)
    took = (time.perf_counter_ns() - start) / 1e3
    report_probe_inputs(feeds)
    return session, took


def _probes_with(session_options: SessionOptions, feeds: Feeds) -> bool:
    """Whether the first calibration input, which is to be the one given, is a probe and nothing else here."""
    from xpuruntime.policies import Policy

    if feeds.probed or not feeds.arrays or session_options.calibration is not None:
        return False
    stated = (
        Policy.coerce(session_options.policy)
        if session_options.policy is not None and Path(session_options.policy).is_file()
        else None
    )
    if stated is not None and stated.calibration is not None:
        return False
    precision = session_options.precision or (stated.execution.precision if stated is not None else None)
    return precision in ("fp16", "bf16") or (stated is not None and stated.accuracy is not None and precision != "int8")


class Feeds(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays by input name, and the names of those that were generated."""

    arrays: dict[str, Any]
    probed: tuple[str, ...] = ()
    model: ModelInfo

    def running(self) -> AbstractContextManager[None]:
        """Return a context for runs with these arrays: where they were generated, an error says so, see `probing`."""
        from xpuruntime.engines.precision import probing

        return probing(self.model, self.arrays, generated=bool(self.probed))

    def note(self) -> str | None:
        """Return a sentence about inputs that were generated, or ``None``."""
        if not self.probed:
            return None
        from xpuruntime.engines.precision import shapes_text

        shapes = shapes_text({name: self.arrays[name] for name in self.probed})
        return f"probe inputs were generated (seed 0) for: {shapes}. Give your own with --input NAME=@file.npy"


def read_feeds(model: ModelInfo, values: Sequence[str] | None, dims: Sequence[str] | None = None) -> Feeds:
    """Read the inputs given; with none at all, make probe inputs."""
    known = {tensor.name: tensor for tensor in model.inputs}
    sizes = parse_dims(dims, model)
    if not values:
        from xpuruntime.engines.precision import probe_feeds

        feeds = probe_feeds(model, dims=sizes)
        return Feeds(arrays=feeds, probed=tuple(feeds), model=model)
    if sizes:
        raise InputError("--dim gives sizes for probe inputs, but --input is there too", fix="leave one of them out")
    arrays: dict[str, Any] = {}
    for value in values:
        for name, array in _read(value, known).items():
            if name in arrays:
                raise InputError(f"input {name!r} is given twice", fix="leave one out")
            arrays[name] = array
    return Feeds(arrays=arrays, model=model)


def parse_dims(values: Sequence[str] | None, model: ModelInfo) -> dict[str, int]:
    """Read ``NAME=SIZE`` values; a dimension without a name is ``INPUT.INDEX``."""
    from xpuruntime.engines.precision import names_in, unnamed_dimensions

    open_sizes = {size for tensor in model.inputs for size in tensor.shape or () if isinstance(size, str)}
    unnamed = [name for tensor in model.inputs for name in unnamed_dimensions(tensor).values()]
    symbols = [*sorted(open_sizes.union(*map(names_in, open_sizes))), *unnamed]
    sizes: dict[str, int] = {}
    for value in values or ():
        name, equals, size = value.partition("=")
        if not equals or not size.isascii() or not size.isdigit() or len(size) > 9:
            msg = f"--dim {value} has no size of 0 or more"
            raise InputError(msg, fix=f"write NAME=SIZE, such as --dim {shlex.quote(next(iter(symbols), 'batch'))}=8")
        if name not in symbols:
            msg = f"--dim {value}: the model has no dimension {name!r}. It has: {', '.join(symbols) or 'none'}"
            raise InputError(msg, fix=f"--dim {_nearest(name, symbols)}={size}" if symbols else "leave it out")
        sizes[name] = int(size)
    return sizes


def _read(value: str, known: Mapping[str, TensorInfo]) -> dict[str, Any]:
    name, equals, rest = value.partition("=")
    if value.startswith("@"):
        loaded = _load(value[1:])
        if isinstance(loaded, dict):
            return {_named(key, known): _retyped(array, known[_named(key, known)]) for key, array in loaded.items()}
        if len(known) != 1:
            msg = f"--input {value}: the model has {len(known)} inputs: {', '.join(known)}"
            raise InputError(msg, fix=f"name one: --input {shlex.quote(next(iter(known), 'NAME'))}={value}")
        return {name: _retyped(loaded, tensor) for name, tensor in known.items()}
    if not equals or not name:
        msg = f"--input {value} names no value"
        raise InputError(msg, fix="write NAME=@file.npy, NAME=[1, 2] or @file.npz")
    name = _named(name, known)
    if not rest.startswith("@"):
        return {name: _literal(name, rest, known[name])}
    loaded = _load(rest[1:])
    if isinstance(loaded, dict):
        if name not in loaded:
            msg = f"--input {value}: {rest[1:]} has no array {name!r}, it has {', '.join(loaded) or 'none'}"
            raise InputError(msg, fix="write it with np.savez(file, name=array), or give another file")
        return {name: _retyped(loaded[name], known[name])}
    return {name: _retyped(loaded, known[name])}


def _retyped(array: Any, tensor: TensorInfo) -> Any:
    """Return an array as bfloat16 where the model takes that: NumPy saves it as two bytes without a type."""
    import numpy as np

    if tensor.dtype == "bfloat16" and array.dtype == np.dtype("V2"):
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _load(path: str) -> Any:
    import numpy as np

    try:
        with open_regular(path) as file:
            loaded = np.load(file, allow_pickle=False)
            reason = unpacked_too_large(loaded.zip, os.fstat(file.fileno()).st_size) if hasattr(loaded, "zip") else None
            if reason is not None:
                raise InputError(f"{path} is not unpacked: {reason}. Fix: write it with np.savez")
            return {name: loaded[name] for name in loaded.files} if hasattr(loaded, "files") else loaded
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}", fix="give an .npy or .npz file") from error
    except (ValueError, EOFError, KeyError) as error:
        reason = str(error) or "it is damaged"
        if "pickle" in reason:  # NumPy says so of every file that it does not know, and advises to load it as code
            reason = "its first bytes are of neither format, or it holds Python objects"
        fix = "write the array with np.save or np.savez, in a type of numbers or of fixed-width text"
        raise InputError(f"{path} is no .npy or .npz file of plain arrays: {reason}. Fix: {fix}") from error
    except Exception as error:  # zipfile and zlib raise their own classes for damaged archives
        raise InputError(f"{path} cannot be read as .npz: {str(error) or type(error).__name__}") from error


def _literal(name: str, text: str, tensor: TensorInfo) -> Any:
    import numpy as np

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        file = "x.npy" if text.startswith(("[", "{")) else text.lstrip("@")
        msg = f"--input {name}: {text[:80]!r} is neither JSON nor @file ({error})"
        raise InputError(msg, fix=f"--input {name}=@{file[:80]}, or --input '{name}=[1, 2]'") from error
    try:
        dtype = np.dtype(np.str_ if tensor.dtype == "string" else tensor.dtype)
    except TypeError as error:
        raise InputError(f"--input {name}: dtype {tensor.dtype} cannot be written here. Fix: use @file.npy") from error
    try:
        array = np.asarray(value)
        if array.dtype == object or (array.dtype.kind not in "biuf" and dtype.kind != "U"):
            raise ValueError("the value is not a regular array of numbers")
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if dtype.kind in "iub" and not np.array_equal(cast, array):
            raise ValueError(f"the value does not fit {tensor.dtype}")
    except (ValueError, OverflowError) as error:
        raise InputError(f"--input {name}: {error}. Fix: write values of {tensor.dtype}, or @file.npy") from error
    return cast


def _named(name: str, known: Mapping[str, TensorInfo]) -> str:
    if name not in known:
        msg = f"the model has no input {name!r}. It has: {', '.join(known) or 'none'}"
        raise InputError(msg, fix=f"--input {_nearest(name, known)}=..." if known else "leave it out")
    return name


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    from xpuruntime.policies.document import nearest

    return shlex.quote(nearest(name, known) or next(iter(known)))
