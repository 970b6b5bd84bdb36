# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt plan`` and ``xrt explain``, and ``xrt policy``: schema, check, show, calibration, convert."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import (
    DimOption,
    FrozenOption,
    HtmlOption,
    InputOption,
    JsonOption,
    LockOption,
    ModelArgument,
    PolicyOption,
    SessionOptions,
    TrustOption,
    flag_option,
    output_option,
    refuse_dash,
    text_option,
    with_session_options,
)

MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine", metavar="FILE", help="Plan for another machine: what `xrt devices --json` printed there."
    ),
]

ModelOrReports = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, a .pt2 file or an artifact; or reports that --json or Report.save wrote.",
        show_default=False,
    ),
]
SaveOption = Annotated[
    str | None,
    output_option(
        "--output", "-o", help="Also save the report as JSON, or its units as CSV where the name ends in .csv."
    ),
]
SummaryOption = Annotated[
    bool,
    flag_option("--summary", "Show only the verdict and the policy keys."),
]
BaselineOption = Annotated[
    str | None,
    text_option("--baseline", metavar="FILE", help="The report that the others are compared with. Default: the first."),
]
NoiseOption = Annotated[
    float | None,
    text_option(
        "--noise",
        metavar="SHARE",
        help="Several reports: times that differ by less than this share of the first count as equal. Default 0.1.",
    ),
]
NoiseUsOption = Annotated[
    float | None,
    text_option(
        "--noise-us",
        metavar="US",
        help="Several reports: times that differ by less than this count as equal. Default 1.",
    ),
]

DeterminismOption = Annotated[
    str | None,
    text_option(
        "--determinism", metavar="GRADE", help="Test determinism up to this grade first, as `xrt determinism` does."
    ),
]


