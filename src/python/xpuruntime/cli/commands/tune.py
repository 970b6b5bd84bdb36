# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt tune`` and ``xrt compile``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    EngineOption,
    FrozenOption,
    HtmlOption,
    JsonOption,
    LockOption,
    ModelArgument,
    OnnxArgument,
    PolicyOption,
    PrecisionOption,
    SessionOptions,
    flag_option,
    output_option,
    text_option,
    with_session_options,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.policies import Policy
    from xpuruntime.tuning.tune_result import TuneProgress, TuneResult

#: Seconds between two refreshes of the table, and its rows.
_REFRESH, _ROWS = 0.25, 14

TuneOption = Annotated[
    str | None,
    text_option("--tune", "-t", metavar="FILE", help="What to search, and under which constraints: YAML or JSON."),
]
ForOption = Annotated[
    str | None,
    text_option(
        "--for", metavar="OBJECTIVE", help="Goal: latency.p50, latency.p99, throughput, memory, energy or cold_start."
    ),
]
CallOption = Annotated[
    str | None,
    text_option(
        "--call", metavar="CALL",
        help="How the model is called: run, with host arrays, or bind, with buffers that stay on the device.",
    ),
]  # fmt: skip
InputsOption = Annotated[
    str | None,
    text_option(
        "--input", "-i", metavar="PATH",
        help="Real inputs: an .npz or .npy file whose first axis counts samples, or a folder of them; or 'random'.",
    ),
]  # fmt: skip
BudgetOption = Annotated[str | None, text_option("--budget", metavar="TIME", help="Time of the search, such as 10m.")]
DevicesOption = Annotated[
    str | None,
    text_option(
        "--devices", metavar="LIST",
        help="Measure on several devices at once: cuda:0,cuda:1, or disjoint sets of cores, cpu:0-3,cpu:4-7.",
    ),
]  # fmt: skip
RayOption = Annotated[
    str | None,
    text_option("--ray", metavar="ADDRESS", help="Measure on the nodes of a Ray cluster: 'auto' or host:port."),
]
OutputOption = Annotated[
    str | None,
    output_option("--output", "-o", help="Write the policy that was found, as YAML."),
]
JournalOption = Annotated[
    str | None,
    output_option(
        "--journal",
        help="File that keeps what is measured. Default: the model's name with .tune.jsonl, in this folder.",
    ),
]
ResumeOption = Annotated[bool, flag_option("--resume", "Continue the journal; nothing in it is measured again.")]
TuneLockOption = Annotated[str | None, output_option("--lock", help="Lock the model under the policy that was found.")]


