# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The pages of benchmarks: the committed ones are those of the committed results, and what no result shows yet."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("report")


def committed(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def made(report, tmp_path: Path):
    """Return a function that writes committed results and gives the exit code of the script and its main page."""
    folder, docs = tmp_path / "results", tmp_path / "docs"
    folder.mkdir()
    docs.mkdir()

    def make(*names: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        for name in names:
            (folder / f"{name}.json").write_text(json.dumps(committed(name)))
        code = report.main(["--results", str(folder), "--docs", str(docs), *arguments])
        page = docs / "benchmarks.md"
        return code, page.read_text() if page.exists() else ""

    make.folder, make.docs = folder, docs
    return make


def test_the_committed_pages_are_those_of_the_committed_results(report):
    """They have each section, table, chart, target that is met and target that is missed."""
    for name, text in report.pages(report.load(FOLDER / "results")).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, name


def test_no_results_are_said(made):
    code, page = made()
    assert code == 0
    assert "There are no results" in page
    assert "Targets" not in page


def test_check_finds_a_stale_page(made, capsys):
    made("session_cpu")
    assert made(arguments=("--check",))[0] == 0
    code, page = made("soak_cpu", arguments=("--check",))
    assert code == 1
    assert "run python benchmarks/report.py" in capsys.readouterr().out
    assert "Memory over time" not in page, "--check must not write"


def test_every_result_has_a_section_and_a_page_of_tables(report):
    assert sorted(name for _, names in report.GROUPS.values() for name in names) == sorted(report.SECTIONS)
    sources = [path.read_text(encoding="utf-8") for path in FOLDER.glob("bench_*.py")]
    for name in report.PYTORCH_SECTIONS:
        kinds = name.replace("_cpu", "_{kind}").replace("_cuda", "_{kind}")
        assert any(f'"{name}"' in source or f'"{kinds}"' in source for source in sources), name


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"schema": "xpuruntime.benchmark/1", "name": "surprise"}, "no section for 'surprise'"),
        ({"schema": "xpuruntime.benchmark/2", "name": "session_cpu"}, "not a result of the schema"),
        ([], "not a result of the schema"),
    ],
)
def test_a_file_that_would_be_left_out_is_an_error(made, capsys, record, problem):
    (made.folder / "odd.json").write_text(json.dumps(record))
    assert made()[0] == 1
    assert problem in capsys.readouterr().out


def test_variants_that_failed_are_shown_and_meet_no_target(report):
    error = {"error": "E: one | two\nthree"}
    figures = ("ms", "samples_ms", "to_anchor", "step_us")
    for name in ("training_step", "model_steps", "many_gpus"):
        record = committed(name)
        whole = report.SECTIONS[name](record)
        for case in record["cases"]:
            if case.get("variant", case.get("mode", "")).startswith(("capture", "auto", "eager auto")):
                case.update(error)
                for key in figures:
                    case.pop(key, None)
        section = report.SECTIONS[name](record)
        assert "failed: E: one / two |" in section.text, name
        assert len(section.checks) < len(whole.checks), name
    wrong = committed("training_step")
    for case in wrong["cases"]:
        case.update(error)  # it was timed, and its losses are not those of the others
    assert report.SECTIONS["training_step"](wrong).checks == ()


def test_a_trial_of_a_script_meets_no_target(report):
    for name, words in (
        ("training_step", "two layers only"), ("step_tuning", "two layers only"), ("serving_gpu", "a few layers"),
    ):  # fmt: skip
        record = committed(name)
        assert words not in report.SECTIONS[name](record).text
        (record["settings"] if name == "serving_gpu" else record)["small" if name == "serving_gpu" else "quick"] = True
        section = report.SECTIONS[name](record)
        assert words in section.text
        assert name == "training_step" or section.checks == ()


def test_verifications_that_fail_and_measurements_that_were_cut_short(report):
    record = committed("verify_power")
    assert "Cut short" not in report.SECTIONS["verify_power"](record).text
    record.update(verifications=200, with_failure=3, failed=["audit.no_cache: it was faster"])
    record["planted"][-1]["verdicts"] = {"fail": 288, "too noisy": 12}
    section = report.SECTIONS["verify_power"](record)
    assert "audit.no_cache: it was faster" in section.text
    assert "| 1.50 % | ≤ 1.00 % | **missed** by 0.500 %" in section.text
    assert "| 4.00 % | ≤ 1.00 % | **missed**" in section.text
    assert "Cut short: 300 verifications" in section.text


def test_ranks_are_compared_with_one_and_with_compiled_code(report):
    pytest.importorskip("torch")
    bench: Any = importlib.import_module("bench_many_gpus")
    figures = {"loss_difference": 0.0, "collectives_share": [0.25, 0.2], "same_kernels": True, "peak_bytes": [2**30]}

    def part(ranks: int, **milliseconds: float) -> dict[str, Any]:
        variants = {
            name: {**figures, "samples_ms": [ms] * 9, "tokens_per_second": ranks * 1e6 / ms}
            for name, ms in milliseconds.items()
        }
        return {"ranks": ranks, "choices": {"fsdp2": {}}, "wraps": {"fsdp2": variants}}

    parts = [part(1, eager=20.0, compile=10.0, captured=5.0), part(2, eager=25.0, compile=12.5, captured=10.0)]
    cases = {(case["ranks"], case["variant"]): case for case in bench.merged(parts)}
    assert cases[2, "eager"]["efficiency"] == pytest.approx(0.8)
    assert cases[2, "eager"]["faster_than_compile"] == pytest.approx([0.5] * 3)
    assert cases[2, "captured"]["efficiency"] == pytest.approx(0.5)
    assert cases[2, "captured"]["faster_than_compile"] == pytest.approx([1.25] * 3)
