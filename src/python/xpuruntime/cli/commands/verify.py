# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt verify`` and ``xrt determinism``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.options import (
    DimOption,
    HtmlOption,
    InputOption,
    JsonOption,
    ModelArgument,
    SessionOptions,
    flag_option,
    refuse_dash,
    text_option,
    with_session_options,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.locks.verification.result import VerificationResult

VerifiedArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, a .pt2 file, an artifact, or a folder with genai_config.json; or a lock beside its model.",
        show_default=False,
    ),
]
OnlyOption = Annotated[
    str | None,
    text_option("--only", metavar="A,B", help="Sections with commas, such as evidence,accuracy."),
]
LockOption = Annotated[
    str | None,
    text_option("--lock", metavar="FILE", help="Also check a lock that `xrt lock` wrote."),
]
AgainstOption = Annotated[
    str | None,
    text_option(
        "--against", metavar="PYTHON", help="Interpreter of another environment; the session is timed beside one there."
    ),
]
MetricOption = Annotated[
    list[str] | None,
    text_option(
        "--metric",
        metavar="FILE.py:FN[=FLOOR]",
        help="A function of your own: it gets run(inputs) and returns a number, FLOOR at least. Runs the file.",
    ),
]
MetricTimeoutOption = Annotated[
    str,
    text_option("--metric-timeout", metavar="TIME", help="Time that each metric may take; then it is inconclusive."),
]
MetricMemoryOption = Annotated[
    str | None,
    text_option(
        "--metric-memory",
        metavar="SIZE",
        help="Memory that each metric may hold, such as 8GiB; then it is inconclusive. "
        "Default: 90% of the available memory.",
    ),
]
OutputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FORMAT=FILE",
        help="Also write the result: json, md, junit, sarif, openmetrics or intoto. May be repeated.",
        show_default=False,
        callback=lambda values: [refuse_dash(value) for value in values or ()],
    ),
]
GitHubOption = Annotated[
    bool,
    flag_option("--github", "Print annotations for GitHub Actions, and append to $GITHUB_STEP_SUMMARY."),
]
GitLabOption = Annotated[bool, flag_option("--gitlab", "Write xrt-junit.xml and metrics.txt, for GitLab's reports.")]
BudgetOption = Annotated[
    str | None,
    text_option("--budget", metavar="TIME", help="Time for measurements of speed, such as 60s."),
]
InconclusiveOption = Annotated[
    str | None,
    text_option(
        "--inconclusive",
        metavar="WORD",
        help="What inconclusive claims do to the exit code: fail (1), warn or pass (0). Default: 4.",
    ),
]


@with_session_options
def verify(
    model: VerifiedArgument,
    *,
    input: InputOption = None,
    session_options: SessionOptions,
    dim: DimOption = None,
    lock: LockOption = None,
    only: OnlyOption = None,
    metric: MetricOption = None,
    metric_timeout: MetricTimeoutOption = "10m",
    metric_memory: MetricMemoryOption = None,
    against: AgainstOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    github: GitHubOption = False,
    gitlab: GitLabOption = False,
    budget: BudgetOption = None,
    inconclusive: InconclusiveOption = None,
    json: JsonOption = False,
) -> int:
    """Check every claim that a policy makes of a model: evidence, accuracy, memory, and what its section verify states.

    Exits with 1 when a claim failed, and with 4 when none did and one is inconclusive.
    """
    import msgspec

    from xpuruntime.cli.output import check_outputs, print_and_save, refuse_other_kinds, working
    from xpuruntime.cli.results import check_target
    from xpuruntime.cli.session import locked_model, prepare
    from xpuruntime.files.paths import refuse_overwriting
    from xpuruntime.locks.verification.formats import FORMATS, GITLAB_REPORTS
    from xpuruntime.locks.verification.verify import verify as verified
    from xpuruntime.policies.device_spec import read_size
    from xpuruntime.policies.kinds import read_duration

    if lock is None and (of_lock := locked_model(model)) is not None:
        model, lock = of_lock, model
    outputs = _outputs(output, tuple(FORMATS))
    if html is not None:
        outputs.append(("html", html))
    if gitlab:
        outputs += GITLAB_REPORTS.items()
    named = {_option(format, path): path for format, path in outputs}
    for option, path in named.items():
        check_target(option, path)
    check_outputs(named, model, session_options, input)
    read = [("the file of a metric", f"{source.partition('.py:')[0]}.py") for source in metric or ()]
    refuse_overwriting(named, read if lock is None else [*read, ("the lock", lock)])
    refuse_other_kinds({_option(kind, path): (path, f"verification as {kind}") for kind, path in outputs})
    seconds = None if budget is None else read_duration(budget, "--budget")
    feeds = prepare(model, input, dim, trust=session_options.trust)[1]
    with working("verifying", as_json=json), feeds.running():
        result = verified(
            model,
            lock=lock,
            inputs=feeds.arrays,
            only=None if only is None else [section.strip() for section in only.split(",")],
            metrics=metric or (),
            metric_timeout=read_duration(metric_timeout, "--metric-timeout"),
            metric_memory=None if metric_memory is None else read_size(metric_memory, "--metric-memory"),
            against=against,
            budget=seconds,
            inconclusive=inconclusive,  # type: ignore[arg-type]
            **session_options.arguments(),
        )
    if (note := feeds.note()) is not None:
        result = msgspec.structs.replace(result, notes=(note, *result.notes))
    saves: dict[Callable[[str], object], str | None] = {partial(result.save, format=kind): to for kind, to in outputs}
    print_and_save(result, saves, as_json=json)
    if github:
        _github(result, as_json=json)
    return result.exit_code


