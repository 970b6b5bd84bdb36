# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    EngineOption,
    FrozenOption,
    JsonOption,
    LockOption,
    OnnxArgument,
    PolicyOption,
    PrecisionOption,
    output_option,
)
from xpuruntime.cli.session_options import SessionOptions

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.policies import Policy

__all__ = ["compile_"]

OutputOption = Annotated[
    str, output_option("--output", "-o", metavar="FOLDER", help="The folder to write, such as model.xrt.")
]
SocOption = Annotated[
    str | None,
    typer.Option("--soc", metavar="NAME", help="With the engine qnn: the chip, such as sm8650.", show_default=False),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing folder.")]


def compile_(
    model: OnnxArgument,
    output: OutputOption,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    soc: SocOption = None,  # among the options of a `SessionOptions`, so that they are listed here one by one
    calibration: CalibrationOption = None,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Compile a model into a folder, from which `xrt run` and sessions start without compiling."""
    import time

    from xpuruntime.cli.output import console, print_json, working
    from xpuruntime.inference import compile_model

    session_options = SessionOptions(
        policy=policy, device=device, engine=engine, precision=precision, calibration=calibration
    )
    arguments = session_options.arguments()
    del arguments["trust"]  # no engine compiles a .pt2 file
    arguments["policy"] = _with_soc(policy, soc, arguments["engine"])
    start = time.perf_counter()
    with working("compiling", as_json=json):
        artifact = compile_model(model, output, overwrite=force, lock=lock, frozen=frozen, **arguments)
    seconds = time.perf_counter() - start
    if json:
        print_json(_record(artifact, seconds))
        return
    made = artifact.manifest
    size = sum(facts.size for facts in made.files.values())
    lines = [
        f"{output}: {made.engine}@{made.device}, {len(made.files)} files, {size:,} bytes, {seconds:.2f} s",
        f"tied to: {', '.join(f'{key} {value}' for key, value in made.target.items())}",
        *([f"checked: {made.accuracy}"] if made.accuracy is not None else ()),
        *(f"note: {note}" for note in made.notes),
    ]
    for line in lines:
        console().print(line, soft_wrap=True)


def _with_soc(policy: str | None, soc: str | None, engine: str | list[str] | None) -> Policy | str | None:
    """Return the policy with the chip in it that the command names: a chip of the engine qnn, and of no other."""
    if soc is None:
        return policy
    from xpuruntime.errors import InputError
    from xpuruntime.policies import Policy

    base = Policy.coerce(policy)
    asked = engine if engine is not None else base.execution.engine
    if "qnn" not in ((asked,) if isinstance(asked, str) else asked):
        named = asked if isinstance(asked, str) else ", ".join(asked)
        msg = f"--soc {soc} names a chip for the engine qnn, and the engine asked for is {named}; state --engine qnn"
        raise InputError(msg)
    options = {name: dict(values) for name, values in base.execution.provider_options.items()}
    options["qnn"] = {**options.get("qnn", {}), "soc": soc}
    return base.replace(execution=base.execution.replace(provider_options=options))


def _record(artifact: Artifact, seconds: float) -> dict[str, Any]:
    made = artifact.manifest
    return {
        "schema": "xpuruntime.compile/1",
        "folder": str(artifact.folder),
        "engine": made.engine,
        "device": made.device,
        "model": made.model.path,
        "model_sha256": made.model_sha256,
        "target": made.target,
        "files": made.files,
        "entry": made.entry,
        "accuracy": made.accuracy,
        "notes": made.notes,
        "seconds": seconds,
    }
