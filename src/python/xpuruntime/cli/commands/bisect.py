# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt bisect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.options import DimOption, InputOption, JsonOption, flag_option, output_option, text_option
from xpuruntime.cli.session_options import SessionOptions, with_session_options
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.locks.bisect_versions import VersionVerdict

__all__ = ["bisect"]

PackageArgument = Annotated[
    str, typer.Argument(metavar="PACKAGE", help="As pip knows it, such as onnxruntime.", show_default=False)
]
RangeArgument = Annotated[
    str, typer.Argument(metavar="GOOD..BAD", help="Two versions, such as 1.23.2..1.32.0.", show_default=False)
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2 file or an artifact.", show_default=False)
]
ClaimOption = Annotated[
    str,
    typer.Option(
        "--claim",
        metavar="CLAIM",
        help="What held with GOOD and not with BAD: runs, plan, placement, kernels, numerics, 'accuracy <= 1e-3', "
        "unit:NODE.kernel, or 'speed.latency.p50 <= +5%'.",
        show_default=False,
    ),
]
WithOption = Annotated[
    list[str] | None,
    text_option("--with", metavar="REQUIREMENT", help="Also install this, such as 'numpy<2'. May be repeated."),
]
PreOption = Annotated[bool, flag_option("--pre", "Include pre-releases.")]
BudgetOption = Annotated[str, typer.Option("--budget", metavar="TIME", help="Time for timing one version.")]
JournalOption = Annotated[
    str | None, output_option("--journal", help="Write each verdict to this file as it is known.")
]
ResumeOption = Annotated[bool, flag_option("--resume", "Continue an existing journal.")]
OutputOption = Annotated[str | None, output_option("--output", "-o", help="Also save the result as JSON.")]


@with_session_options
def bisect(
    package: PackageArgument,
    versions: RangeArgument,
    model: ModelArgument,
    *,
    claim: ClaimOption,
    input: InputOption = None,
    session_options: SessionOptions,
    dim: DimOption = None,
    with_: WithOption = None,
    pre: PreOption = False,
    budget: BudgetOption = "60s",
    journal: JournalOption = None,
    resume: ResumeOption = False,
    output: OutputOption = None,
    json: JsonOption = False,
) -> int:
    """Find the version of a package that changed a claim about a model, in temporary environments.

    Exits with 0 when it is found, with 1 when the claim holds with BAD, with 3 when GOOD or BAD does not run, and with
    4 when versions that could not be judged leave more than one.
    """
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.cli.overwrite import check_outputs
    from xpuruntime.cli.reports import check_target
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.locks.bisect_versions import bisect_versions
    from xpuruntime.policies.quantities import read_duration

    good, dots, bad = versions.partition("..")
    if not (dots and good and bad) or ".." in bad:
        raise InputError(f"{versions!r} is no range of versions. Fix: write GOOD..BAD, such as 1.23.2..1.32.0")
    check_target("--output", output)
    check_outputs({"--output": output, "--journal": journal}, model, session_options, input)
    refuse_other_kinds({"--output": (output, "bisection")})
    seconds = read_duration(budget, "--budget")
    feeds = prepare(model, input, dim, trust=session_options.trust)[1]
    report_probe_inputs(feeds)
    with working(f"bisecting {package}", as_json=json), feeds.running():
        found = bisect_versions(
            package,
            good,
            bad,
            model,
            claim=claim,
            inputs=feeds.arrays,
            extra=with_ or (),
            pre=pre,
            budget=seconds,
            journal=journal,
            resume=resume,
            progress=_say,
            **session_options.arguments(),
        )
    print_and_save(found, {found.save: output}, as_json=json)
    return found.exit_code


def _say(verdict: VersionVerdict) -> None:
    """Say a verdict on stderr as it is known: a bisection takes minutes."""
    from xpuruntime.cli.output import error_line

    error_line(f"{verdict.version} is {verdict.verdict}: {verdict.reason}", label="note")
