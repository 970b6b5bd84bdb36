# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt lock``, ``xrt log``, ``xrt index`` and ``xrt export``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    HtmlOption,
    InputOption,
    JsonOption,
    ModelArgument,
    SessionOptions,
    TrustOption,
    flag_option,
    html_option,
    output_option,
    text_option,
    with_session_options,
)
from xpuruntime.errors import InputError

OutputOption = Annotated[
    str | None,
    output_option(
        "--output",
        "-o",
        help="The lock file. Default: that of the model with .lock in place of its ending.",
    ),
]
ShapesOption = Annotated[
    list[str] | None,
    text_option("--shapes", metavar="NAME=1x3x8x8", help="Shape of an input. May be repeated."),
]
BatchesOption = Annotated[
    str, text_option("--batches", metavar="1,2,4,8", help="Batch sizes to time for servers, with their memory.")
]
CheckOption = Annotated[bool, flag_option("--check", "Write nothing; exit with 1 when the lock would change.")]
UpgradeOption = Annotated[bool, flag_option("--upgrade", "Accept every difference, and measure again.")]
UnitOption = Annotated[
    list[str] | None,
    text_option("--upgrade-unit", metavar="PATTERN", help="Let these units or nodes change."),
]
PackageOption = Annotated[
    list[str] | None,
    text_option(
        "--upgrade-package", metavar="NAME", help="Let the version of a package change, and what depends on it."
    ),
]
AcceptOption = Annotated[
    list[str] | None,
    text_option("--accept", metavar="CODE", help="Accept differences of a code, such as driver or kernel."),
]
WhyOption = Annotated[
    str, text_option("--why", metavar="TEXT", help="The reason, kept in the lock with what was accepted.")
]
DryRunOption = Annotated[bool, flag_option("--dry-run", "Show what would change, write nothing.")]
NoteOption = Annotated[str, text_option("--note", metavar="TEXT", help="Kept in the lock.")]
StatementOption = Annotated[
    str | None,
    output_option("--statement", help="Also write an unsigned in-toto statement of model and lock."),
]


