# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt diff``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from xpuruntime.cli.options import DimOption, InputOption, JsonOption, output_option
from xpuruntime.cli.session_options import SessionOptions, with_session_options

__all__ = ["diff"]

_SIDE = "A report, a lock, `here`, or py:PATH with the path of a Python interpreter."
BeforeArgument = Annotated[str, typer.Argument(metavar="A", help=_SIDE, show_default=False)]
AfterArgument = Annotated[str, typer.Argument(metavar="B", help=_SIDE, show_default=False)]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model, where A or B is an interpreter.", show_default=False)
]
BudgetOption = Annotated[str, typer.Option("--budget", metavar="TIME", help="Time for interleaved rounds.")]
MarginOption = Annotated[
    float, typer.Option("--margin", min=0.0, max=10.0, metavar="SHARE", help="Difference of times that counts.")
]
OutputOption = Annotated[str | None, output_option("--output", "-o", help="Also save the differences as JSON.")]


@with_session_options
def diff(
    before: BeforeArgument,
    after: AfterArgument,
    model: ModelArgument = None,
    *,
    input: InputOption = None,
    session_options: SessionOptions,
    dim: DimOption = None,
    budget: BudgetOption = "60s",
    margin: MarginOption = 0.05,
    output: OutputOption = None,
    json: JsonOption = False,
) -> int:
    """Show what differs between two environments: packages, plan, placement, kernels, numbers and time.

    Interpreters run the model as workers, in rounds that alternate. Exits with 1 when something from plan to numbers
    differs, and with 4 when only time does, or could not be decided.
    """
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.cli.overwrite import check_outputs
    from xpuruntime.cli.reports import check_target
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.files.paths import kind_of, refuse_overwriting
    from xpuruntime.locks.diff.diffing import compare_environments
    from xpuruntime.locks.diff.side import LockSide, read_side
    from xpuruntime.policies.quantities import read_duration

    check_target("--output", output)
    seconds = read_duration(budget, "--budget")
    feeds = None
    sides = [("a side", one) for one in (before, after) if kind_of(one) == "file"]
    refuse_overwriting({"--output": output}, sides)
    refuse_other_kinds({"--output": (output, "diff")})
    if model is not None:
        check_outputs({"--output": output}, model, session_options, input)
        if input or dim or not any(isinstance(read_side(one), LockSide) for one in (before, after)):
            feeds = prepare(model, input, dim, trust=session_options.trust)[1]
            report_probe_inputs(feeds)
    with working("comparing two environments", as_json=json), nullcontext() if feeds is None else feeds.running():
        found = compare_environments(
            before,
            after,
            model,
            inputs=None if feeds is None else feeds.arrays,
            budget=seconds,
            margin=margin,
            **session_options.arguments(),
        )
    print_and_save(found, {found.save: output}, as_json=json)
    return found.exit_code
