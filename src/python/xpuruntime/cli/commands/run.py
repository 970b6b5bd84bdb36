# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt run``, ``bench``, ``profile`` and ``demo``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpuruntime.cli.options import (
    DeviceOption,
    DimOption,
    FrozenOption,
    HtmlOption,
    InputOption,
    JsonOption,
    LockOption,
    ModelArgument,
    PolicyOption,
    SessionOptions,
    output_option,
    runs_option,
    text_option,
    warmup_option,
    with_session_options,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from xpuruntime.evidence.records import Latency
    from xpuruntime.inference import InferenceSession

OutputOption = Annotated[
    str | None,
    output_option("--output", "-o", help="Write the outputs to .npz, or .npy if there is one."),
]
NewTokensOption = Annotated[
    int | None,
    typer.Option(
        "--new-tokens",
        min=1,
        metavar="N",
        help="Generate this many tokens, by a language model in a folder.",
        show_default=False,
    ),
]
PromptOption = Annotated[
    str | None, text_option("--prompt", metavar="TEXT", help="Text before the new tokens, in place of --input.")
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
    new_tokens: NewTokensOption = None,
    prompt: PromptOption = None,
    json: JsonOption = False,
) -> None:
    """Run a model once and show its outputs; with --new-tokens, what a language model generates."""
    import time

    from xpuruntime.cli.generating import check_generation, show_generation
    from xpuruntime.cli.output import check_outputs, print_json, print_plain, refuse_other_kinds
    from xpuruntime.cli.results import check_output_path, output_lines, save_outputs, summarise
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.evidence.render_text.changes import duration_text

    locks = [] if lock is None else [("the lock", lock)]
    check_outputs({"--output": output}, model, session_options, input, locks)
    refuse_other_kinds({"--output": (output, "arrays")})
    info, feeds = prepare(model, input, dim, trust=session_options.trust, defer=True)
    check_output_path(output, len(info.outputs))
    feeds = check_generation(info, new_tokens, prompt, feeds)
    session, _ = open_session(model, session_options, feeds, as_json=json, lock=lock, frozen=frozen)
    if new_tokens is not None:
        if output is not None:
            session.close()
            raise InputError("--output writes arrays, and --new-tokens gives none", fix="leave one of them out")
        with session:
            show_generation(session, feeds, new_tokens, prompt, as_json=json)
        return
    with session, feeds.running():
        start = time.perf_counter_ns()
        outputs = session.run(feeds.arrays)
        elapsed = (time.perf_counter_ns() - start) / 1e3
        plan = session.plan
    if output is not None:
        save_outputs(outputs, output)
    summary = summarise(outputs)
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
                "outputs": summary,
                "written": output,
            }
        )
        return
    where = f"; written to {output}" if output else ""
    print_plain(f"{plan.candidate}, precision {plan.precision}, first run {duration_text(elapsed)}{where}")
    print_plain("\n".join(output_lines(summary)))


BenchRunsOption = Annotated[
    int | None, runs_option("Timed runs. Default: 200, and 10 of a language model in a folder.", 10_000_000)
]
BenchWarmupOption = Annotated[
    int | None,
    warmup_option(
        "Untimed runs before the timed ones. Default: 20, and 2 of a language model in a folder.", 10_000_000
    ),
]
BenchAgainstOption = Annotated[
    list[str] | None,
    text_option(
        "--against",
        metavar="FILE",
        help="With --html: what `xrt bench --json` printed before. The first is the baseline.",
    ),
]
_CHUNKS = 50


@with_session_options
def bench(
    model: ModelArgument,
    *,
    input: InputOption = None,
    runs: BenchRunsOption = None,
    warmup: BenchWarmupOption = None,
    session_options: SessionOptions,
    lock: LockOption = None,
    frozen: FrozenOption = False,
    dim: DimOption = None,
    new_tokens: NewTokensOption = None,
    prompt: PromptOption = None,
    html: HtmlOption = None,
    against: BenchAgainstOption = None,
    json: JsonOption = False,
) -> None:
    """Time a model: `run` with arrays given each time, and `bind` with fixed buffers.

    Calls run one after the other; the wall time of each ends with its result. On CUDA, `run` takes and gives host
    arrays, `run_device` device arrays. Of a language model in a folder, the first token and those after it are timed.
    """
    from xpuruntime.cli.generating import NEW_TOKENS, check_generation, time_generation
    from xpuruntime.cli.output import check_outputs, console, print_json, progress
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.engines.model.file import GENERATION_FORMATS
    from xpuruntime.evidence.render_text.changes import duration_text

    if against and html is None:
        raise InputError("--against is for the page of --html", fix="add --html FILE")
    read = [("the lock", lock)] if lock is not None else []
    check_outputs(
        {"--html": html}, model, session_options, input, read + [("a baseline", path) for path in against or ()]
    )
    baselines = [(path, _saved_timings(path)) for path in against or ()]
    info, feeds = prepare(model, input, dim, trust=session_options.trust)
    generates = info.format in GENERATION_FORMATS
    new_tokens = (new_tokens or NEW_TOKENS) if generates else new_tokens
    feeds = check_generation(info, new_tokens, prompt, feeds)
    runs = runs or (10 if generates else 200)
    warmup = (2 if generates else 20) if warmup is None else warmup
    arrays = feeds.arrays
    session, load_us = open_session(model, session_options, feeds, as_json=json, lock=lock, frozen=frozen)
    samples: dict[str, list[float]] = {}
    generated: dict[str, Any] = {}
    graph = "off"
    with session, progress(as_json=json) as bar, feeds.running():
        plan = session.plan
        if new_tokens is not None:
            generated = time_generation(session, feeds, new_tokens, prompt, warmup, runs, samples, bar)
        else:
            samples["run"] = _time(lambda: session.run(arrays), warmup, runs, bar, "run")
            there, wait = _on_device(arrays, plan.device)
            if wait is not None:
                samples["run_device"] = _time(_then(lambda: session.run(there), wait), warmup, runs, bar, "run_device")
            graph = _time_bound(
                session, there, lambda call: _time(_then(call, wait), warmup, runs, bar, "bind"), samples
            )
    latencies = {name: _latency(values) for name, values in samples.items()}
    result = {
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
        "latency": latencies,
        "samples_us": samples,
        **generated,
    }
    if html is not None:
        _write_page(html, result, baselines)
    if json:
        print_json(result)
        return
    console().print(_table(latencies))
    if generated:
        console().print(
            f"prompt of {generated['prompt_tokens']} tokens, {generated['new_tokens']} new ones"
            + (f": {rate:,.1f} tokens/s after the first" if (rate := generated["tokens_per_second"]) else ""),
            soft_wrap=True,
        )
    console().print(
        f"{plan.candidate}, precision {plan.precision}, {runs} runs after {warmup}, "
        f"loaded in {duration_text(load_us)}, CUDA graph: {graph}",
        soft_wrap=True,
    )