@with_session_options
def tune(
    model: ModelArgument,
    *,
    tune: TuneOption = None,
    objective: ForOption = None,
    call: CallOption = None,
    input: InputsOption = None,
    session_options: SessionOptions,
    devices: DevicesOption = None,
    ray: RayOption = None,
    budget: BudgetOption = None,
    output: OutputOption = None,
    journal: JournalOption = None,
    resume: ResumeOption = False,
    lock: TuneLockOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Search for the fastest policy within the constraints, or show that none is faster than the one given.

    Exits with 1 when no candidate keeps the constraints, and with 4 when the budget ended before anything was proven.
    """
    from pathlib import Path

    from xpuruntime.cli.output import check_outputs, error_line, print_and_save, refuse_other_kinds
    from xpuruntime.cli.results import check_target
    from xpuruntime.files.paths import kind_of
    from xpuruntime.policies.kinds import read_duration
    from xpuruntime.tuning.spec.parts import CALLS, OBJECTIVES
    from xpuruntime.tuning.tune import tune as tuned

    _check_word("--for", objective, OBJECTIVES, "objectives")
    _check_word("--call", call, CALLS, "calls")
    kept = journal if journal is not None else f"{Path(model).stem}.tune.jsonl"
    named = {"--output": output, "--lock": lock, "--html": html, "--journal": kept}
    for option, path in named.items():
        check_target(option, path)
    values = [f"@{input}"] if input is not None and input != "random" else None
    check_outputs(named, model, session_options, values, _read_with(tune))
    refuse_other_kinds({"--output": (output, "policy"), "--lock": (lock, "lock")})
    seconds = None if budget is None else read_duration(budget, "--budget")
    if resume and kind_of(kept) == "missing":
        error_line(f"there is no journal {kept} to resume: the search begins", label="note")
    try:
        with _live(as_json=json) as progress:
            result = tuned(
                model,
                spec=tune,
                objective=objective,
                call=call,
                inputs=input,
                budget=seconds,
                devices=None if devices is None else [device.strip() for device in devices.split(",")],
                ray=ray,
                journal=kept,
                resume=resume,
                progress=progress,
                **session_options.arguments(),
            )
    except KeyboardInterrupt:
        if kind_of(kept) == "file":
            error_line(f"what was measured is in {kept}; go on with --resume", label="note")
        raise
    saves: dict[Callable[[str], Any], str | None] = {}
    if result.verdict not in ("none", "undecided"):
        saves = {partial(_write_policy, result): output, partial(_lock, result, model, session_options): lock}
    print_and_save(result, saves, html=html, as_json=json)
    if result.verdict in ("none", "undecided") and (output is not None or lock is not None):
        error_line(f"no policy was written: {result.reason}", label="note")
    return result.exit_code


def _check_word(option: str, word: str | None, words: Sequence[str], what: str) -> None:
    from xpuruntime.policies.document import did_you_mean

    if word is not None and word not in words:
        raise InputError(f"{option} {word}: this is none of the {what}{did_you_mean(word, words, what)}")


def _write_policy(result: TuneResult, path: str) -> None:
    from xpuruntime.cli.output import error_line

    error_line(f"{result.write_policy(path)} has the policy", label="note")


def _lock(result: TuneResult, model: str, session_options: SessionOptions, path: str) -> None:
    """Lock the model under the policy; a lock that is there is of another one, and is replaced where it differs."""
    from xpuruntime.cli.output import error_line
    from xpuruntime.engines.quantization import uses_calibration
    from xpuruntime.engines.registry import read_model
    from xpuruntime.locks.relock import lock as locked

    policy = result.tuned_policy()
    used = uses_calibration(policy, read_model(model, trust=session_options.trust))
    locked_result = locked(
        model, policy, path, command=f"xrt tune {model} --lock {path}", trust=session_options.trust,
        calibration=session_options.calibration if used else None, call=result.call, upgrade=True,
    )  # fmt: skip
    error_line(f"{locked_result.path} has the lock {locked_result.lock.digest}", label="note")


@contextmanager
def _live(*, as_json: bool) -> Iterator[Callable[[TuneProgress], None] | None]:
    """Show on stderr what is measured; nothing under ``--json`` or when stderr is no terminal."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.live import Live

    from xpuruntime.cli.output import console

    last = 0.0
    with Live(console=console(stderr=True), auto_refresh=False, transient=True) as live:

        def show(progress: TuneProgress) -> None:
            nonlocal last
            if time.monotonic() - last >= _REFRESH:
                live.update(_table(progress), refresh=True)
                last = time.monotonic()

        yield show


def _table(progress: TuneProgress) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from xpuruntime.measuring.statistics import CandidateCode
    from xpuruntime.tables import table
    from xpuruntime.tuning.tune_result import changes_text

    left = max(0.0, progress.budget - progress.elapsed)
    rounds = f", round {progress.round + 1} of at most {progress.rounds}" if progress.rounds else ""
    out = sum(
        candidate.code not in (CandidateCode.UNDECIDED, CandidateCode.CONTROL) for candidate in progress.candidates
    )
    head = (
        f"{progress.stage}{rounds}: {len(progress.candidates)} candidates, {out} out; {left:.0f} s of the budget left"
    )
    shown = table("", ("id", "candidate", "gain", "state"))
    shown.title = None
    live = set(progress.live)
    rows: list[Any] = sorted(
        progress.candidates,
        key=lambda candidate: (candidate.id not in live, candidate.figure is None, candidate.figure or 0.0),
    )
    for row in rows[:_ROWS]:
        state = "measured now" if row.id in live else row.code
        gain = "-" if row.gain is None else f"{row.gain} of {row.gain.against}"
        shown.add_row(row.id, Text(changes_text(row.changes)), gain, state)
    return Group(Text(head), shown)


def _read_with(path: str | None) -> Iterator[tuple[str, str]]:
    from xpuruntime.tuning.spec.tune_spec import TuneSpec

    if path is None:
        return
    yield "the file of the search", path
    stated = TuneSpec.load(path)
    if stated.base is not None:
        yield "the base policy", stated.base
    if stated.inputs is not None and stated.inputs != "random":
        yield "the inputs", stated.inputs


CompileOutputOption = Annotated[
    str, output_option("--output", "-o", metavar="FOLDER", help="The folder to write, such as model.xrt.")
]
SocOption = Annotated[
    str | None,
    typer.Option("--soc", metavar="NAME", help="With the engine qnn: the chip, such as sm8650.", show_default=False),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing folder.")]


def compile_(
    model: OnnxArgument,
    output: CompileOutputOption,
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
    manifest = artifact.manifest
    size = sum(facts.size for facts in manifest.files.values())
    lines = [
        f"{output}: {manifest.engine}@{manifest.device}, {len(manifest.files)} files, {size:,} bytes, {seconds:.2f} s",
        f"tied to: {', '.join(f'{key} {value}' for key, value in manifest.target.items())}",
        *([f"checked: {manifest.accuracy}"] if manifest.accuracy is not None else ()),
        *(f"note: {note}" for note in manifest.notes),
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
    engines = engine if engine is not None else base.execution.engine
    if "qnn" not in ((engines,) if isinstance(engines, str) else engines):
        named = engines if isinstance(engines, str) else ", ".join(engines)
        msg = (
            f"--soc {soc} names a chip for the engine qnn, and the engine asked for is {named}. Fix: state --engine qnn"
        )
        raise InputError(msg)
    options = {name: dict(values) for name, values in base.execution.provider_options.items()}
    options["qnn"] = {**options.get("qnn", {}), "soc": soc}
    return base.replace(execution=base.execution.replace(provider_options=options))


def _record(artifact: Artifact, seconds: float) -> dict[str, Any]:
    manifest = artifact.manifest
    return {
        "schema": "xpuruntime.compile/1",
        "folder": str(artifact.folder),
        "engine": manifest.engine,
        "device": manifest.device,
        "model": manifest.model.path,
        "model_sha256": manifest.model_sha256,
        "target": manifest.target,
        "files": manifest.files,
        "entry": manifest.entry,
        "accuracy": manifest.accuracy,
        "notes": manifest.notes,
        "seconds": seconds,
    }
