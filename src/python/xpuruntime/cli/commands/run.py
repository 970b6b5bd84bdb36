# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt run``."""

from __future__ import annotations

from typing import Annotated

from xpuruntime.cli.options import (
    DimOption,
    FrozenOption,
    InputOption,
    JsonOption,
    LockOption,
    ModelArgument,
    output_option,
)
from xpuruntime.cli.session_options import SessionOptions, with_session_options

__all__ = ["run"]

OutputOption = Annotated[
    str | None,
    output_option("--output", "-o", help="Write the outputs to .npz, or .npy if there is one."),
]


@with_session_options
def run(
    model: ModelArgument,
    *,
    input: InputOption = None,
    output: OutputOption = None,
    session_options: SessionOptions,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    dim: DimOption = None,
    json: JsonOption = False,
) -> None:
    """Run a model once and show its outputs."""
    import time

    from xpuruntime.cli.output import console, print_json
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.cli.overwrite import check_outputs
    from xpuruntime.cli.results import check_output_path, output_table, save_outputs, summarise
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.evidence.render_text.tables import duration_text

    locks = [] if lock is None else [("the lock", lock)]
    check_outputs({"--output": output}, model, session_options, input, locks)
    refuse_other_kinds({"--output": (output, "arrays")})
    info, feeds = prepare(model, input, dim, trust=session_options.trust)
    check_output_path(output, len(info.outputs))
    session, _ = open_session(model, session_options, feeds, as_json=json, lock=lock, frozen=frozen)
    with session, feeds.running():
        start = time.perf_counter_ns()
        outputs = session.run(feeds.arrays)
        elapsed = (time.perf_counter_ns() - start) / 1e3
        plan = session.plan
    if output is not None:
        save_outputs(outputs, output)
    found = summarise(outputs)
    if json:
        print_json(
            {
                "schema": "xpuruntime.run/1",
                "model": model,
                "engine": plan.engine,
                "device": plan.device,
                "precision": plan.precision,
                "request_hash": plan.request_hash,
                "execution_hash": plan.execution_hash,
                "warnings": plan.warnings,
                "probe_inputs": feeds.probed,
                "first_run_us": elapsed,
                "outputs": found,
                "written": output,
            }
        )
        return
    console().print(output_table(found))
    where = f"; written to {output}" if output else ""
    console().print(
        f"{plan.candidate}, precision {plan.precision}, first run {duration_text(elapsed)}{where}", soft_wrap=True
    )
