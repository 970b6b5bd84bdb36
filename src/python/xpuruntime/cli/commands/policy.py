# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt policy``: schema, check, show, calibration, convert."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import JsonOption, ModelArgument, PolicyOption, TrustOption, refuse_dash

__all__ = ["app"]

app = typer.Typer(
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


@app.command("schema")
def schema(json: JsonOption = False) -> None:
    """Print the JSON Schema of policy files, for editors. It is JSON with and without --json."""
    del json
    from xpuruntime.cli.output import print_json
    from xpuruntime.policies.schema import policy_schema

    print_json(policy_schema())


@app.command("check")
def check(file: FileArgument, json: JsonOption = False) -> None:
    """Check a policy file. Exits with 2 and names the line when it is not valid."""
    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.policies import Policy

    policy = Policy.load(file)
    stated = policy.stated()
    if json:
        print_json({"schema": "xpuruntime.policy-check/1", "file": file, "valid": True, "stated": sorted(stated)})
    else:
        print_plain(f"{file}: valid, mode {policy.mode}, {len(stated)} key(s) stated")


@app.command("show")
def show(file: FileArgument, json: JsonOption = False) -> None:
    """Print a policy file as it is understood: normalised, without defaults."""
    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.policies import Policy

    policy = Policy.load(file)
    if json:
        print_json(policy.to_dict())
    else:
        print_plain(policy.dumps("yaml"))


@app.command("calibration")
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
    from xpuruntime.engines.model import read_model, with_shapes
    from xpuruntime.engines.quantisation import Calibration
    from xpuruntime.policies import CalibrationPolicy, Policy
    from xpuruntime.policies.file_path import seen_from
    from xpuruntime.policies.files import dumps

    stated = Policy.coerce(policy)
    found = Calibration(path, with_shapes(read_model(model, trust=trust), stated))
    section = CalibrationPolicy(path=path, digest=f"sha256:{found.digest}", samples=found.count)
    if policy is not None:
        section = section.relocated(seen_from(os.path.dirname(policy)))  # noqa: PTH120 - as the policy file names it
    if json:
        print_json({"schema": "xpuruntime.policy-calibration/1", "calibration": section.to_plain()})
    else:
        print_plain(dumps({"calibration": section.to_plain()}, "yaml"))


@app.command("convert")
def convert(source: SourceArgument, target: TargetArgument, json: JsonOption = False) -> None:
    """Write a policy file in the other format: YAML to JSON or back. Comments are not kept."""
    from xpuruntime.cli.output import print_json, print_plain
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.files.paths import refuse_overwriting
    from xpuruntime.policies import Policy

    refuse_overwriting({"OUT": target}, [("IN", source)])
    refuse_other_kinds({"OUT": (target, "policy")})
    Policy.load(source).save(target)
    if json:
        print_json({"schema": "xpuruntime.policy-convert/1", "read": source, "written": target})
    else:
        print_plain(f"{source} written to {target}")
