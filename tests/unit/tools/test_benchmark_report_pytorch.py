# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of the page of benchmarks on PyTorch: made-up results, and what the page says of them."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
ENVIRONMENT = {
    "python": "3.12.1", "system": "Linux", "architecture": "x86_64", "processor": "Some Processor", "cores": 4,
    "cuda": [], "packages": {"torch": "2.11.0"},
}  # fmt: skip


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("report_pytorch")


def case(variant: str, phase: str, ms: float, anchor: float, **more: Any) -> dict[str, Any]:
    figures = {"ms": ms, "p10": ms * 0.9, "p90": ms * 1.1, "to_anchor": ms / anchor, "loss_drift": 1e-4}
    return {"shape": "gpt2-1x1024", "phase": phase, "variant": variant, **figures, **more}


def steps(*cases: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    return {
        "environment": ENVIRONMENT, "note": "On two GPUs.", "cases": list(cases),
        "policies": {"tuned": {"kernels": {"matmul": "auto"}}},
        "targets": {"capture_graph to by hand": 1.02, "tuned to by hand": 1.01}, "quick": quick,
        "dtype": "bfloat16", "optimizer": "AdamW", "rounds": 20, "pair_rounds": 30, "calls": 2,
    }  # fmt: skip


PLAIN = (
    case("by hand", "plain", 8.0, 8.0),
    case("compile", "plain", 24.0, 8.0),
    case("capture_graph", "plain", 8.08, 8.0),
)


def row(text: str, start: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    assert len(lines) == 1, lines
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def test_the_cost_of_a_step_is_the_median_of_the_rounds(report):
    record = {
        "environment": ENVIRONMENT, "device": "cuda:0", "targets": {"mm": 1.0}, "step_target": 0.01,
        "samples_us": {"mm": {"native": [1.0], "no rule matches": [1.5], "cleared": [1.0]}},
        "step_samples_ms": {
            "bert-1x128": {"native": [10.0, 20.0, 30.0], "products": [10.1, 20.4, 30.9], "cleared": [10.0, 20.0, 30.0]}
        },
    }  # fmt: skip
    section = report.override_overhead(record)
    assert row(section.text, "products") == ["products", "2.00", "1.00", "3.00"]
    assert "| cleared | 0.000 | 0.000 | 0.000 |" in section.text
    assert [check.verdict for check in section.checks] == ["met by 0.500 µs", "**missed** by 1.00 %"]


def test_a_cost_is_told_from_noise_by_its_interval(report):
    draw = random.Random(1)
    native = [10 + draw.gauss(0, 0.3) for _ in range(200)]
    same, dearer = ([time * (1 + part) * (1 + draw.gauss(0, 0.02)) for time in native] for part in (0, 0.02))
    found = report.paired_ratio(same, native, confidence=0.95)
    assert found.low < 1 < found.high
    assert (found.high - found.low) / 2 < 0.01
    found = report.paired_ratio(dearer, native, confidence=0.95)
    assert 1.01 < found.low < 1.02 < found.high < 1.03


def test_kernels_are_told_by_kind(report):
    cases = [
        {"shape": "gpt2-8x1024", "variant": "eager", "ms": {"products": 3.0, "norms": 1.0}, "kernels": 40.0},
        {"shape": "gpt2-8x1024", "variant": "compile", "ms": {"products": 2.0}, "kernels": 12.0},
    ]
    text = report.training_kernels({"environment": ENVIRONMENT, "steps": 3, "cases": cases}).text
    assert row(text, "products") == ["products", "3.00", "2.00"]
    assert row(text, "norms") == ["norms", "1.00", "0.00"]
    assert row(text, "all") == ["all", "4.00", "2.00"]
    assert row(text, "kernels") == ["kernels", "40", "12"]


def test_every_result_of_the_scripts_has_a_section(report):
    sources = [path.read_text(encoding="utf-8") for path in FOLDER.glob("bench_*.py")]
    for name in report.PYTORCH_SECTIONS:
        kinds = name.replace("_cpu", "_{kind}").replace("_cuda", "_{kind}")
        assert any(f'"{name}"' in source or f'"{kinds}"' in source for source in sources), name


def test_the_cost_of_a_policy_is_what_is_over_the_native_call(report):
    record = {
        "environment": ENVIRONMENT, "device": "cpu", "targets": {"mm": 1.0, "addmm": 2.0},
        "samples_us": {
            "mm": {"native": [1.5, 1.0, 2.0], "no rule matches": [2.6, 2.2], "cleared": [1.01]},
            "addmm": {"native": [2.0], "no rule matches": [3.5], "cleared": [2.0]},
        },
    }  # fmt: skip
    section = report.override_overhead(record)
    assert row(section.text, "native") == ["native", "1.00", "2.00"]
    assert row(section.text, "no rule matches") == ["no rule matches", "1.20", "1.50"]
    assert [(check.what, check.verdict) for check in section.checks] == [
        ("mm: no rule matches", "**missed** by 0.200 µs"),
        ("addmm: no rule matches", "met by 0.500 µs"),
    ]


def test_steps_are_held_to_the_capture_by_hand(report):
    section = report.training_step(steps(*PLAIN))
    assert row(section.text, "by hand (plain)")[1:4] == ["8.000", "7.200", "8.800"]
    assert row(section.text, "capture_graph")[4] == "1.010"
    assert [check.verdict for check in section.checks] == ["met by 0.010 times"]
    assert "two layers" not in section.text
    assert "two layers" in report.training_step(steps(*PLAIN, quick=True)).text


def test_a_tuned_policy_is_held_to_eager_round_by_round(report):
    native, tuned = [20.0, 24.0, 30.0], [22.0, 26.4, 48.0]
    eager = (
        case("by hand", "eager", 8.0, 8.0),
        case("eager", "eager", 24.0, 8.0, samples_ms=[20.0, 20.0], pair_samples_ms=native),
        case("eager, xpuruntime norms", "eager", 24.0, 8.0, samples_ms=[10.0, 10.0]),
        case("eager, tuned", "eager", 26.4, 8.0, samples_ms=[20.0, 20.0], pair_samples_ms=tuned),
    )
    section = report.training_step(steps(*PLAIN, *eager))
    assert "| to eager | median | from | to | rounds |" in section.text
    assert "| eager, xpuruntime norms | 0.500 | 0.500 | 0.500 | 2 |" in section.text
    assert "| eager, tuned | 1.100 | 1.100 | 1.600 | 3 |" in section.text
    check = section.checks[-1]
    assert (check.what, check.figure) == ("gpt2-1x1024: eager, tuned, to eager", pytest.approx(1.1))
    assert check.verdict.startswith("**missed**")


def test_where_torch_compile_is_faster_is_said_with_the_reason(report):
    slower = report.training_step(steps(*PLAIN, case("compile", "plain", 9.0, 8.0)))
    assert "No variant of `torch.compile` is faster than `capture_graph`" in slower.text
    faster = report.training_step(steps(*PLAIN, case("compile, reduce-overhead", "plain", 4.04, 8.0)))
    assert "`compile, reduce-overhead` 50.0 %" in faster.text
    assert "fuses none" in faster.text


def test_a_variant_that_failed_is_shown_and_met_no_target(report):
    failed = {"shape": "gpt2-1x1024", "phase": "plain", "variant": "capture_graph", "error": "E: one | two\nthree"}
    section = report.training_step(steps(*PLAIN[:2], failed))
    assert row(section.text, "capture_graph")[-1] == "failed: E: one / two"
    assert section.checks == ()
    wrong = report.training_step(steps(*PLAIN[:2], {**PLAIN[2], "error": "losses are not those"}))
    assert wrong.checks == ()


def test_collectives_are_shown_by_size(report):
    host_us = {"torch": [5.0], "xpuruntime": [4.0]}
    record = {
        "environment": ENVIRONMENT, "ranks": 2, "dtype": "bfloat16", "nccl": "2.27.7", "device": "Some GPU",
        "nvls": "0", "in_a_graph": 20,
        "cases": [
            {"bytes": 1024, "samples_us": {"torch": [10.0], "xpuruntime": [9.0]}, "host_us": host_us},
            {"bytes": 1 << 20, "samples_us": {"torch": [20.0], "xpuruntime": [10.0]}, "host_us": host_us},
        ],
    }  # fmt: skip
    text = report.collectives(record).text
    assert row(text, "1 MiB") == ["1 MiB", "20.0", "10.0", "105"]
    assert row(text, "xpuruntime") == ["xpuruntime", "4.00"]


def test_many_gpus_are_compared_with_one_and_with_compiled_code(report):
    pytest.importorskip("torch")
    bench: Any = importlib.import_module("bench_many_gpus")
    figures = {"loss_difference": 0.0, "collectives_share": [0.25, 0.2], "same_kernels": True, "peak_bytes": [2**30]}

    def part(ranks: int, **milliseconds: float) -> dict[str, Any]:
        variants = {
            name: {**figures, "samples_ms": [ms] * 9, "tokens_per_second": ranks * 1e6 / ms}
            for name, ms in milliseconds.items()
        }
        return {"ranks": ranks, "choices": {"fsdp2": {"all_gather: ring, ll": 8}}, "wraps": {"fsdp2": variants}}

    parts = [part(1, eager=20.0, compile=10.0, captured=5.0), part(2, eager=25.0, compile=12.5, captured=10.0)]
    parts[1]["wraps"]["fsdp2"]["captured+auto"] = {"error": "rank 1: OutOfMemoryError"}
    record = {
        "environment": ENVIRONMENT, "size": "small", "rounds": 9, "calls": 5, "device": "Some GPU", "nccl": "2.27.7",
        "nvls": "0", "targets": {"captured FSDP2 to compiled": 1.15}, "cases": bench.merged(parts),
    }  # fmt: skip
    section = report.many_gpus(record)
    rows = [line for line in section.text.splitlines() if line.startswith("| 2 fsdp2 |")]
    assert rows[0] == "| 2 fsdp2 | `eager` | 25.000 | 80,000 | 0.800 | 0.500 [0.500, 0.500] | 1,024 | 25.0 | yes |"
    assert rows[2].split(" | ")[4:6] == ["0.500", "1.250 [1.250, 1.250]"]
    assert "failed: rank 1: OutOfMemoryError" in rows[3]
    assert "* 2 ranks, fsdp2: all_gather: ring, ll (8)" in section.text
    assert [check.verdict.split()[0] for check in section.checks] == ["**missed**", "met"]
