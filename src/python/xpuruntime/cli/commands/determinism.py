# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt determinism``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import DimOption, InputOption, JsonOption, ModelArgument
from xpuruntime.cli.session_options import SessionOptions, with_session_options

__all__ = ["determinism"]

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
    json: JsonOption = False,
) -> int:
    """Test how far results repeat bit for bit, grade by grade.

    Each grade includes those before it. Exits with 1 when the required grade did not pass.
    """
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_thing, working
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.locks.determinism import session_determinism

    sizes = None if batch_sizes is None else _sizes(batch_sizes)
    feeds = prepare(model, input, dim, trust=session_options.trust)[1]
    session, _ = open_session(model, session_options, feeds, as_json=json)
    with session, working("testing determinism", as_json=json), feeds.running():
        found = session_determinism(
            session,
            grade,  # type: ignore[arg-type]
            inputs=None if feeds.probed and not dim else feeds.arrays,
            trials=trials,
            processes=processes,
            batch_sizes=sizes,
            batch_dimension=batch_dim,
            trust=session_options.trust,
        )
    print_thing(found, as_json=json)
    return ExitCode.OK if found.reached else ExitCode.NOT_HONOURED


def _sizes(text: str) -> list[int]:
    """Read sizes with commas. Raises InputError."""
    from xpuruntime.errors import InputError

    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 31 for part in parts):
        raise InputError(f"--batch-sizes {text}: write sizes of 1 or more with commas, such as 1,4,16")
    return [int(part) for part in parts]
