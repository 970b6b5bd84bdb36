# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps of models of transformers: plain, by Liger's own patches, under a policy; eager, compiled, captured.

python benchmarks/bench_model_steps.py [--models llama,gpt2] [--modes "eager,eager auto,compile"] [--quick]

Each mode runs in a process of its own, since patches and compiled code stay. All modes of a model are prepared at once,
and then timed in turns of five steps, while the others wait. Weights are random, in fp32 under bf16
autocast, with fused AdamW; all modes see the same batches, and their losses are held to those of the plain eager step,
or of plain compiled code where that is left out. `eager reordered` sees the rows of a batch in reverse, by which the
sums of a plain step are rounded in another way, and nothing else: losses may differ by as much. `float32` computes
without autocast.
A batch of size `usual` leaves small models waiting for the host; one of size `large` has so many more rows that the
device is the limit, as where a card is trained on.
The peak is that of the whole process, warm-up, measuring and capture included; `steady` is that of the timed steps.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bench_providers import chosen_by
from harness import write
from xpuruntime.measuring.statistics import paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Batch = dict[str, torch.Tensor]

OPS = (
    "attention", "rms_norm", "layer_norm", "swiglu", "geglu", "rope", "softmax", "cross_entropy",
    "linear_cross_entropy",
)  # fmt: skip
MODES = (
    "eager", "eager liger", "eager auto", "eager auto logits", "eager reordered", "float32", "compile",
    "compile auto", "compile loss", "reduce-overhead", "capture compile", "capture compile auto",
)  # fmt: skip
_READY = "ready"
#: Size of a batch to how many times the rows of its model it has.
SIZES = {"usual": 1, "large": 4}
#: Largest relative difference of a loss from that of the plain eager step, unless a plain one of reordered rows differs
#: by more, or the plain one differs more from float32.
LOSS_BOUND = 0.02
#: What a mode of a model may need of time and memory, as a share of another mode; of any model where none is named, and
#: of any size.
BARS = (
    ("llama", "eager auto", "eager", {"ms": 0.83, "steady_gib": 0.75}),
    ("large", "eager auto", "eager", {"ms": 0.83, "steady_gib": 0.75}),
    ("", "eager auto", "eager", {"ms": 1.02}),
    ("", "compile auto", "compile", {"ms": 1.01}),
    ("llama", "compile auto", "compile", {"ms": 0.97}),
    ("", "capture compile", "reduce-overhead", {"ms": 1.01}),
    ("", "capture compile auto", "reduce-overhead", {"ms": 1.01}),
    ("llama", "capture compile auto", "reduce-overhead", {"ms": 0.92}),
    ("gpt2", "capture compile auto", "reduce-overhead", {"ms": 0.92}),
    ("", "capture compile", "compile", {"peak_gib": 1.1}),
    ("", "capture compile auto", "compile", {"peak_gib": 1.1}),
)


class Model(NamedTuple):
    """A model of transformers: its classes, what its configuration states, and the sizes of a batch."""

    kind: str
    config: str
    sizes: dict[str, Any]
    batch: int
    length: int
    liger: str = ""


