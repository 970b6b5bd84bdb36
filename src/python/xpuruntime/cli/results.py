# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Results: outputs of a run as a summary and as files, and saved reports as arguments of ``xrt explain``."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of, reason_of, refuse_overwriting, user_path
from xpuruntime.files.reading import decode_json, open_regular

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.evidence import Report


#: Arrays up to this many elements are printed whole in JSON.
_WHOLE = 1024
#: Values shown in a table.
_FIRST = 5


class ArraySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One output: dtype, shape, range and mean of finite elements, how many are not, the first values, all if few."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    not_finite: int = 0
    first: tuple[Any, ...] = ()
    values: Any = None


def summarise(outputs: Mapping[str, Any]) -> dict[str, ArraySummary]:
    """Describe arrays by name; values of arrays of at most 1024 elements are included."""
    return {name: _summary(value) for name, value in outputs.items()}


def output_lines(outputs: Mapping[str, ArraySummary]) -> Iterator[str]:
    """Yield what came out: of each output its type, shape and range, and below its first values."""
    for name, output in outputs.items():
        shape = f"{output.dtype} {list(output.shape)}" + (
            f" ({output.not_finite} not finite)" if output.not_finite else ""
        )
        spread = "" if output.min is None else f", {output.min:.6g} to {output.max:.6g}, mean {output.mean:.6g}"
        yield f"{name}: {shape}{spread}"
        yield f"  {_first(output)}"


def check_output_path(path: str | None, names: int) -> None:
    """Refuse a path that outputs could not be written to, before anything runs."""
    if path is None:
        return
    target = user_path(path, "--output")
    if target.suffix not in {".npz", ".npy"}:
        msg = f"--output {path}: the name must end in .npz, or .npy for a model with one output"
        raise InputError(msg, fix=f"--output {shlex.quote(f'{path}.npz')}")
    if target.suffix == ".npy" and names != 1:
        raise InputError(f"--output {path}: the model has {names} outputs and .npy holds one. Fix: use .npz")
    check_target("--output", path)


def save_outputs(outputs: Mapping[str, Any], path: str) -> None:
    """Write arrays to ``.npz`` or ``.npy``. The file is replaced as a whole or not at all."""
    import numpy as np

    arrays = {name: _plain(name, value) for name, value in outputs.items()}

    def write(file: IO[bytes]) -> None:
        if not path.endswith(".npz"):
            np.save(file, next(iter(arrays.values())), allow_pickle=False)
            return
        import zipfile

        with zipfile.ZipFile(file, "w") as archive:  # as np.savez, which takes no array called "file"
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    from xpuruntime.files.writing import replace_file

    replace_file(path, write, private=False)


def _plain(name: str, value: Any) -> Any:
    """Return an output as an array that a file can hold; text as NumPy's own."""
    import numpy as np

    try:
        array = np.asarray(value)
        if array.dtype == object:
            if not all(isinstance(item, str) for item in array.flat):
                raise ValueError("it holds Python objects")
            array = array.astype(np.str_)
    except ValueError as error:
        raise InputError(
            f"the output {name!r} cannot be written as an array: {error}. Fix: leave --output out"
        ) from None
    return array


def _summary(value: Any) -> ArraySummary:
    import numpy as np

    array = np.asarray(value)
    shape = tuple(int(size) for size in array.shape)
    values = array.tolist() if array.size <= _WHOLE else None
    first = tuple(array.flat[:_FIRST].tolist())
    if array.dtype.kind not in "biuf" or array.size == 0:
        return ArraySummary(dtype=str(array.dtype), shape=shape, first=first, values=values)
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    return ArraySummary(
        dtype=str(array.dtype),
        shape=shape,
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        not_finite=int(wide.size - finite.size),
        first=first,
        values=values,
    )


def _first(summary: ArraySummary) -> str:
    shown = [f"{value:.5g}" if isinstance(value, float) else str(value) for value in summary.first]
    return ", ".join(shown) + (", ..." if math.prod(summary.shape) > len(shown) else "")


#: How a JSON xpuruntime object begins, the first kilobytes of which tell what it is.
_HEADER = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"(xpuruntime\.[\w.]+/\d+)"')
_HEAD = 4096
_BLANK = b" \t\r\n"
_REPORT = "xpuruntime.report/"


def check_target(option: str, path: str | None) -> None:
    """Refuse a file that could not be written, before anything runs."""
    if path is None:
        return
    target = user_path(path, option)
    if kind_of(target) == "folder":
        raise InputError(f"{option} {path}: this is a folder. Fix: name a file in it")
    if kind_of(target.parent) != "folder":
        raise InputError(f"{option} {path}: the folder '{target.parent}' was not found. Fix: make it, or name another")
    try:
        from xpuruntime.files.writing import check_writable

        check_writable(target)
    except OSError as error:
        raise InputError(
            f"{option} {path}: nothing can be written there: {reason_of(error)}. Fix: give a path in a folder that "
            "is writable and has free space"
        ) from error