@with_session_options
def plan(
    model: ModelArgument,
    *,
    session_options: SessionOptions,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    machine: MachineOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what would run, every rejected candidate with its reason, and which policy keys are enforced.

    Nothing is loaded.
    """
    from xpuruntime import inference
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.runtime.snapshot import load_machine

    other = None if machine is None else load_machine(machine)
    with working("planning", as_json=json):
        planned = inference.plan(model, machine=other, lock=lock, frozen=frozen, **session_options.arguments())
    print_and_save(planned, html=html, as_json=json)


@with_session_options
def explain(
    models: ModelOrReports,
    *,
    input: InputOption = None,
    session_options: SessionOptions,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    dim: DimOption = None,
    output: SaveOption = None,
    html: HtmlOption = None,
    baseline: BaselineOption = None,
    noise: NoiseOption = None,
    noise_us: NoiseUsOption = None,
    determinism: DeterminismOption = None,
    summary: SummaryOption = False,
    json: JsonOption = False,
) -> int:
    """Run a model with its engine instrumented, and compare what ran with the policy.

    Exits with 1 when something else ran than was requested, or accuracy could not be compared. A saved report in place
    of the model is shown again. Several are compared with the first or with --baseline, and the code is 1 when
    something else ran; of three or more, the odd one is named.
    """
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import check_outputs, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import check_target, given_reports, rendered, show_reports
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.locks.determinism import session_determinism

    check_target("--output", output)
    if given_reports(models, baseline):
        arguments = {
            "--input": input,
            "--dim": dim,
            "--output": output,
            "--lock": lock,
            "--frozen": frozen,
            "--determinism": determinism,
            **{f"--{name}": value for name, value in session_options.arguments().items()},
        }
        limits = {"noise": noise, "noise_us": noise_us}
        return show_reports(models, arguments, baseline=baseline, html=html, **limits, summary=summary, as_json=json)
    model = models[0]
    locks = [] if lock is None else [("the lock", lock)]
    check_outputs({"--output": output, "--html": html}, model, session_options, input, locks)
    as_csv = output is not None and output.endswith(".csv")
    refuse_other_kinds({"--output": (output, "units as csv" if as_csv else "report")})
    if noise is not None or noise_us is not None:
        raise typer.BadParameter("--noise and --noise-us are for the comparison of saved reports")
    _, feeds = prepare(model, input, dim, trust=session_options.trust)
    session, _ = open_session(model, session_options, feeds, as_json=json, lock=lock, frozen=frozen)
    with session, working("running instrumented", as_json=json), feeds.running():
        if determinism is not None:
            given_feeds = None if feeds.probed and not dim else feeds.arrays
            session_determinism(session, determinism, inputs=given_feeds, trust=session_options.trust)  # type: ignore[arg-type]
        report = session.explain(feeds.arrays)
    shown = rendered(report, summary=summary)
    print_and_save(report, {report.save_csv if as_csv else report.save: output}, html=html, shown=shown, as_json=json)
    return ExitCode.OK if report.honoured else ExitCode.NOT_HONOURED


policy_app = typer.Typer(
    name="policy",
    help="Work with policy files.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A policy file.", show_default=False)]
SourceArgument = Annotated[str, typer.Argument(metavar="IN", help="A policy file.", show_default=False)]
PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="An .npz or .npy file, or a folder of them.", show_default=False)
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="Ends in .yaml or .json.", show_default=False, callback=refuse_dash)
]


@policy_app.command("schema")
def schema(json: JsonOption = False) -> None:
    """Print the JSON Schema of policy files, for editors. It is JSON with and without --json."""
    del json
    from xpuruntime.cli.output import print_json
    from xpuruntime.policies.policy import policy_schema

    print_json(policy_schema())


@policy_app.command("check")
def check(file: FileArgument, json: JsonOption = False) -> None:
    """Check a policy file. Exits with 2 and names the line when it is not valid."""
    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.policies import Policy

    policy = Policy.load(file)
    stated = policy.stated()
    if json:
        print_json({"schema": "xpuruntime.policy-check/1", "file": file, "valid": True, "stated": sorted(stated)})
    else:
        print_plain(f"{file}: valid, mode {policy.mode}, {len(stated)} key(s) other than the defaults")


@policy_app.command("show")
def show(file: FileArgument, json: JsonOption = False) -> None:
    """Print a policy file as it is understood: normalized, without defaults."""
    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.policies import Policy

    policy = Policy.load(file)
    if json:
        print_json(policy.to_dict())
    else:
        print_plain(policy.dumps("yaml"))


@policy_app.command("calibration")
def calibration(
    model: ModelArgument,
    path: PathArgument,
    policy: PolicyOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Print the section of a policy that names calibration inputs, with their digest."""
    import os

    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.quantization import Calibration
    from xpuruntime.engines.registry import read_model
    from xpuruntime.policies import CalibrationPolicy, Policy
    from xpuruntime.policies.files import dumps
    from xpuruntime.policies.kinds import seen_from

    stated = Policy.coerce(policy)
    samples = Calibration(path, with_shapes(read_model(model, trust=trust), stated))
    section = CalibrationPolicy(path=path, digest=f"sha256:{samples.digest}", samples=samples.count)
    if policy is not None:
        section = section.relocated(seen_from(os.path.dirname(policy)))  # noqa: PTH120 - as the policy file names it
    if json:
        print_json({"schema": "xpuruntime.policy-calibration/1", "calibration": section.to_plain()})
    else:
        print_plain(dumps({"calibration": section.to_plain()}, "yaml"))


@policy_app.command("convert")
def convert(source: SourceArgument, target: TargetArgument, json: JsonOption = False) -> None:
    """Write a policy file in the other format: YAML to JSON or back. Comments are not kept."""
    from xpuruntime.cli.output import print_json, print_plain, refuse_other_kinds
    from xpuruntime.files.paths import refuse_overwriting
    from xpuruntime.policies import Policy

    refuse_overwriting({"OUT": target}, [("IN", source)])
    refuse_other_kinds({"OUT": (target, "policy")})
    Policy.load(source).save(target)
    if json:
        print_json({"schema": "xpuruntime.policy-convert/1", "read": source, "written": target})
    else:
        print_plain(f"{source} written to {target}")