def _saved_timings(path: str) -> dict[str, Any]:
    import msgspec

    from xpuruntime.files.paths import reason_of, user_path
    from xpuruntime.files.reading import decode_json, open_regular

    fix = "name a file with what `xrt bench --json` printed"
    try:
        with open_regular(user_path(path, "--against")) as file:
            document = decode_json(file.read(), dict[str, Any])
        samples = msgspec.convert(document.get("samples_us"), dict[str, list[float]])
    except OSError as error:
        raise InputError(f"--against {path}: {reason_of(error)}", fix=fix) from error
    except msgspec.MsgspecError as error:
        raise InputError(f"--against {path}: this is no result of a benchmark", fix=fix) from error
    if not samples or not all(values and min(values) > 0 for values in samples.values()):
        raise InputError(f"--against {path}: it has no timed runs", fix=fix)
    return {"samples_us": samples}


def _write_page(path: str, result: dict[str, Any], baselines: list[tuple[str, dict[str, Any]]]) -> None:
    import msgspec

    from xpuruntime.evidence.page.document import render_timings
    from xpuruntime.files.writing import write_whole

    page = render_timings(msgspec.to_builtins(result, enc_hook=str), baselines)
    write_whole(path, page, "the page of a benchmark")


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


def _table(latencies: dict[str, Latency]) -> Any:
    from xpuruntime.evidence.render_text.changes import duration_text
    from xpuruntime.tables import table

    result = table("latency", ("call", ">median", ">p90", ">p99", ">min", ">runs"))
    for name, row in latencies.items():
        times = (row.median_us, row.p90_us, row.detail["p99_us"], row.min_us)
        result.add_row(name, *map(duration_text, times), f"{row.runs:,}")
    return result


ProfileRunsOption = Annotated[int, runs_option("Runs inside the profile.")]
ProfileWarmupOption = Annotated[int, warmup_option("Runs before the profile.")]
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
    runs: ProfileRunsOption = 20,
    warmup: ProfileWarmupOption = 5,
    nodes: NodesOption = False,
    session_options: SessionOptions,
    dim: DimOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Profile runs of a model: ranges of the host, kernels, copies and waits of CUDA devices, and a trace of them.

    On CUDA, each run takes and gives host arrays. Notes state what could not be recorded, and why.
    """
    from xpuruntime.cli.output import check_outputs, console, print_json, refuse_other_kinds
    from xpuruntime.cli.session import open_session, prepare
    from xpuruntime.errors import InputError
    from xpuruntime.evidence.profile import check_trace
    from xpuruntime.inference import profile as profiling

    if trace is not None:
        check_trace(trace)
        check_outputs({"--trace": trace}, model, session_options, input)
        refuse_other_kinds({"--trace": (trace, "trace")})
    elif nodes:
        raise InputError("--nodes adds nodes to a trace, and none is written. Fix: give --trace FILE")
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
    if html is not None:
        prof.result.save_html(html)
    if not json:
        console().print(f"{plan.candidate}, {runs} runs after {warmup}" + (f"; trace: {trace}" if trace else ""))
        return
    told = {"model": model, "engine": plan.engine, "device": plan.device, "precision": plan.precision, "runs": runs}
    print_json({**prof.result.to_dict(), **told, "probe_inputs": feeds.probed, "trace": trace})


def demo(
    device: DeviceOption = None,
    policy: PolicyOption = None,
    files: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write model.onnx, retrained.onnx and policy.yaml here, to go on with."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Run the shipped digits model on real images: plan, accuracy, latency, evidence, lock, verification.

    Exits with 1 when the policy was not honoured, a claim of the verification failed, or the accuracy is below 98 %.
    """
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import console, print_json
    from xpuruntime.demo import run_demo

    result = run_demo(device=device, policy=policy, console=None if json else console(markup=True), files=files)
    if json:
        print_json(result.to_dict())
    return ExitCode.OK if result.honoured and result.accurate and result.verified else ExitCode.NOT_HONOURED
