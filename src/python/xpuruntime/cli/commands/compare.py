# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt compare``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from xpuruntime.cli.completion import engines
from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    DimOption,
    InputOption,
    JsonOption,
    OnnxArgument,
    PolicyOption,
    PrecisionOption,
    html_option,
    runs_option,
)
from xpuruntime.cli.session_options import SessionOptions

__all__ = ["compare"]

EnginesOption = Annotated[
    str | None,
    typer.Option(
        "--engines",
        metavar="A,B@DEVICE",
        help="Engines, separated by commas, each with an optional device. Default: all that engine: auto may choose.",
        autocompletion=engines,
        show_default=False,
    ),
]
RunsOption = Annotated[int, runs_option("Timed runs of each engine.")]
SearchOption = Annotated[
    bool, typer.Option("--search/--no-search", help="Look for the first node whose output differs.")
]
HtmlOption = Annotated[str | None, html_option("Also write the comparison as one HTML page.")]
LayersOption = Annotated[
    bool | None,
    typer.Option(
        "--layers/--no-layers",
        help="Measure how far each layer is from the reference. On with --html.",
        show_default=False,
    ),
]


def compare(
    model: OnnxArgument,
    engines: EnginesOption = None,
    input: InputOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    calibration: CalibrationOption = None,
    dim: DimOption = None,
    runs: RunsOption = 20,
    search: SearchOption = True,
    layers: LayersOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Run a model on several engines and compare each with fp32 on the CPU.

    On a mismatch, the first node whose output differs is searched for. Exits with 1 when an engine differs or fails, or
    none could run.
    """
    import msgspec

    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.cli.overwrite import check_outputs
    from xpuruntime.cli.reports import check_target
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.engines.accuracy import GENERATED
    from xpuruntime.inference import compare_engines

    check_target("--html", html)
    session_options = SessionOptions(policy=policy, device=device, precision=precision, calibration=calibration)
    check_outputs({"--html": html}, model, session_options, input)
    refuse_other_kinds({"--html": (html, "page")})
    feeds = prepare(model, input, dim)[1] if input or dim else None
    with working("comparing", as_json=json), nullcontext() if feeds is None else feeds.running():
        found = compare_engines(
            model,
            None if engines is None else engines.split(","),
            device=device,
            precision=precision,  # type: ignore[arg-type]
            inputs=None if feeds is None else feeds.arrays,
            policy=policy,
            calibration=calibration,
            runs=runs,
            search=search,
            layers=html is not None if layers is None else layers,
        )
    if feeds is not None:
        report_probe_inputs(feeds)
        if feeds.probed:
            found = msgspec.structs.replace(found, inputs=GENERATED)
    print_and_save(found, {found.save_html: html}, as_json=json)
    return ExitCode.OK if found.agreed else ExitCode.NOT_HONOURED
