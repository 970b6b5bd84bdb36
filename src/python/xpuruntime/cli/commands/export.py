# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt export``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    JsonOption,
    TrustOption,
    flag_option,
    output_option,
    text_option,
)
from xpuruntime.errors import InputError

__all__ = ["export"]

#: Engines that are not listed one by one.
_MANY = 4

LockArgument = Annotated[
    str, typer.Argument(metavar="LOCK", help="A lock file that `xrt lock` wrote.", show_default=False)
]
ToOption = Annotated[
    str | None,
    text_option("--to", metavar="TARGET", help="What to write. Default: list the targets."),
]
OutputOption = Annotated[
    str | None, output_option("--output", "-o", metavar="FOLDER", help="Folder to write, completely or not at all.")
]
ModelOption = Annotated[
    str | None,
    text_option("--model", metavar="FILE", help="The locked model; default: the file of its name beside the lock."),
]
StrictOption = Annotated[bool, flag_option("--strict", "Write nothing if a policy key is not kept.")]
ProveOption = Annotated[
    bool,
    flag_option("--prove", "Run what was written without xpuruntime, and compare outputs and units with the lock."),
]
PythonOption = Annotated[
    str | None,
    text_option("--python", metavar="PYTHON", help="Interpreter for --prove; default: this one, without xpuruntime."),
]
ForceOption = Annotated[bool, flag_option("--force", "Replace an earlier export.")]


def export(
    lock: LockArgument,
    *,
    to: ToOption = None,
    output: OutputOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    strict: StrictOption = False,
    prove: ProveOption = False,
    python: PythonOption = None,
    force: ForceOption = False,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> int:
    """Write a locked session as configuration that runs without xpuruntime, with what becomes of each policy key.

    Exits with 1 when --prove finds an output or a unit that is not the lock's, or --strict a key that is not kept.
    """
    from xpuruntime.cli.output import print_thing, working
    from xpuruntime.files.paths import refuse_overwriting
    from xpuruntime.locks.export.exporting import export_lock, export_targets

    if to is None or output is None:
        listed = ", ".join(
            f"{target} ({', '.join(engines) if len(engines) < _MANY else 'every engine'})"
            for target, engines in sorted(export_targets().items())
        )
        raise InputError(f"state what to write and where: --to TARGET -o FOLDER. Targets: {listed}")
    if python is not None and not prove:
        raise InputError("--python names the interpreter of --prove. Fix: add --prove, or leave it out")
    inputs = [("the lock", lock)] + ([("the model", model)] if model is not None else [])
    refuse_overwriting({"--output": output}, inputs)
    with working("exporting", as_json=json):
        result = export_lock(
            lock,
            to,
            output,
            model=model,
            calibration=calibration,
            strict=strict,
            prove=prove,
            python=python,
            overwrite=force,
            trust=trust,
        )
    print_thing(result, as_json=json)
    return result.exit_code
