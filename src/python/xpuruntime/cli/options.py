# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xpuruntime.cli.completion import devices, engines, precisions

__all__ = [
    "CalibrationOption",
    "DeviceOption",
    "DimOption",
    "EngineOption",
    "FrozenOption",
    "InputOption",
    "JsonOption",
    "LockOption",
    "ModelArgument",
    "OnnxArgument",
    "PolicyOption",
    "PrecisionOption",
    "TrustOption",
    "flag_option",
    "html_option",
    "output_option",
    "runs_option",
    "text_option",
    "warmup_option",
]


def text_option(*names: str, metavar: str, help: str) -> Any:
    """Return an option with a value, without a default that is worth showing."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


def output_option(*names: str, metavar: str = "FILE", help: str) -> Any:
    """Return an option that names what the command writes; ``-`` is refused: no option writes to standard output."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, callback=refuse_dash)


def refuse_dash(value: str | None) -> str | None:
    """Return the value of an option that names an output. Raises `typer.BadParameter` for ``-``."""
    if value == "-":
        raise typer.BadParameter(
            "'-' is not standard output here. Fix: name a file or a folder; one that is called '-' is './-'"
        )
    return value


def flag_option(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, metavar=" ", help=help, show_default=False)


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2 file or an artifact.", show_default=False)
]
OnnxArgument = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]
PolicyOption = Annotated[
    str | None,
    text_option("--policy", "-p", metavar="FILE", help="Policy file, YAML or JSON; or 'auto'."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        help="Device, such as cpu or cuda:0. Overrides the policy.",
        autocompletion=devices,
        show_default=False,
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        "-e",
        help="Engine, such as onnxruntime, or several in order with commas. Overrides the policy.",
        autocompletion=engines,
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="fp32, tf32, fp16, bf16, int8 or model. Overrides the policy.",
        autocompletion=precisions,
        show_default=False,
    ),
]
CalibrationOption = Annotated[
    str | None,
    text_option(
        "--calibration",
        metavar="PATH",
        help="Inputs to quantise with, for --precision int8: an .npz or .npy file, or a folder of them.",
    ),
]
TrustOption = Annotated[
    bool,
    flag_option("--trust", "Load a .pt2 file even though that may run code stored in it."),
]
LockOption = Annotated[
    str | None,
    text_option("--lock", metavar="FILE", help="Use exactly what this lock records, or refuse."),
]
FrozenOption = Annotated[
    bool,
    flag_option("--frozen", "Take the policy from --lock; what the lock depends on is still compared."),
]
JsonOption = Annotated[bool, flag_option("--json", "Print JSON on stdout, and nothing else there.")]
InputOption = Annotated[
    list[str] | None,
    text_option(
        "--input",
        "-i",
        metavar="NAME=VALUE",
        help="An input: NAME=@file.npy, NAME=@file.npz (the array NAME in it), NAME=[[1, 2]] as JSON, "
        "or @file.npz for all. Without any, probe inputs are generated.",
    ),
]
DimOption = Annotated[
    list[str] | None,
    text_option(
        "--dim", metavar="NAME=SIZE", help="Size of a symbolic dimension in probe inputs; x.0 is the first of input x."
    ),
]


def html_option(help: str) -> Any:
    """Return ``--html FILE``, of which each command says what it writes there."""
    return output_option("--html", help=help)


def runs_option(help: str, most: int = 1_000_000) -> Any:
    """Return ``--runs``, of which each command says what kind of runs they are."""
    return typer.Option("--runs", "-n", min=1, max=most, help=help)


def warmup_option(help: str, most: int = 1_000_000) -> Any:
    """Return ``--warmup``: the runs before those of ``--runs``."""
    return typer.Option("--warmup", min=0, max=most, help=help)