@with_session_options
def lock(
    model: ModelArgument,
    *,
    output: OutputOption = None,
    input: InputOption = None,
    shapes: ShapesOption = None,
    batches: BatchesOption = "",
    session_options: SessionOptions,
    check: CheckOption = False,
    upgrade: UpgradeOption = False,
    upgrade_unit: UnitOption = None,
    upgrade_package: PackageOption = None,
    accept: AcceptOption = None,
    why: WhyOption = "",
    dry_run: DryRunOption = False,
    note: NoteOption = "",
    statement: StatementOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Write what was planned and observed into a lock file, with all that it depends on.

    An existing lock that holds is not changed. Exits with 1 when it does not hold and the differences were neither
    requested nor accepted.
    """
    from pathlib import Path

    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import check_outputs, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import check_target
    from xpuruntime.cli.session import prepare
    from xpuruntime.files.writing import write_whole
    from xpuruntime.lockfile.canonical import lock_statement
    from xpuruntime.locks.relock import lock as locked

    path = output if output is not None else str(Path(model).with_suffix(".lock"))
    if check and (upgrade or dry_run or accept or upgrade_unit or upgrade_package):
        raise InputError(
            "--check only compares, and accepts no difference",
            fix="leave --check out, or --upgrade, --upgrade-unit, --upgrade-package, --accept and --dry-run",
        )
    check_outputs({"--output": path, "--statement": statement}, model, session_options, input)
    refuse_other_kinds({"--statement": (statement, "statement")})
    if statement is not None:
        check_target("--statement", statement)
    inputs = None if not input else prepare(model, input, None, trust=session_options.trust)[1].arrays
    with working("locking", as_json=json):
        result = locked(
            model,
            output=path,
            inputs=inputs,
            shapes=_shapes(shapes),
            batches=_batches(batches),
            check=check,
            upgrade=upgrade,
            upgrade_units=upgrade_unit or (),
            upgrade_packages=upgrade_package or (),
            accept=accept or (),
            why=why,
            dry_run=dry_run,
            note=note,
            command=shlex.join(["xrt", *sys.argv[1:]]),
            **session_options.arguments(),
        )
    if statement is not None and not check and not dry_run:
        write_whole(statement, lock_statement(result.lock, path), "the statement")
    print_and_save(result, html=html, as_json=json)
    return ExitCode.NOT_HONOURED if check and result.drifts else ExitCode.OK


def _shapes(values: Sequence[str] | None) -> dict[str, tuple[int, ...]] | None:
    numbers: dict[str, tuple[int, ...]] = {}
    for value in values or ():
        name, equals, sizes = value.rpartition("=")
        parts = sizes.split("x")
        if not equals or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            raise InputError(f"--shapes {value} cannot be read. Fix: write NAME=1x3x224x224")
        if name in numbers:
            raise InputError(f"--shapes {value}: the shape of {name!r} is given twice")
        numbers[name] = tuple(int(part) for part in parts)
    return numbers or None


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        raise InputError(f"--batches {text} cannot be read. Fix: write numbers of rows, such as 1,2,4,8")
    return tuple(int(part) for part in parts)


#: Engines that are not listed one by one.
_MANY = 4

LockArgument = Annotated[
    str, typer.Argument(metavar="LOCK", help="A lock file that `xrt lock` wrote.", show_default=False)
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="Most revisions.")]


def log(lock: LockArgument, *, limit: LimitOption = 20, html: HtmlOption = None, json: JsonOption = False) -> int:
    """Show what changed in a lock, commit by commit, from its git repository."""
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.locks.history import lock_history

    with working("reading the history", as_json=json):
        history = lock_history(lock, limit=limit)
    print_and_save(history, html=html, as_json=json)
    return 0


FolderArgument = Annotated[
    str, typer.Argument(metavar="FOLDER", help="With reports, locks and verifications.", show_default=False)
]
IndexOption = Annotated[str | None, html_option("The page. Default: index.html in the folder.")]


def index(folder: FolderArgument, *, html: IndexOption = None, json: JsonOption = False) -> int:
    """Write one page over many reports, locks and verifications, and find the odd one out.

    Exits with 1 when a file differs from most others of its kind and model, or cannot be read.
    """
    from pathlib import Path

    from xpuruntime.cli.output import error_line, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import check_target
    from xpuruntime.locks.folder_index import index_folder

    page = str(Path(folder, "index.html")) if html is None else html
    with working("reading", as_json=json):
        index_of_files = index_folder(folder, page=page)
    check_target("--html", page)
    refuse_other_kinds({"--html": (page, "page")})
    print_and_save(index_of_files, html=page, as_json=json)
    if html is None and not json:
        error_line(f"{page} is the page", label="note")
    return 1 if index_of_files.odd else 0


ToOption = Annotated[
    str | None,
    text_option("--to", metavar="TARGET", help="What to write. Default: list the targets."),
]
ExportOutputOption = Annotated[
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
    output: ExportOutputOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    strict: StrictOption = False,
    prove: ProveOption = False,
    python: PythonOption = None,
    force: ForceOption = False,
    trust: TrustOption = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Write a locked session as configuration that runs without xpuruntime, with what becomes of each policy key.

    Exits with 1 when --prove finds an output or a unit that is not the lock's, or --strict a key that is not kept.
    """
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.files.paths import refuse_overwriting
    from xpuruntime.locks.export.exporting import export_lock, export_targets

    if to is None or output is None:
        listed = ", ".join(
            f"{target} ({', '.join(engines) if len(engines) < _MANY else 'every engine'})"
            for target, engines in sorted(export_targets().items())
        )
        fix = f"xrt export {shlex.quote(lock)} --to {to or 'triton-python'} -o exported"
        raise InputError(f"state what to write and where, by --to and -o; targets are {listed}", fix=fix)
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
    print_and_save(result, html=html, as_json=json)
    return result.exit_code