def given_reports(paths: Sequence[str], baseline: str | None) -> bool:
    """Whether the arguments of ``xrt explain`` are saved reports, by the schema in the files, never by their names."""
    paths = [*paths, *([] if baseline is None else [baseline])]
    schemas = [_schema(path) for path in paths]
    for path, schema in zip(paths, schemas, strict=True):
        if schema is not None and not schema.startswith(_REPORT):
            raise InputError(
                f"'{path}' holds '{schema}', which is no report. Fix: give what `xrt explain MODEL --json` printed or "
                "`Report.save` wrote"
            )
    if len(paths) == 1:
        return schemas[0] is not None
    if len(paths) == 2 and are_models(*paths):
        raise two_models("explain", *paths)
    for path, schema in zip(paths, schemas, strict=True):
        if schema is None:
            what = "is no xpuruntime report" if kind_of(path) == "file" else "is no file"
            raise InputError(
                f"several arguments of explain, and --baseline, are saved reports, and '{path}' {what}: it is no "
                f'JSON object with "schema": "{_REPORT}..."',
                fix="give what `xrt explain MODEL --json` printed, or one model alone",
            )
    return True


def two_models(command: str, first: str, second: str) -> InputError:
    """Return the error for two models where a command takes one, or what was saved of them."""
    import shlex

    a, b = shlex.quote(first), shlex.quote(second)
    computes = f"`xrt lock {a} -o first.lock && xrt verify {b} --lock first.lock`"
    ran = f"`xrt explain {a} -o first.json; xrt explain {b} -o second.json; xrt explain first.json second.json`"
    return InputError(
        f"xrt {command} does not compare two models", fix=f"compare what they compute, {computes}, or what ran, {ran}"
    )


def are_models(*paths: str) -> bool:
    """Whether all of the arguments are files of models, by their names."""
    return all(os.path.splitext(path)[1] in (".onnx", ".pt2") and kind_of(path) == "file" for path in paths)  # noqa: PTH122 - as they were given


def rendered(report: Report, *, summary: bool) -> RenderableType:
    """Return a report as ``xrt explain`` prints it: on a terminal no more than a screen, in a pipe all of it."""
    from xpuruntime.cli.output import on_screen
    from xpuruntime.evidence.render_text.terminal import render

    return render(report, summary=summary, brief=on_screen())


def show_reports(
    paths: Sequence[str],
    options: Mapping[str, Any],
    *,
    baseline: str | None,
    html: str | None,
    noise: float | None,
    noise_us: float | None,
    summary: bool,
    as_json: bool,
) -> int:
    """Show one saved report again, compare two, or hold more against a baseline, and return the exit code."""
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_and_save
    from xpuruntime.evidence import Report, compare_reports

    names = [name for name, value in options.items() if value]
    if names:
        raise InputError(
            f"{', '.join(names)} say how a model is run, and '{paths[0]}' is a saved report. Fix: leave them out"
        )
    refuse_overwriting({"--html": html}, [("the report", path) for path in paths])
    if baseline is not None:
        paths = [baseline, *(path for path in paths if path != baseline)]
    if len(paths) == 1:
        if noise is not None or noise_us is not None:
            raise InputError("--noise and --noise-us are for several reports, and one was given. Fix: leave them out")
        report = Report.load(paths[0])
        print_and_save(report, html=html, shown=rendered(report, summary=summary), as_json=as_json)
        return ExitCode.OK if report.honoured else ExitCode.NOT_HONOURED
    if summary:
        raise InputError("--summary is for one report, and several were given. Fix: leave it out")
    limits: dict[str, Any] = {
        name: value for name, value in (("noise", noise), ("noise_us", noise_us)) if value is not None
    }
    if len(paths) > 2:
        from xpuruntime.locks.folder_index import index_reports

        index = index_reports(paths, page=html, **limits)
        print_and_save(index, html=html, as_json=as_json)
        return ExitCode.OK if all(file.same for file in index.files) else ExitCode.NOT_HONOURED
    reports = compare_reports(paths[0], paths[1], **limits)
    print_and_save(reports, html=html, as_json=as_json)
    return ExitCode.OK if reports.same else ExitCode.NOT_HONOURED


def _schema(path: str) -> str | None:
    """Return the schema in the header of a JSON xpuruntime file, or ``None``: a model, a folder, anything else."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
            match = _HEADER.match(head)
            if match is not None:
                return match[1].decode()
            if not head.lstrip(_BLANK).startswith(b"{"):
                return None
            rest = os.fstat(file.fileno()).st_size - len(head)
            from xpuruntime.evidence.report import MAX_REPORT

            if rest > MAX_REPORT:
                return None
            schema = decode_json(head + file.read(max(rest, 0)), _Header).schema
    except (OSError, msgspec.MsgspecError):
        return None
    return schema if schema.startswith("xpuruntime.") else None


class _Header(msgspec.Struct):
    """The mark of xpuruntime's files in other JSON, also where a tool has sorted the keys."""

    schema: str
