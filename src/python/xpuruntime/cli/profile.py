# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt profile``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    DimOption,
    EngineOption,
    InputOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    PrecisionOption,
)

__all__ = ["profile"]

RunsOption = Annotated[int, typer.Option("--runs", "-n", min=1, max=1_000_000, help="Runs inside the profile.")]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, max=1_000_000, help="Runs before it.")]
TraceOption = Annotated[
    str | None, typer.Option("--trace", help="Write a trace for Perfetto there: .json or .json.gz.", metavar="FILE")
]
NodesOption = Annotated[
    bool,
    typer.Option("--nodes", help="Also run an instrumented copy inside, for the engine's nodes in the trace."),
]


def profile(
    model: ModelArgument,
    input: InputOption = None,
    trace: TraceOption = None,
    runs: RunsOption = 20,
    warmup: WarmupOption = 5,
    nodes: NodesOption = False,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    calibration: CalibrationOption = None,
    dim: DimOption = None,
    json: JsonOption = False,
) -> None:
    """Profile runs of a model: ranges of the host, kernels, copies and waits of CUDA devices, and a trace of them.

    On CUDA, each run takes and gives host arrays. What could not be recorded, and why, is said as a note.
    """
    from xpuruntime.cli.opening import Choice, open_session, prepare
    from xpuruntime.cli.output import console, print_json
    from xpuruntime.inference import profile as profiling

    prof = profiling(trace)
    _, feeds = prepare(model, input, dim)
    choice = Choice(policy=policy, device=device, engine=engine, precision=precision, calibration=calibration)
    session, _ = open_session(model, choice, as_json=json)
    with session:
        for _ in range(warmup):
            session.run(feeds.arrays)
        with prof:
            for _ in range(runs):
                session.run(feeds.arrays)
            if nodes:
                session.explain(feeds.arrays, runs=1)
        plan = session.plan
    if json:
        told = {"model": model, "engine": plan.engine, "device": plan.device, "precision": plan.precision, "runs": runs}
        print_json({**prof.result.to_dict(), **told, "probe_inputs": feeds.probed, "trace": trace})
        return
    console().print(prof.result)
    console().print(f"{plan.candidate}, {runs} runs after {warmup}" + (f"; trace: {trace}" if trace else ""))