_DECODER = {"num_hidden_layers": 8, "vocab_size": 32000, "use_cache": False, "tie_word_embeddings": False}
_SMALL = {**_DECODER, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 2048}
MODELS = {
    "llama": Model(
        "LlamaForCausalLM", "LlamaConfig",
        {**_DECODER, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
         "num_key_value_heads": 8, "max_position_embeddings": 2048},
        4, 2048, "apply_liger_kernel_to_llama",
    ),
    "qwen3": Model(
        "Qwen3ForCausalLM", "Qwen3Config",
        {**_SMALL, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 4, 1024,
        "apply_liger_kernel_to_qwen3",
    ),
    "gemma": Model(
        "GemmaForCausalLM", "GemmaConfig",
        {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}, 4, 1024,
        "apply_liger_kernel_to_gemma",
    ),
    "gpt2": Model("GPT2LMHeadModel", "GPT2Config", {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                                     "attn_pdrop": 0.0}, 4, 1024),
    "bert": Model("BertForMaskedLM", "BertConfig", {"hidden_dropout_prob": 0.0,
                                                    "attention_probs_dropout_prob": 0.0}, 32, 128),
    "vit": Model("ViTForImageClassification", "ViTConfig", {"num_labels": 1000}, 32, 224),
}  # fmt: skip
_LITTLE = {
    "num_hidden_layers": 2, "n_layer": 2, "hidden_size": 128, "n_embd": 128, "intermediate_size": 256, "n_head": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
}  # fmt: skip


def build(
    name: str, device: str, quick: bool, layers: int = 0, size: str = "usual"
) -> tuple[torch.nn.Module, list[Batch]]:
    """Return a model with random weights, and two batches."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type] - it need not fit this PyTorch
    import transformers

    row = MODELS[name]
    sizes = {**row.sizes, **({k: v for k, v in _LITTLE.items() if k in row.sizes or k[:2] != "n_"} if quick else {})}
    if quick and name == "gpt2":
        sizes = {**row.sizes, **{k: v for k, v in _LITTLE.items() if k.startswith("n_") or k == "vocab_size"}}
    if layers:
        sizes["n_layer" if name == "gpt2" else "num_hidden_layers"] = layers
    config = getattr(transformers, row.config)(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, row.kind)(config).train()
    batch, length = (2, 32 if name != "vit" else 224) if quick else (row.batch * SIZES[size], row.length)
    generator = torch.Generator().manual_seed(1)
    batches: list[Batch] = []
    for _ in range(2):
        if name == "vit":
            pixels = torch.randn(batch, 3, length, length, generator=generator)
            labels = torch.randint(config.num_labels, (batch,), generator=generator)
            batches.append({"pixel_values": pixels.to(device), "labels": labels.to(device)})
        else:
            tokens = torch.randint(config.vocab_size, (batch, length), generator=generator).to(device)
            batches.append({"input_ids": tokens, "labels": tokens})
    return model, batches


def policy_of(mode: str) -> Any:
    """Return the policy of a mode: all measured but products; with `logits` the loss is computed of logits."""
    from xpuruntime.policies import KernelPolicy

    if mode == "compile loss":
        return KernelPolicy(cross_entropy=("quack.cross_entropy", "torch"))
    if "auto" not in mode:
        return None
    ops = [op for op in OPS if op != "linear_cross_entropy" or "logits" not in mode]
    return KernelPolicy(matmul="torch", **dict.fromkeys(ops, "auto"), auto_strategy="best_performance")


def make_step(mode: str, model: torch.nn.Module, batch: Batch, device: str) -> Callable[[Batch], torch.Tensor]:
    """Return one step of a mode."""
    import xpuruntime.pytorch as xrt_torch

    cuda = device == "cuda"
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=cuda)

    def loss_of(**batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=mode != "float32"):
            return model(**batch).loss

    if mode.startswith("capture"):
        captured = xrt_torch.capture_graph(
            lambda *values: loss_of(**dict(zip(batch, values, strict=True))), tuple(batch.values()),
            optimizer=optimizer, modules=[model], strict=cuda, compile="compile" in mode,
        )  # fmt: skip
        return lambda batch: captured(*batch.values())
    function: Callable[..., torch.Tensor] = loss_of
    if mode.startswith("compile"):
        function = torch.compile(loss_of)
    if mode == "reduce-overhead":
        function = torch.compile(loss_of, mode="reduce-overhead")

    def step(batch: Batch) -> torch.Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss = function(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def run_mode(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one mode in this process and return what it took."""
    import xpuruntime.pytorch as xrt_torch

    device, steps = options.device, options.steps
    cuda = device == "cuda"
    row: dict[str, Any] = {"model": name, "mode": mode, "layers": options.layers, "size": options.sizes}
    if "liger" in mode:
        import liger_kernel.transformers as liger

        getattr(liger, MODELS[name].liger)()
    model, batches = build(name, device, options.quick, options.layers, options.sizes)
    row["batch"] = list(next(iter(batches[0].values())).shape)
    if mode == "eager reordered":
        batches = [{key: value.flip(0) for key, value in batch.items()} for batch in batches]
    policy = policy_of(mode)
    with nullcontext() if policy is None else xrt_torch.kernel_policy(policy):
        begun = time.perf_counter()
        step = make_step(mode, model, batches[0], device)
        losses = [step(batches[turn % 2]).clone() for turn in range(5)]
        row["prepare_s"] = time.perf_counter() - begun
        if cuda:
            torch.cuda.synchronize()
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            torch.cuda.reset_peak_memory_stats()
        samples = []
        print(_READY, flush=True)
        while len(losses) < steps and sys.stdin.readline():  # a line for each turn
            start = time.perf_counter()
            losses += [step(batches[turn % 2]).clone() for turn in range(5)]
            if cuda:
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / 5 * 1e3)
            print(_READY, samples[-1], flush=True)
        if cuda:
            row["steady_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["peak_gib"] = max(row["peak_gib"], row["steady_gib"])
        if mode.startswith("eager"):
            row |= explained(lambda: step(batches[0]))
        if mode.startswith("compile ") and cuda:
            row["kernels"] = kernels_of(lambda: step(batches[0]))
        if policy is not None:
            row["chosen_by"] = chosen_by()
    return row | {"ms": statistics.median(samples), "samples_ms": samples, "losses": [float(loss) for loss in losses]}


def kernels_of(run: Callable[[], Any]) -> dict[str, list[str]]:
    """Return the kernels that served attention and losses in a step."""
    import xpuruntime.pytorch as xrt_torch

    with xrt_torch.explain() as found:
        run()
    return {
        op: sorted({f"{row.resolved or row.operator} {row.time_us:.0f} us" for row in found.rows if row.op == op})
        for op in ("attention", "cross_entropy")
    }


def explained(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the share of time in what is no known operation, and the kernels of the others."""
    import xpuruntime.pytorch as xrt_torch

    with xrt_torch.explain() as found:
        run()
    kernels: dict[str, dict[str, float]] = {}
    for row in found.rows:
        if row.op in OPS:
            times = kernels.setdefault(row.op, {})
            times[row.resolved or row.operator] = times.get(row.resolved or row.operator, 0.0) + row.time_us
    unnamed = [(row.operator, round(row.time_us)) for row in found.rows if not row.op][:8]
    return {"other": found.coverage.other, "kernels_us": kernels, "other_rows": unnamed}


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what misses its bar."""
    by_mode = {(*_kind(row), row["mode"]): row for row in rows}
    for row in rows:
        kind = _kind(row)
        plain, exact, other = (by_mode.get((*kind, mode)) for mode in ("eager", "float32", "eager reordered"))
        plain = plain or by_mode.get((*kind, "compile"))
        if "error" in row or plain is None or "error" in plain:
            continue
        row["loss_difference"] = worst = _apart(row, plain)
        if exact is not None and "error" not in exact:
            row["from_float32"] = _apart(row, exact)
        bound = LOSS_BOUND if other is None or "error" in other else max(LOSS_BOUND, _apart(other, plain))
        nearer = exact is not None and row.get("from_float32", worst) < _apart(plain, exact)
        if worst > bound and not nearer:
            yield f"{', '.join(kind)}, {row['mode']}: losses differ by {worst:.2%}, and {bound:.2%} is the bound"
    for only, mode, than, bars in BARS:
        for kind in dict.fromkeys(map(_kind, rows)):
            measured, reference = (by_mode.get((*kind, name), {}) for name in (mode, than))
            for figure, bar in bars.items():
                if only not in ("", *kind) or figure not in measured or figure not in reference:
                    continue
                share = measured[figure] / reference[figure]
                if share > bar:
                    yield f"{', '.join(kind)}, {mode}: {figure} is {share:.3f} of that of {than}, and {bar} is the bar"


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["model"], row["size"], *([f"{row['layers']} layers"] if row.get("layers") else []))


def _apart(row: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(row["losses"], other["losses"], strict=False))


def main() -> int:
    """Run each mode in a process of its own, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--models", default="llama", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--sizes", default="usual", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=600.0, help="from which on a model has no further turn")
    parser.add_argument("--layers", type=int, default=0, help="layers of each model; default: those of its row")
    parser.add_argument("--quick", action="store_true", help="little models: does it run?")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models, modes = options.models.split(","), options.modes.split(",")
    if options.child:
        print(json.dumps(run_mode(models[0], modes[0], options)))
        return 0
    rows: list[dict[str, Any]] = []
    for name in models:
        for size in options.sizes.split(","):
            run = [mode for mode in modes if "liger" not in mode or MODELS[name].liger]
            rows += raced(name, size, run, options)
            list(failures(rows))
            for row in rows[-len(run) :]:
                show(row)
    missed = list(failures(rows))
    body = {"dtype": "bfloat16 autocast, float32 weights", "optimizer": "AdamW(fused, capturable)",
            "loss_bound": LOSS_BOUND, "bars": BARS, "cases": rows, "missed": missed}  # fmt: skip
    write("model_steps", body, options.out)
    for text in missed:
        print(f"MISSED: {text}")
    return int(bool(missed) or any("error" in row for row in rows))


class Child:
    """A mode in a process of its own, which does five steps for each line that it gets."""

    def __init__(self, name: str, size: str, mode: str, options: argparse.Namespace) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--child", "--models", name, "--modes", mode]
        command += ["--sizes", size]
        command += ["--steps", str(options.steps), "--device", options.device, *(["--quick"] * options.quick)]
        command += ["--layers", str(options.layers)] if options.layers else []
        self.last, self.samples = "", list[float]()
        self.case = {"model": name, "size": size, "mode": mode}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until the row is read
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def wait(self) -> bool:
        """Wait until it has done its turn, or its preparation. Returns whether it goes on."""
        assert self.process.stdout is not None
        self.last = self.process.stdout.readline()
        while self.last and not self.last.startswith((_READY, "{")):
            self.last = self.process.stdout.readline()
        self.samples += map(float, self.last.split()[1:] if self.last.startswith(_READY) else ())
        return self.last.startswith(_READY)

    def turn(self) -> bool:
        """Let it do five steps. Returns whether it goes on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.wait()

    def end(self) -> None:
        """Let it write its row."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def row(self) -> dict[str, Any]:
        """Return what it has found, or why it has ended."""
        if self.last.startswith(_READY):
            self.wait()
        self.process.wait()
        if self.last.startswith("{"):
            return json.loads(self.last)  # type: ignore[no-any-return]
        self.errors.seek(0)
        return {**self.case, "error": self.errors.read()[-1500:]}


def raced(name: str, size: str, modes: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the row of each mode of a model, timed in the same turns."""
    begun = time.perf_counter()
    children = [Child(name, size, mode, options) for mode in modes]
    late = threading.Timer(options.seconds, lambda: [child.process.kill() for child in children if not child.last])
    late.start()
    with ThreadPoolExecutor(len(children)) as pool:
        ready = [child for child, goes_on in zip(children, pool.map(Child.wait, children), strict=True) if goes_on]
    late.cancel()
    took = time.perf_counter() - begun
    print(f"{name}, {size}: {len(ready)} of {len(children)} modes prepared in {took:.0f} s", flush=True)
    with Path(tempfile.gettempdir(), "xpuruntime_model_steps.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another run of this file may be preparing, but does not time meanwhile
        for turn in range(5, options.steps, 5):
            if turn > 10 and time.perf_counter() - begun > options.seconds:
                break
            ready = [child for child in ready if child.turn()]
    for child in children:
        child.end()
    rows = [child.row() for child in children]
    plain = next((row for row in rows if row["mode"] in ("eager", "compile") and "error" not in row), None)
    for row in rows:
        if plain is not None and row is not plain and "error" not in row and len(row["samples_ms"]) > 2:
            row["of"] = plain["mode"]
            row["ratio"] = [round(x, 4) for x in paired_ratio(row["samples_ms"], plain["samples_ms"])[:3]]
    return rows


def show(row: dict[str, Any]) -> None:
    """Print the line of a mode."""
    if "error" in row:
        print(f"{row['model']:6} {row['size']} {row['mode']:22} FAILED: {row['error']}", flush=True)
        return
    memory = "  ".join(f"{name} {row[f'{name}_gib']:6.2f}" for name in ("peak", "steady") if f"{name}_gib" in row)
    shown = {"loss_difference": "loss differs", "from_float32": "from float32"}
    drift = "".join(f"  {text} {row[name]:.1e}" for name, text in shown.items() if name in row)
    drift += f"  of {row['of']} {row['ratio']}" if "ratio" in row else ""
    other = f"  other {row['other']:.1%}  {row['kernels_us']}  {row['other_rows']}" if "other" in row else ""
    line = f"{row['model']:6} {row['size']} {row['mode']:22} {row['ms']:8.2f} ms  GiB {memory}"
    line += f"  prepared {row['prepare_s']:.0f} s"
    print(f"{line}{drift}{other}", flush=True)
    if row.get("kernels"):
        print(f"    {row['kernels']}", flush=True)
    for kind, candidates in row.get("chosen_by", {}).get("times", {}).items():
        times = "  ".join(f"{one['kernel']} {one['microseconds']:.1f} {one['verdict']}" for one in candidates)
        print(f"    {kind}: {times}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
