# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt plan`` and ``xrt explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    DimOption,
    EngineOption,
    InputOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    PrecisionOption,
)

__all__ = ["explain", "plan"]

MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine", metavar="FILE", help="Plan for another machine: what `xrt devices --json` printed there."
    ),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Also write the report as one HTML page.", show_default=False),
]


def plan(
    model: ModelArgument,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    calibration: CalibrationOption = None,
    machine: MachineOption = None,
    json: JsonOption = False,
) -> None:
    """Show what would run, every rejected candidate with its reason, and which policy keys are enforced.

    Nothing is loaded.
    """
    from xpuruntime import inference
    from xpuruntime.cli.opening import Choice
    from xpuruntime.cli.output import print_thing, working
    from xpuruntime.runtime.snapshot import load_machine

    choice = Choice(policy=policy, device=device, engine=engine, precision=precision, calibration=calibration)
    other = None if machine is None else load_machine(machine)
    with working("planning", as_json=json):
        made = inference.plan(model, machine=other, **choice.arguments())
    print_thing(made, as_json=json)


def explain(
    model: ModelArgument,
    input: InputOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    calibration: CalibrationOption = None,
    dim: DimOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Run a model with its engine instrumented, and hold what ran against the policy.

    Exits with 1 when something else ran than was asked.
    """
    from xpuruntime.cli.entry import ExitCode
    from xpuruntime.cli.opening import Choice, open_session, prepare
    from xpuruntime.cli.output import print_thing, working

    if html is not None:
        _check_page_path(html)
    _, feeds = prepare(model, input, dim)
    choice = Choice(policy=policy, device=device, engine=engine, precision=precision, calibration=calibration)
    session, _ = open_session(model, choice, as_json=json)
    with session, working("running instrumented", as_json=json):
        report = session.explain(feeds.arrays)
    if html is not None:
        report.save_html(html)
    print_thing(report, as_json=json)
    return ExitCode.OK if report.honoured else ExitCode.NOT_HONOURED


def _check_page_path(path: str) -> None:
    """Refuse a page that could not be written, before anything runs."""
    from pathlib import Path

    from xpuruntime.errors import InputError

    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"--html {path}: the folder '{target.parent}' is not there, or the name is a folder")
