# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of the page of benchmarks whose results come from a GPU run: made-up results, and what the page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
ENVIRONMENT = {
    "python": "3.12.1", "system": "Linux", "architecture": "x86_64", "processor": "Some Processor", "cores": 4,
    "cuda": [], "packages": {"torch": "2.11.0"},
}  # fmt: skip


def rate(rows: float, share: float) -> dict[str, float]:
    return {"rows_per_second": rows, "p50_ms": 2.0, "p99_ms": 8.0, "answers": 100, "share": share}


SERVED = {
    "settings": {
        "device": "cuda:0", "small": False, "graph": "require", "batch": 32, "delay": 2000, "instances": 2,
        "seconds": 4.0,
        "policy": {"cuda_graph": "require"},
    },
    "target": 0.9,
    "models": {
        "resnet": {
            "raw": {"run": {"1 rows, 1 threads": 500.0, "32 rows, 2 threads": 2000.0}, "graph": {"32": 2500.0},
                    "peaks": [1900.0, 2100.0], "peaks_within": {"1": [500.0], "64": [1950.0, 1850.0]}},
            "served": {"1": rate(400.0, 0.2), "64": rate(1900.0, 0.95)}, "http": {"64": rate(1500.0, 0.75)},
            "memory": "pinned", "met": True,
        },
        "encoder": {
            "raw": {"run": {"8 rows, 1 threads": 1000.0}, "graph": {},
                    "peaks": [1000.0], "peaks_within": {"64": [1000.0]}},
            "served": {"64": rate(500.0, 0.5)}, "http": {},
            "memory": "pinned", "met": False,
        },
    },
    "budget": {
        "sizes": {"resnet": {"bytes": 300 << 20}, "encoder": {"bytes": 100 << 20}},
        "both": {"limit": 1200 << 20, "evictions": 0, "seconds": [0.5, 0.1], "refused": ""},
        "one": {"limit": 350 << 20, "evictions": 0, "seconds": [], "refused": "it needs | more"},
    },
}  # fmt: skip


def candidate(name: str, code: str, seconds: float | None, ratio: list[float] | None, reason: str = "-") -> Any:
    return {"name": name, "code": code, "reason": reason, "seconds": seconds, "ratio": ratio, "memory": 3 << 30,
            "loss_difference": None if seconds is None else 1e-4}  # fmt: skip


def variant(ms: float) -> dict[str, Any]:
    return {"losses": [1.0], "peak": 2 << 30, "prepare_s": 30.0, "samples_ms": [ms], "loss_difference": 2e-3}


STEPS = {
    "ranks": 1, "rounds": 41, "calls": 5, "quick": False, "target": 0.95,
    "cases": {
        "gpt2-8x1024": {
            "variants": {"eager": variant(60.0), "tuned": variant(26.0)},
            "failures": {"compile": "RuntimeError: one | two\nthree"},
            "winner": "capture:compile", "verdict": "winner", "seconds": 90.0,
            "candidates": [
                candidate("eager", "control", 0.060, [1.0, 1.0, 1.0]),
                candidate("compile:reduce-overhead", "beaten", 0.028, [0.467, 0.46, 0.47]),
                candidate("capture", "failed", None, None, "it did not capture"),
            ],
            "ratios": {"eager": [0.433, 0.43, 0.44], "compile:reduce-overhead": [0.929, 0.92, 0.97]},
        }
    },
}  # fmt: skip


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("report")


def pages(report: Any, folder: Path, name: str, body: dict[str, Any]) -> str:
    record = {"schema": report.SCHEMA, "name": name, "environment": ENVIRONMENT, **body}
    (folder / f"{name}.json").write_text(json.dumps(record))
    return "".join(report.pages(report.load(folder)).values())


def test_served_models_are_held_against_the_raw_peak(report, tmp_path):
    page = pages(report, tmp_path, "serving_gpu", SERVED)
    assert "## Served models on cuda:0" in page
    assert "| raw `run`, 32 rows, 2 threads | 2,000 | - | - | 1 | - |" in page
    assert "| raw graph, 32 rows, no copies | 2,500 | - | - | 1.25 | - |" in page
    assert "| raw `run`, 1 rows at a time at most | 500 | - | - | 0.250 | 1 |" in page
    assert "| in this process, 64 at a time | 1,900 | 2.00 | 8.00 | 0.950 | 1.00 |" in page
    assert "| HTTP, 64 at a time | 1,500 | 2.00 | 8.00 | 0.750 | 0.789 |" in page
    assert "| 1.05 times | ≤ 1.11 times | met by 0.058 times |" in page
    assert "| 2.00 times | ≤ 1.11 times | **missed** by 0.889 times |" in page
    assert "| room for both | 1,200 | 0 | 0.500 | - |" in page
    assert "| room for one | 350 | 0 | - | it needs / more |" in page
    assert "few layers" not in page
    trial = {**SERVED, "settings": {**SERVED["settings"], "small": True}}
    page = pages(report, tmp_path, "serving_gpu", trial)
    assert "says no more than that it runs" in page
    assert "≤" not in page, "a trial of the script meets no target"


def test_tuned_steps_are_held_against_those_by_hand(report, tmp_path):
    page = pages(report, tmp_path, "step_tuning", STEPS)
    assert "## Tuned training steps\n" in page
    assert "| tuned (`capture:compile`, winner) | 26.000 | 26.000 | 26.000 | 2,048 | 2.0e-03 | 30 | - |" in page
    assert "| `eager` | 60.000 | 60.000 | 60.000 | 2,048 | 2.0e-03 | 30 | 0.433 [0.430, 0.440] |" in page
    assert "| `compile` | - | - | - | - | - | - | failed: RuntimeError: one / two |" in page
    assert "| 0.467 [0.460, 0.470] | 3,072 | 1.0e-04 | 0.929 [0.920, 0.970] | beaten |" in page
    assert "| `capture` | - | - | 3,072 | - | - | failed: it did not capture |" in page
    assert "| 0.929 times | ≤ 0.950 times | met by 0.021 times |" in page
    assert "tuned to the step by hand, eager | 0.433 times | ≤ 1.00 times | met" in page


def test_tuned_steps_of_two_gpus_have_a_section_of_their_own(report, tmp_path):
    page = pages(report, tmp_path, "step_tuning_2", {**STEPS, "ranks": 2, "quick": True})
    assert "## Tuned training steps on 2 GPUs\n" in page
    assert "bench_step_tuning.py --ranks 2`: **Models of two layers only" in page
    assert "≤" not in page


def test_a_model_on_several_devices(report: Any, tmp_path: Path) -> None:
    evidence = ["cuda:0: policy honoured", "cuda:1: policy honoured"]
    row = {"rows_per_second": 4000.0, "p50_ms": 8.0, "p99_ms": 20.0, "rows": [9000, 7000], "evidence": evidence}
    settings = {
        "devices": "cuda:0,cuda:1",
        "engine": "torch",
        "graph": "off",
        "batch": 32,
        "instances": 2,
        "seconds": 4.0,
    }
    record = {"settings": settings, "models": {"resnet, 2 devices, 64 at a time": row}}
    page = pages(report, tmp_path, "serving_devices", record)
    assert f"| resnet, 2 devices, 64 at a time | 4,000 | 8.00 | 20.0 | 9,000 7,000 | {'; '.join(evidence)} |" in page
