# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt profile``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import (
    DimOption,
    InputOption,
    JsonOption,
    ModelArgument,
    output_option,
    runs_option,
    warmup_option,
)
from xpuruntime.cli.session_options import SessionOptions, with_session_options

__all__ = ["profile"]

RunsOption = Annotated[int, runs_option("Runs inside the profile.")]
WarmupOption = Annotated[int, warmup_option("Runs before the profile.")]
TraceOption = Annotated[
    str | None, output_option("--trace", help="Write a trace for Perfetto there: .json or .json.gz.")
]
NodesOption = Annotated[
    bool,
    typer.Option("--nodes", help="Also run an instrumented copy inside, for the engine's nodes in the trace."),
]


@with_session_options
def profile(
    model: ModelArgument,
    *,
    input: InputOption = None,
    trace: TraceOption = None,
    runs: RunsOption = 20,
    warmup: WarmupOption = 5,
    nodes: NodesOption = False,
    session_options: SessionOptions,
    dim: DimOption = None,
    json: JsonOption = False,
) -> None:
    """Profile runs of a model: ranges of the host, kernels, copies and waits of CUDA devices, and a trace of them.

    On CUDA, each run takes and gives host arrays. Notes state what could not be recorded, and why.
    """
    from xpuruntime.cli.output import console, print_json
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.cli.overwrite import check_outputs
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.errors import InputError
    from xpuruntime.evidence.traces.trace_file import check_trace
    from xpuruntime.inference import profile as profiling

    if trace is not None:
        check_trace(trace)
        check_outputs({"--trace": trace}, model, session_options, input)
        refuse_other_kinds({"--trace": (trace, "trace")})
    elif nodes:
        raise InputError("--nodes adds nodes to a trace, and none is written: give --trace FILE, or leave --nodes out")
    prof = profiling()
    _, feeds = prepare(model, input, dim, trust=session_options.trust)
    session, _ = open_session(model, session_options, feeds, as_json=json)
    with session, feeds.running():
        for _ in range(warmup):
            session.run(feeds.arrays)
        with prof:
            for _ in range(runs):
                session.run(feeds.arrays)
            if nodes:
                session.explain(feeds.arrays, runs=1)
        plan = session.plan
    if not json:  # first: what cannot be saved is not lost
        console().print(prof.result)
    if trace is not None:
        prof.result.save_trace(trace)
    if not json:
        console().print(f"{plan.candidate}, {runs} runs after {warmup}" + (f"; trace: {trace}" if trace else ""))
        return
    told = {"model": model, "engine": plan.engine, "device": plan.device, "precision": plan.precision, "runs": runs}
    print_json({**prof.result.to_dict(), **told, "probe_inputs": feeds.probed, "trace": trace})
