# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of packages over the life of a process: forks, copies, interruptions, reloads, code that outlives them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch_kernels  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import InputError, UnsupportedOperationError  # noqa: E402
from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.pytorch.providers import process_state  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_policy_is_left", "own_tuning_cache")

HERE = Path(__file__).parent
STRICT = xrt.Policy(mode="strict", kernels={"rms_norm": "foreign.rms_norm"})


class Counting(torch_kernels.ForeignNorm):
    """The adapter of the package, which counts its calls and may be interrupted in one."""

    def __init__(self) -> None:
        self.calls = 0
        self.interrupts = False

    def forward(self, call, x, weight):
        self.calls += 1
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward(call, x, weight)


def register() -> Counting:
    kernel = Counting()
    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), kernel)
    return kernel


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(torch_kernels.install(tmp_path))
    yield tmp_path
    torch_kernels.forget()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def operands(columns: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, columns), torch.ones(columns)


def test_compiled_code_that_outlives_the_policy_runs_without_its_kernel(site):
    kernel, (x, weight) = register(), operands()
    torch._dynamo.reset()
    run = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with xt.kernel_policy(STRICT):
        run(x, weight)
    before = kernel.calls
    assert before
    torch.testing.assert_close(run(x, weight), norm(x, weight))
    assert kernel.calls == before
    with xt.kernel_policy(STRICT):
        run(x, weight)
    assert kernel.calls == before + 1


def test_a_kernel_that_is_gone_is_refused_and_one_that_is_back_serves(site):
    first, (x, weight) = register(), operands()
    with xt.kernel_policy(STRICT):
        expected = norm(x, weight)
    torch._dynamo.reset()
    run = torch.compile(norm, backend="aot_eager")
    with xt.kernel_policy(STRICT):
        run(x, weight)
    with xt.kernel_policy(STRICT):
        torch_kernels.forget()
        for call in (norm, run):
            with pytest.raises((UnsupportedOperationError, InputError), match=r"foreign\.rms_norm"):
                call(x, weight)
    with pytest.raises(UnsupportedOperationError, match=r"foreign\.rms_norm, and there is no such kernel"):
        xt.kernel_policy(STRICT).__enter__()
    before, second = first.calls, register()
    with xt.kernel_policy(STRICT):
        torch.testing.assert_close(norm(x, weight), expected)
        torch.testing.assert_close(run(x, weight), expected)
    assert (first.calls, second.calls >= 2) == (before, True)


def test_an_interruption_inside_a_kernel_leaves_nothing_behind(site):
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    kernel, (x, weight) = register(), operands()
    with xt.kernel_policy(STRICT):
        norm(x, weight)  # and it is compared
    kernel.interrupts = True
    with pytest.raises(KeyboardInterrupt), xt.kernel_policy(STRICT):
        norm(x, weight)
    assert installed() == ()
    kernel.interrupts = False
    with xt.kernel_policy(STRICT), xt.explain() as found:
        norm(x, weight)
    assert [(row.resolved, row.status) for row in found.rows if row.op] == [("foreign.rms_norm", "honoured")]


def test_an_interruption_while_it_is_compared_gives_no_verdict(site):
    kernel, (x, weight) = register(), operands()
    kernel.interrupts = True
    with pytest.raises(KeyboardInterrupt), xt.kernel_policy(STRICT):
        norm(x, weight)
    kernel.interrupts = False
    with xt.kernel_policy(STRICT):
        torch.testing.assert_close(norm(x, weight), F.rms_norm(x, (8,), weight, 1e-6))


def _in_child(queue, x, weight):
    with xt.explain() as found:
        norm(x, weight)
    queue.put([(row.resolved, row.status) for row in found.rows if row.op])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_follows_the_policy(site):
    register()
    x, weight = operands()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with xt.kernel_policy(STRICT):
        norm(x, weight)
        child = context.Process(target=_in_child, args=(queue, x, weight))
        child.start()
        assert queue.get(timeout=60) == [("foreign.rms_norm", "honoured")]
        child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.set_default_dtype(torch.float64)", "the default dtype"),
        ("torch.set_num_threads(torch.get_num_threads() + 1)", "the number of threads"),
        ("torch.manual_seed(7)", "the seed of the CPU's random numbers"),
        ("torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark", "torch.backends.cudnn"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms"),
        ("torch.set_grad_enabled(False)", "whether gradients are recorded"),
        ("torch.set_autocast_enabled('cpu', True)", "autocast"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "the precision of fp32 products"),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "the precision of fp32 products"),
        ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False", "how products are reduced"),
        ("torch.backends.cuda.enable_math_sdp(False)", "the kernels of attention"),
        ("import os; os.environ['FOREIGN_STATE'] = '1'", "FOREIGN_STATE"),
        ("import warnings; warnings.simplefilter('ignore', ImportWarning)", "the filters of warnings"),
    ],
)
def test_what_an_import_changes_in_the_process_is_restored_and_said(site, monkeypatch, line, what):
    monkeypatch.delenv("FOREIGN_STATE", raising=False)
    if "deterministic" in what:  # as well where nothing is compared before
        monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    package = site / "foreign_norms.py"
    package.write_text(package.read_text().replace("import torch\n", f"import torch\n\n{line}\n", 1))
    register()
    x, weight = operands()
    numbers = {name: read() for name, (read, _) in process_state._DECIDES.items()}
    random = torch.get_rng_state()
    with warnings.catch_warnings():
        with xt.kernel_policy(rms_norm="foreign.rms_norm"):
            norm(x, weight)
            with xt.explain() as report:
                norm(x, weight)
        assert {name: read() for name, (read, _) in process_state._DECIDES.items()} == numbers
        assert torch.equal(torch.get_rng_state(), random)
        said = {row.reason for row in report.rows if row.resolved == "foreign.rms_norm"}
        assert len(said) == 1
        assert f"its first use changed {what}" in said.pop()
        refused = what in process_state._DECIDES
        refusal = pytest.raises(UnsupportedOperationError, match=what) if refused else contextlib.nullcontext()
        with refusal, xt.kernel_policy(STRICT):
            norm(x, weight)
    os.environ.pop("FOREIGN_STATE", None)


