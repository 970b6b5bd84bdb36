# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt compare``, ``diff`` and ``bisect``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    DimOption,
    HtmlOption,
    InputOption,
    JsonOption,
    PolicyOption,
    PrecisionOption,
    SessionOptions,
    engines,
    flag_option,
    output_option,
    runs_option,
    text_option,
    with_session_options,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.locks.bisect_versions import VersionVerdict

CompareArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, or a folder with a language model.", show_default=False)
]
_RUNS = 20
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
LayersOption = Annotated[
    bool | None,
    typer.Option(
        "--layers/--no-layers",
        help="Measure how far each layer is from the reference. On with --html.",
        show_default=False,
    ),
]


OtherArgument = Annotated[
    str | None,
    typer.Argument(metavar="[FOLDER]", help="Beside a folder with a language model: another one.", show_default=False),
]
TextsOption = Annotated[
    str | None,
    text_option("--texts", metavar="FILE", help="JSON list of texts for two language models. Default: random tokens."),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--new-tokens", min=0, max=65536, metavar="N", show_default=False,
        help="Greedy tokens of each of two language models. Default: 16.",
    ),
]  # fmt: skip


def compare(
    model: CompareArgument,
    other: OtherArgument = None,
    engines: EnginesOption = None,
    input: InputOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    calibration: CalibrationOption = None,
    dim: DimOption = None,
    runs: RunsOption = _RUNS,
    search: SearchOption = True,
    layers: LayersOption = None,
    html: HtmlOption = None,
    texts: TextsOption = None,
    new_tokens: TokensOption = None,
    json: JsonOption = False,
) -> int:
    """Run a model on several engines and compare each with fp32 on the CPU; or compare two language models.

    On a mismatch, the first node whose output differs is searched for. Of two folders with language models, the second
    is compared with the first, each on its engine: logprobs of the same tokens, gates, and greedy tokens. Exits with 1
    when an engine differs or fails, none could run, or a gate does not pass.
    """
    import msgspec

    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import check_outputs, print_and_save, working
    from xpuruntime.cli.results import are_models, two_models
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.engines.accuracy import GENERATED
    from xpuruntime.engines.model.file import refuse_missing
    from xpuruntime.files.paths import kind_of
    from xpuruntime.inference import compare_engines

    if other is not None and kind_of(other) == "missing":
        raise refuse_missing(other)
    if other is not None and are_models(model, other):
        raise two_models("compare", model, other)
    if other is not None:
        stated = {
            "--engines": engines, "--input": input, "--precision": precision, "--calibration": calibration,
            "--dim": dim, "--html": html, "--layers": layers, "--runs": None if runs == _RUNS else runs,
        }  # fmt: skip
        return _compare_folders(model, other, policy, device, texts, new_tokens, stated, as_json=json)
    if texts is not None or new_tokens is not None:
        raise InputError("--texts and --new-tokens are for two language models", fix="name a second folder")
    session_options = SessionOptions(policy=policy, device=device, precision=precision, calibration=calibration)
    check_outputs({"--html": html}, model, session_options, input)
    feeds = prepare(model, input, dim)[1] if input or dim else None
    with working("comparing", as_json=json), nullcontext() if feeds is None else feeds.running():
        comparison = compare_engines(
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
            comparison = msgspec.structs.replace(comparison, inputs=GENERATED)
    print_and_save(comparison, html=html, as_json=json)
    named_and_rejected = engines is not None and any(row.status == "rejected" for row in comparison.rows)
    return ExitCode.OK if comparison.agreed and not named_and_rejected else ExitCode.NOT_HONOURED


def _compare_folders(
    reference: str,
    candidate: str,
    policy: str | None,
    device: str | None,
    texts: str | None,
    new_tokens: int | None,
    stated: Mapping[str, object],
    *,
    as_json: bool,
) -> int:
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.inference import compare_generations

    wrong = [name for name, value in stated.items() if value]
    if wrong:
        raise InputError(f"{wrong[0]} has no effect on two language models", fix=f"leave {wrong[0]} out")
    with working("comparing", as_json=as_json):
        options = {} if new_tokens is None else {"new_tokens": new_tokens}
        generations = compare_generations(reference, candidate, policy, device=device, texts=texts, **options)
    print_and_save(generations, {}, shown=str(generations), as_json=as_json)
    return ExitCode.OK if generations.agreed else ExitCode.NOT_HONOURED


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
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Show what differs between two environments: packages, plan, placement, kernels, numbers and time.

    Interpreters run the model as workers, in rounds that alternate. Exits with 1 when something from plan to numbers
    differs, and with 4 when only time does, or could not be decided.
    """
    from xpuruntime.cli.output import check_outputs, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import are_models, check_target, two_models
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.files.paths import kind_of, refuse_overwriting
    from xpuruntime.locks.diff.diffing import compare_environments
    from xpuruntime.locks.environments import LockSide, read_side
    from xpuruntime.policies.kinds import read_duration

    if are_models(before, after):
        raise two_models("diff", before, after)
    check_target("--output", output)
    seconds = read_duration(budget, "--budget")
    feeds = None
    sides = [("a side", source) for source in (before, after) if kind_of(source) == "file"]
    refuse_overwriting({"--output": output}, sides)
    refuse_other_kinds({"--output": (output, "diff")})
    if model is not None:
        check_outputs({"--output": output}, model, session_options, input)
        if input or dim or not any(isinstance(read_side(side), LockSide) for side in (before, after)):
            feeds = prepare(model, input, dim, trust=session_options.trust)[1]
            report_probe_inputs(feeds)
    with working("comparing two environments", as_json=json), nullcontext() if feeds is None else feeds.running():
        environments = compare_environments(
            before,
            after,
            model,
            inputs=None if feeds is None else feeds.arrays,
            budget=seconds,
            margin=margin,
            **session_options.arguments(),
        )
    print_and_save(environments, {environments.save: output}, html=html, as_json=json)
    return environments.exit_code


PackageArgument = Annotated[
    str, typer.Argument(metavar="PACKAGE", help="As pip knows it, such as onnxruntime.", show_default=False)
]
RangeArgument = Annotated[
    str, typer.Argument(metavar="GOOD..BAD", help="Two versions, such as 1.23.2..1.32.0.", show_default=False)
]
BisectModelArgument = Annotated[
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
BisectBudgetOption = Annotated[str, typer.Option("--budget", metavar="TIME", help="Time for timing one version.")]
JournalOption = Annotated[
    str | None, output_option("--journal", help="Write each verdict to this file as it is known.")
]
ResumeOption = Annotated[bool, flag_option("--resume", "Continue an existing journal.")]
BisectOutputOption = Annotated[str | None, output_option("--output", "-o", help="Also save the result as JSON.")]


@with_session_options
def bisect(
    package: PackageArgument,
    versions: RangeArgument,
    model: BisectModelArgument,
    *,
    claim: ClaimOption,
    input: InputOption = None,
    session_options: SessionOptions,
    dim: DimOption = None,
    with_: WithOption = None,
    pre: PreOption = False,
    budget: BisectBudgetOption = "60s",
    journal: JournalOption = None,
    resume: ResumeOption = False,
    output: BisectOutputOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Find the version of a package that changed a claim about a model, in temporary environments.

    Exits with 0 when it is found, with 1 when the claim holds with BAD, with 3 when GOOD or BAD does not run, and with
    4 when versions that could not be judged leave more than one.
    """
    from xpuruntime.cli.output import check_outputs, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import check_target
    from xpuruntime.cli.session import prepare, report_probe_inputs
    from xpuruntime.locks.bisect_versions import bisect_versions
    from xpuruntime.policies.kinds import read_duration

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
        bisection = bisect_versions(
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
    print_and_save(bisection, {bisection.save: output}, html=html, as_json=json)
    return bisection.exit_code


def _say(verdict: VersionVerdict) -> None:
    """Say a verdict on stderr as it is known: a bisection takes minutes."""
    from xpuruntime.cli.output import error_line

    error_line(f"{verdict.version} is {verdict.verdict}: {verdict.reason}", label="note")