def _option(format: str, path: str) -> str:
    return f"--html {path}" if format == "html" else f"--output {format}={path}"


def _outputs(output: Sequence[str] | None, formats: Sequence[str]) -> list[tuple[str, str]]:
    from xpuruntime.policies.document import did_you_mean

    outputs = []
    for value in output or ():
        format, equals, path = value.partition("=")
        if not equals or not path:
            raise InputError(f"--output {value}: no format is named", fix=f"--output {_format_of(value)}={value}")
        if format == "html":
            raise InputError("--output has no format html: the page has an option of its own", fix=f"--html {path}")
        if format not in formats:
            raise InputError(f"--output {value}: {format!r} is not a format{did_you_mean(format, formats, 'formats')}")
        outputs.append((format, path))
    return outputs


#: Formats by the ending of a file.
_ENDINGS = {".xml": "junit", ".md": "md", ".sarif": "sarif", ".txt": "openmetrics"}


def _format_of(path: str) -> str:
    return _ENDINGS.get(os.path.splitext(path)[1], "json")  # noqa: PTH122 - of a path as it was given


def _github(result: VerificationResult, *, as_json: bool) -> None:
    """Print annotations, which GitHub reads from both streams; under ``--json`` on stderr. Append the summary."""
    from xpuruntime.locks.verification.formats import append_summary, workflow_commands

    stream = sys.stderr if as_json else sys.stdout
    for line in workflow_commands(result):
        stream.write(f"{line}\n")
    stream.flush()
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        append_summary(result, summary)


GradeOption = Annotated[
    str | None,
    typer.Option(
        "--grade",
        metavar="GRADE",
        help="run_to_run, concurrency, restart, batch_position or batch_invariant: test up to this one, and require "
        "it. Default: the policy's grade; if that is none, test all and require none.",
        show_default=False,
    ),
]
TrialsOption = Annotated[int, typer.Option("--trials", min=1, max=100_000, help="Runs compared in each test.")]
ProcessesOption = Annotated[
    int, typer.Option("--processes", min=1, max=1000, help="Fresh processes that are started for restart.")
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--batch-sizes",
        metavar="N,N",
        help="Sizes of batches whose rows are compared with rows alone. Default: 2,3,4,8,16, as the policy allows.",
        show_default=False,
    ),
]
DimensionOption = Annotated[
    str | None,
    typer.Option(
        "--batch-dim",
        metavar="NAME",
        help="The batch dimension. Default: the open first dimension of the inputs.",
        show_default=False,
    ),
]


@with_session_options
def determinism(
    model: ModelArgument,
    *,
    grade: GradeOption = None,
    input: InputOption = None,
    session_options: SessionOptions,
    dim: DimOption = None,
    trials: TrialsOption = 20,
    processes: ProcessesOption = 3,
    batch_sizes: SizesOption = None,
    batch_dim: DimensionOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Test how far results repeat bit for bit, grade by grade.

    Each grade includes those before it. Exits with 1 when the required grade did not pass.
    """
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.locks.determinism import session_determinism

    sizes = None if batch_sizes is None else _sizes(batch_sizes)
    feeds = prepare(model, input, dim, trust=session_options.trust)[1]
    session, _ = open_session(model, session_options, feeds, as_json=json)
    with session, working("testing determinism", as_json=json), feeds.running():
        tested = session_determinism(
            session,
            grade,  # type: ignore[arg-type]
            inputs=None if feeds.probed and not dim else feeds.arrays,
            trials=trials,
            processes=processes,
            batch_sizes=sizes,
            batch_dimension=batch_dim,
            trust=session_options.trust,
        )
    print_and_save(tested, html=html, as_json=json)
    return ExitCode.OK if tested.reached else ExitCode.NOT_HONOURED


def _sizes(text: str) -> list[int]:
    from xpuruntime.errors import InputError

    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 31 for part in parts):
        raise InputError(f"--batch-sizes {text} cannot be read. Fix: write sizes of 1 or more with commas, as 1,4,16")
    return [int(part) for part in parts]
