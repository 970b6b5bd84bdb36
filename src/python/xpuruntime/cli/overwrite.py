# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of output options: none may name a file that the same command reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.files.paths import kind_of, refuse_overwriting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xpuruntime.cli.session_options import SessionOptions

__all__ = ["check_outputs"]


def check_outputs(
    outputs: Mapping[str, str | None],
    model: str,
    session_options: SessionOptions,
    values: Sequence[str] | None = None,
    more: Iterable[tuple[str, str]] = (),
) -> None:
    """Refuse outputs that would replace the model, its data, or another file that the command reads."""
    if any(path is not None for path in outputs.values()):
        there = any(path is not None and kind_of(path) == "file" for path in outputs.values())
        folder = [("the model", model)] if kind_of(model) == "folder" else []
        refuse_overwriting(outputs, [*more, *_inputs(model, session_options, values)] if there else folder)


def _inputs(model: str, session_options: SessionOptions, values: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    yield "the model", model
    if kind_of(model) == "folder":
        from xpuruntime.artifacts.manifest import made_files

        for name in made_files(Path(model)) or ():
            yield "a file of the model", str(Path(model, name))
    if session_options.policy is not None and session_options.policy != "auto":
        yield "the policy", session_options.policy
    if session_options.calibration is not None:
        yield from _samples(session_options.calibration)
    for value in values or ():
        name, _, rest = value.partition("=")
        path = name[1:] if name.startswith("@") else rest[1:] if rest.startswith("@") else ""
        if path:
            yield "the input", path
    if kind_of(model) == "file":
        yield from _data(model)


def _samples(path: str) -> Iterator[tuple[str, str]]:
    files = [path] if kind_of(path) != "folder" else map(str, Path(path).glob("*.np[yz]"))
    yield from (("the calibration inputs", file) for file in files)


def _data(model: str) -> Iterator[tuple[str, str]]:
    """Yield the files with the weights of a model."""
    from xpuruntime.engines.model import read_model

    info = read_model(model)
    for file in info.external_files:
        yield "the data of the model", os.path.join(info.base_dir or ".", file.location)  # noqa: PTH118 - as text
