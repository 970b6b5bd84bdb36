# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt bench``."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Annotated, Any

from xpuruntime.cli.options import (
    DimOption,
    FrozenOption,
    InputOption,
    JsonOption,
    LockOption,
    ModelArgument,
    runs_option,
    warmup_option,
)
from xpuruntime.cli.session_options import SessionOptions, with_session_options
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from xpuruntime.evidence.records import Latency
    from xpuruntime.inference import InferenceSession

__all__ = ["bench"]

RunsOption = Annotated[int, runs_option("Timed runs.", 10_000_000)]
WarmupOption = Annotated[int, warmup_option("Untimed runs before the timed ones.", 10_000_000)]
_CHUNKS = 50


@with_session_options
def bench(
    model: ModelArgument,
    *,
    input: InputOption = None,
    runs: RunsOption = 200,
    warmup: WarmupOption = 20,
    session_options: SessionOptions,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    dim: DimOption = None,
    json: JsonOption = False,
) -> None:
    """Time a model: `run` with arrays given each time, and `bind` with fixed buffers.

    Calls run one after the other; the wall time of each ends with its result. On CUDA, `run` takes and gives host
    arrays, `run_device` device arrays.
    """
    from xpuruntime.cli.output import console, print_json, progress
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.evidence.render_text.tables import duration_text

    _, feeds = prepare(model, input, dim, trust=session_options.trust)
    arrays = feeds.arrays
    session, load_us = open_session(model, session_options, feeds, as_json=json, lock=lock, frozen=frozen)
    samples: dict[str, list[float]] = {}
    with session, progress(as_json=json) as bar, feeds.running():
        plan = session.plan
        samples["run"] = _time(lambda: session.run(arrays), warmup, runs, bar, "run")
        there, wait = _on_device(arrays, plan.device)
        if wait is not None:
            samples["run_device"] = _time(_then(lambda: session.run(there), wait), warmup, runs, bar, "run_device")
        graph = _time_bound(session, there, lambda call: _time(_then(call, wait), warmup, runs, bar, "bind"), samples)
    found = {name: _latency(values) for name, values in samples.items()}
    if json:
        print_json(
            {
                "schema": "xpuruntime.bench/1",
                "model": model,
                "engine": plan.engine,
                "engine_version": plan.engine_version,
                "device": plan.device,
                "precision": plan.precision,
                "request_hash": plan.request_hash,
                "execution_hash": plan.execution_hash,
                "policy": plan.policy,
                "warnings": plan.warnings,
                "probe_inputs": feeds.probed,
                "shapes": {name: list(array.shape) for name, array in arrays.items()},
                "load_us": load_us,
                "warmup": warmup,
                "cuda_graph": graph,
                "latency": found,
                "samples_us": samples,
            }
        )
        return
    console().print(_table(found))
    console().print(
        f"{plan.candidate}, precision {plan.precision}, {runs} runs after {warmup}, "
        f"loaded in {duration_text(load_us)}, CUDA graph: {graph}",
        soft_wrap=True,
    )


def _time_bound(
    session: InferenceSession,
    arrays: dict[str, Any],
    time_it: Callable[[Callable[[], Any]], list[float]],
    samples: dict[str, list[float]],
) -> str:
    """Time a binding, where the model has one; return what became of the CUDA graph."""
    from xpuruntime.cli.output import error_line

    try:
        binding = session.bind(arrays)
    except InputError as error:  # `run` took these arrays: only sequences, strings and the like have no buffers
        error_line(f"bind is left out: {error}", label="note")
        return f"none: {error}"
    try:
        samples["bind"] = time_it(binding.run)
        return binding.graph
    finally:
        binding.close()


def _on_device(arrays: dict[str, Any], device: str) -> tuple[dict[str, Any], Callable[[], None] | None]:
    """Return the arrays where the model runs, and what waits for that device: nothing on the CPU."""
    if not device.startswith("cuda"):
        return arrays, None
    from xpuruntime.runtime.device import synchronize
    from xpuruntime.runtime.stream import Tensor

    there = {name: Tensor.from_numpy(array).to(device) for name, array in arrays.items()}
    synchronize(device)
    return there, lambda: synchronize(device)


def _then(call: Callable[[], Any], wait: Callable[[], None] | None) -> Callable[[], Any]:
    """Return a call that ends when the result is there: on CUDA, work is only enqueued."""
    if wait is None:
        return call

    def call_and_wait() -> None:
        call()
        wait()

    return call_and_wait


def _time(call: Callable[[], Any], warmup: int, runs: int, bar: Progress, name: str) -> list[float]:
    """Return microseconds of each run. The bar moves between chunks, never inside what is timed."""
    task = bar.add_task(name, total=warmup + runs)
    for done in range(warmup):
        call()
        if done % max(1, warmup // _CHUNKS) == 0:
            bar.update(task, completed=done, refresh=True)
    clock, samples = time.perf_counter_ns, []
    step = max(1, runs // _CHUNKS)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for first in range(0, runs, step):
            for _ in range(min(step, runs - first)):
                start = clock()
                call()
                samples.append((clock() - start) / 1e3)
            bar.update(task, completed=warmup + len(samples), refresh=True)
    finally:
        if collecting:
            gc.enable()
    return samples


def _latency(samples: list[float]) -> Latency:
    import numpy as np

    from xpuruntime.evidence.records import Latency

    values = np.asarray(samples)
    return Latency(
        median_us=float(np.median(values)),
        p90_us=float(np.percentile(values, 90)),
        min_us=float(values.min()),
        runs=len(samples),
        detail={"p99_us": float(np.percentile(values, 99)), "mean_us": float(values.mean())},
    )


def _table(found: dict[str, Latency]) -> Any:
    from xpuruntime.evidence.render_text.tables import duration_text, table

    made = table("latency", ("call", ">median", ">p90", ">p99", ">min", ">runs"))
    for name, row in found.items():
        times = (row.median_us, row.p90_us, row.detail["p99_us"], row.min_us)
        made.add_row(name, *map(duration_text, times), f"{row.runs:,}")
    return made