def test_a_warning_of_a_package_is_no_error_of_its_kernel(site):
    package = site / "foreign_norms.py"
    line = "import warnings; warnings.warn('foreign_norms is old', DeprecationWarning, stacklevel=1)"
    package.write_text(package.read_text().replace("import torch\n", f"import torch\n\n{line}\n", 1))
    register()
    with warnings.catch_warnings(), xt.kernel_policy(STRICT), xt.explain() as report:
        warnings.simplefilter("error")
        norm(*operands())
        assert warnings.filters[0][0] == "error"
    assert [(row.resolved, row.status) for row in report.rows if row.op] == [("foreign.rms_norm", "honoured")]


@pytest.mark.parametrize("mode", ["strict", "prefer"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_write_into_an_input_after_the_comparison_is_no_result(site, part, mode):
    class Writing(torch_kernels.ForeignNorm):
        """An adapter that writes into its input of sizes that nobody compares."""

        def forward(self, call, x, weight):
            results = super().forward(call, x, weight)
            if part == "forward" and len(x) == 77:
                x[-1] += 1
            return results

        def backward(self, call, saved, grads):
            results = super().backward(call, saved, grads)
            if part == "backward" and len(grads[0]) == 77:
                grads[0][-1] += 1
            return results

    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), Writing())
    policy = xrt.Policy(mode=mode, kernels={"rms_norm": "foreign.rms_norm"})
    x, weight = torch.randn(77, 8, requires_grad=True), torch.ones(8)
    with xt.kernel_policy(policy), pytest.raises(xrt.XpuRuntimeError, match=f"its {part} wrote into a tensor"):
        norm(x * 1, weight).sum().backward()


@pytest.mark.parametrize(
    ("name", "value"), [("distributions", "foreign-norms"), ("distributions", ("a b",)), ("__hash__", None)]
)
def test_a_kernel_that_cannot_be_kept_is_refused_when_it_is_registered(name, value):
    kind = type("Wrong", (torch_kernels.ForeignNorm,), {name: value})
    with pytest.raises(InputError, match=r"foreign\.rms_norm cannot be registered"):
        plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), kind())


def test_a_kernel_that_turns_autograd_off_in_each_call_is_refused_for_that(site):
    class Leaking(torch_kernels.ForeignNorm):
        """An adapter that leaves autograd off."""

        def forward(self, call, x, weight):
            torch.set_grad_enabled(False)
            return super().forward(call, x, weight)

    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), Leaking())
    with xt.kernel_policy(STRICT), pytest.raises(UnsupportedOperationError, match="whether gradients are recorded"):
        norm(*operands())
    assert torch.is_grad_enabled()


def test_random_numbers_that_are_drawn_meanwhile_stay_drawn():
    kernel, drawn = torch_kernels.ForeignNorm(), []
    with process_state.watched(kernel):
        drawn.append(torch.rand(8))  # as dropout does
        other = threading.Thread(target=lambda: drawn.append(torch.rand(8)))
        other.start()
        other.join()
    drawn.append(torch.rand(8))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3
    assert process_state.changes_of(kernel) == process_state.Changes()


PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path[:0] = [{here!r}, {site!r}]
    import torch, torch_kernels, xpuruntime as xrt, xpuruntime.pytorch as xt
    from xpuruntime.ops import plugins

    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), torch_kernels.ForeignNorm())
    policy = xrt.Policy(mode="strict", kernels={{"rms_norm": "foreign.rms_norm"}})
    try:
        with xt.kernel_policy(policy):
            torch.nn.functional.rms_norm(torch.randn(4, 8), (8,), torch.ones(8), 1e-6)
        print("served")
    except xrt.UnsupportedOperationError as refused:
        print("refused:", refused)
    """
)


def start(site: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    text = PROGRAM.format(here=str(HERE), site=str(site))
    return subprocess.Popen(
        [sys.executable, *options, "-W", "ignore", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_wrong_kernel_is_found_without_assertions(site):
    torch_kernels.install(site, factor=3.0)
    out, error = start(site, "-O").communicate(timeout=120)
    assert out.startswith("refused: "), out + error


def test_processes_that_compare_a_kernel_at_once_both_serve(site, tmp_path):
    place = str(tmp_path / "both" / "tuning.json")
    runs = [start(site, XPURUNTIME_TUNING_CACHE=place) for _ in range(2)]
    assert [run.communicate(timeout=120)[0] for run in runs] == ["served\n"] * 2


def test_a_corrupt_cache_of_verdicts_is_no_obstacle(site, own_tuning_cache):
    own_tuning_cache.write_text('{"schema": "xpuruntime.tuning/1", "entries": []}')
    kernel = register()
    with xt.kernel_policy(STRICT):
        norm(*operands())
    assert kernel.calls
