# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options that several commands share, and the values of them that a shell completes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer


def engines(incomplete: str) -> list[str]:
    """Return engines that begin so; after a comma, those that are not in the list yet."""
    from xpuruntime.engines.registry import default_registry

    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [
        f"{before}{comma}{name}" for name in default_registry().engines() if name.startswith(last) and name not in taken
    ]


def devices(incomplete: str) -> list[str]:
    """Return devices that begin so."""
    from xpuruntime.policies.device_spec import DeviceKind

    words = [f"{kind}:0" if kind in ("cuda", "rocm", "dml") else kind for kind in get_args(DeviceKind)]
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def precisions(incomplete: str) -> list[str]:
    """Return precisions that begin so."""
    return [word for word in ("model", "fp32", "tf32", "fp16", "bf16", "int8") if word.startswith(incomplete)]


def operations(incomplete: str) -> list[str]:
    """Return operations with kernels that begin so."""
    from xpuruntime.ops.decision_log import kernels
    from xpuruntime.policies.kernel_rules import OPS

    return [op for op in dict.fromkeys((*(kernel.op for kernel in kernels()), *OPS)) if op.startswith(incomplete)]


def text_option(*names: str, metavar: str, help: str) -> Any:
    """Return an option with a value, without a default that is worth showing."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


def output_option(*names: str, metavar: str = "FILE", help: str) -> Any:
    """Return an option that names what the command writes; ``-`` is refused: no option writes to standard output."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, callback=refuse_dash)


def refuse_dash(value: str | None) -> str | None:
    """Return the value of an option that names an output. Raises `typer.BadParameter` for ``-``, and ``FORMAT=-``."""
    if value is not None and value.rpartition("=")[2] == "-":
        raise typer.BadParameter(
            "'-' is not standard output here. Fix: name a file or a folder; one that is called '-' is './-'"
        )
    return value


def flag_option(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, metavar=" ", help=help, show_default=False)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, a .pt2 file, an artifact, or a folder with genai_config.json.",
        show_default=False,
    ),
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
        help="Inputs to quantize with, for --precision int8: an .npz or .npy file, or a folder of them.",
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
    """Return ``--html FILE``, of which each command says what it writes there; a file that is no page is kept."""
    return typer.Option("--html", metavar="FILE", help=help, show_default=False, callback=_page)


def _page(value: str | None) -> str | None:
    if value is not None:
        from xpuruntime.cli.output import refuse_other_kinds
        from xpuruntime.cli.results import check_target

        check_target("--html", refuse_dash(value))
        refuse_other_kinds({"--html": (value, "page")})
    return value


HtmlOption = Annotated[str | None, html_option("Also write what is printed as one HTML page.")]


def runs_option(help: str, most: int = 1_000_000) -> Any:
    """Return ``--runs``, of which each command says what kind of runs they are."""
    return typer.Option("--runs", "-n", min=1, max=most, help=help)


def warmup_option(help: str, most: int = 1_000_000) -> Any:
    """Return ``--warmup``: the runs before those of ``--runs``."""
    return typer.Option("--warmup", min=0, max=most, help=help)


class SessionOptions(NamedTuple):
    """Policy, device, engine, precision and calibration inputs, each ``None`` where the policy decides; and trust."""

    policy: PolicyOption = None
    device: DeviceOption = None
    engine: EngineOption = None
    precision: PrecisionOption = None
    calibration: CalibrationOption = None
    trust: TrustOption = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `InferenceSession` and of `plan`. Engines may be a list with commas."""
        names = self.engine.split(",") if self.engine and "," in self.engine else self.engine
        return {**self._asdict(), "engine": names}


def with_session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `SessionOptions` to a command: they fill its parameter ``session_options``."""
    stated = inspect.signature(command, eval_str=True)
    hints = get_type_hints(SessionOptions, include_extras=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in SessionOptions._field_defaults.items()
    ]
    shown = [
        option for own in stated.parameters.values() for option in (options if own.name == "session_options" else [own])
    ]

    @wraps(command)
    def wrapped(*first: Any, **arguments: Any) -> Any:
        session_options = SessionOptions(**{name: arguments.pop(name) for name in SessionOptions._fields})
        return command(*first, session_options=session_options, **arguments)

    wrapped.__signature__ = stated.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return wrapped
