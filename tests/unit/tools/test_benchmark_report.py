# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of benchmarks says what the result files say, and is the same for the same files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "report.py"
ENVIRONMENT = {
    "python": "3.11.7",
    "system": "Linux",
    "architecture": "x86_64",
    "processor": "Some Processor",
    "cores": 4,
    "cuda": [
        {"device": "cuda:0", "name": "Some GPU", "memory": 16 << 30, "compute_capability": "9.0", "driver": "13.0"}
    ],
    "packages": {"xpuruntime": "0.1.0", "onnxruntime-gpu": "1.31.1"},
}
ROUNDS = [0.9, 0.95, 1.0, 1.05, 1.1]


def times(factor: float) -> list[float]:
    return [factor * value for value in ROUNDS]


def session(device: str, run: float, bound: float) -> dict:
    samples = {
        "onnxruntime run": times(10.0),
        "xpuruntime run": times(run),
        "onnxruntime run_with_iobinding": times(4.0),
        "xpuruntime bound": times(bound),
    }
    targets = {"run": 5.0, "bound": 1.0}
    return {"device": device, "calls": 7, "samples_us": samples, "targets_us": targets}


BODIES = {
    "session_cpu": session("cpu", run=12.0, bound=6.5),
    "session_cuda": session("cuda:0", run=12.0, bound=3.0),
    "cold_start": {
        "rounds": 3,
        "samples_ms": {"onnxruntime": times(100.0), "session": times(140.0), "xrt --help": times(150.0)},
        "median_ms": {"xrt --help": 150.0},
        "ratios": {"session": 1.4},
        "intervals": {"session": [1.3, 1.6]},
        "target_ratio": 1.5,
        "target_help_ms": 140.0,
        "note": "it was busy",
    },
    "page_cpu": {
        "nodes": 10_000,
        "units": 9_000,
        "bytes": 2_000_000,
        "load_average": 3.0,
        "rounds": 2,
        "longest_ms": {"load": [150.0, 190.0], "draw all": [40.0, 30.0]},
        "target_ms": 200.0,
    },
    "pool_cuda": {
        "device": "cuda:0",
        "calls": 7,
        "target_us": 0.8,
        "sizes": {
            "1024": {"samples_us": {"xpuruntime caching": times(0.1), "torch.empty": times(3.0)}},
            "1048576": {"samples_us": {"xpuruntime caching": times(0.9), "torch.empty": times(3.6)}},
        },
    },
    "rules_cpu": {
        "calls": 7,
        "samples_s": {"1 rules, 100 nodes": times(0.1), "5000 rules, 100 nodes": times(2.0)},
        "samples_us": {"no policy": times(2.0), "5000 rules": times(3.0)},
        "targets": {"plan_s": 1.0},
    },
    "resnet50_cuda": {
        "calls": 7,
        "policies": {"default": {}, "fp16": {"execution": {"precision": "fp16"}}},
        "batches": {
            "32": {
                "samples_us": {
                    "onnxruntime IO binding": times(4000.0),
                    "xpuruntime default run, NumPy": times(5000.0),
                    "xpuruntime fp16, bound": times(1600.0),
                },
                "relative_error": {"default": 3e-4, "fp16": 8e-4},
            }
        },
    },
    "soak_cpu": {
        "device": "cpu",
        "allowance": 8 << 20,
        "runs": {
            "times": 1000, "seconds": 2.0,
            "early": {"resident": 100 << 20}, "late": {"resident": 101 << 20}, "growth": {"resident": 1 << 20},
        },
        "sessions": {
            "times": 10, "seconds": 1.0,
            "early": {"resident": 100 << 20}, "late": {"resident": 120 << 20}, "growth": {"resident": 20 << 20},
        },
    },
}  # fmt: skip


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("benchmark_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(report, tmp_path: Path):
    """Return a function that writes results and gives the exit code of the script and its pages, the tables last."""
    folder, docs = tmp_path / "results", tmp_path / "docs"
    folder.mkdir()
    docs.mkdir()

    def make(*names: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        for name in names:
            record = {"schema": report.SCHEMA, "name": name, "environment": ENVIRONMENT, **BODIES[name]}
            (folder / f"{name}.json").write_text(json.dumps(record))
        code = report.main(["--results", str(folder), "--docs", str(docs), *arguments])
        tables = docs / "results" / "benchmarks"
        files = [docs / "benchmarks.md", *(tables / f"{name}.md" for name in report.GROUPS)]
        return code, "".join(path.read_text() for path in files if path.exists())

    make.folder, make.docs = folder, docs
    return make


def row(page: str, start: str) -> list[str]:
    found = {line for line in page.splitlines() if line.startswith(f"| {start} |")}
    assert len(found) == 1, found
    return [cell.strip() for cell in found.pop().strip("|").split("|")]


def test_the_longest_task_of_a_page_is_beside_its_target(made):
    page = made("page_cpu")[1]
    assert row(page, "draw all") == ["draw all", "30.0", "40.0"]
    assert row(page, "page: longest task")[-1] == "met by 10.0 ms"


def test_a_cold_start_is_beside_its_targets(made):
    page = made("cold_start")[1]
    assert row(page, "session")[-2:] == ["1.40", "1.30 to 1.60"]
    assert row(page, "cold start: session")[-1] == "met by 0.100 x"
    assert row(page, "cold start: xrt --help")[-1] == "**missed** by 10.0 ms"
    assert "Note: it was busy." in page


def test_no_results_are_said(made):
    code, page = made()
    assert code == 0
    assert "There are no results" in page
    assert "Targets" not in page


def test_figures_of_a_session(made):
    page = made("session_cpu")[1]
    assert row(page, "xpuruntime run") == ["xpuruntime run", "12.0", "11.0", "13.0", "1.20"]
    assert row(page, "xpuruntime run, over onnxruntime run")[1:] == ["2.00 µs", "≤ 5.00 µs", "met by 3.00 µs"]
    missed = row(page, "xpuruntime bound, over onnxruntime run_with_iobinding")
    assert missed[1:] == ["2.50 µs", "≤ 1.00 µs", "**missed** by 1.50 µs"]
    assert "## Targets: 1 of 2 met" in page
    assert "Some Processor" in page
    assert "5 rounds of 7 calls" in page
    assert "Not measured yet: `session_cuda`" in page


def test_the_host_waits_only_where_it_does(made):
    page = made("resnet50_cuda")[1]
    assert row(page, "xpuruntime fp16, bound")[1] == "once a round"
    assert row(page, "xpuruntime default run, NumPy")[1] == "each call"
    assert "Some GPU, 16 GiB" in page


def test_pools_are_held_against_ours(made):
    page = made("pool_cuda")[1]
    assert "| torch.empty | 3.60 | 3.31 | 3.89 | 4.00 |" in page
    assert "| torch.empty | 3.00 | 2.76 | 3.24 | 30.0 |" in page
    assert "**missed** by 0.100 µs" in page


def test_resnet_says_how_fast_and_how_exact(made):
    page = made("resnet50_cuda")[1]
    fast = row(page, "xpuruntime fp16, bound")
    assert fast == ["xpuruntime fp16, bound", "once a round", "1.600", "1.472", "1.728", "2.50", "8.0e-04"]
    assert row(page, "xpuruntime default run, NumPy")[1] == "each call"
    assert "Fastest of xpuruntime: `xpuruntime fp16, bound`, 2.50 times" in page
    assert '`fp16`: `{"execution": {"precision": "fp16"}}`' in page


def test_growth_is_held_against_the_allowance(made):
    page = made("soak_cpu")[1]
    assert "met by 7.00 MiB" in page
    assert "**missed** by 12.0 MiB" in page


def test_the_page_depends_on_the_files_alone(made, report):
    first = made(*BODIES)[1]
    written = {path.relative_to(made.docs).as_posix(): path.read_text() for path in made.docs.rglob("*.*")}
    assert report.pages(report.load(made.folder)) == written
    order = [
        first.index(f"## {title}") for title in ("Session overhead on cpu", "Memory pools", "Memory over", "ResNet")
    ]
    assert order == sorted(order)


def test_check_finds_a_stale_page(made, capsys):
    made("session_cpu")
    assert made(arguments=("--check",))[0] == 0
    code, page = made("soak_cpu", arguments=("--check",))
    assert code == 1
    assert "run python benchmarks/report.py" in capsys.readouterr().out
    assert "Memory over time" not in page, "--check must not write"


def test_a_chart_shows_the_medians(made):
    page = made("session_cpu", "resnet50_cuda")[1]
    assert "![A call of a session on cpu, µs](results/charts/session_cpu.svg)" in page
    drawn = ET.parse(made.docs / "results" / "charts" / "session_cpu.svg").getroot()
    texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[texts.index("xpuruntime run") + 1] == "12.0"
    lengths = [float(one.get("width")) for one in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert lengths[0] / lengths[1] == pytest.approx(10 / 12, rel=1e-3)
    targets = (made.docs / "results" / "charts" / "targets.svg").read_text()
    assert "1 of 2" in targets


def test_files_that_are_no_longer_made_are_found_and_removed(made):
    made("session_cpu", "resnet50_cuda")
    (made.folder / "resnet50_cuda.json").unlink()
    assert made(arguments=("--check",))[0] == 1
    assert made()[0] == 0
    assert not (made.docs / "results" / "charts" / "resnet50_cuda.svg").exists()


def test_every_result_has_a_page_of_tables(report):
    assert sorted(name for _, names in report.GROUPS.values() for name in names) == sorted(report.SECTIONS)


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


def test_times_of_units(made, monkeypatch):
    """A run that is not explained is a missed target; of small operators units alone need not be the run."""
    large = {"run_us": 2000.0, "units_us": 1900.0, "coverage": 0.95, "outside": {"call": 6.0}, "cut_us": 4.0}
    small = {
        "run_us": 60.0,
        "units_us": 30.0,
        "coverage": 0.5,
        "outside": {"call": 4.0, "between": 20.0},
        "cut_us": 3.0,
    }
    lost = {"run_us": 60.0, "units_us": 10.0, "coverage": 1 / 6, "outside": {}}
    openvino = {"own": 20.0, "called": 24.0}
    counted = {**openvino, "counted": 8.0, "nodes": 5, "mean": 22.0}
    ort = {"called": 14.0, "watched": 80.0, "model_run": 70.0, "kernel_time": 35.0, "nodes": 11}
    models = {
        name: {
            "openvino": {"without counters": openvino, "with counters": counted},
            "onnxruntime": ort,
            "reports": {"openvino": found},
        }
        for name, found in (("large", large), ("small", small), ("lost", lost))
    }
    chains = {"0": {"own": 7.0, "called": 9.5}, "1": {**counted, "own": 8.0}, "101": {**counted, "own": 58.0}}
    body = {"openvino": "2026.4", "runs": 200, "tries": 9, "target": 0.1, "models": models, "softmaxes": chains}
    monkeypatch.setitem(BODIES, "unit_times", body)
    text = made("unit_times")[1]
    assert "101 softmaxes of 16 numbers take 0.500 µs each" in text
    assert "takes OpenVINO 7.00 µs, and its Python layer 2.50 µs more" in text
    assert "| small | 14.0 | 70.0 | 35.0 | 11 | 50% |" in text
    assert "| openvino, lost | 60.0 | 10.0 | - | - | - | 17% |" in text
    assert "openvino, large, unexplained | 4.50 % |" in text
    assert "openvino, large, units alone against the run | 5.00 % |" in text
    assert "openvino, small, unexplained | 5.00 % | ≤ 10.0 % | met" in text
    assert "openvino, small, units alone" not in text
    assert "openvino, lost, unexplained | 83.3 % | ≤ 10.0 % | **missed**" in text


def test_verdicts_of_verify(made, monkeypatch):
    body = {
        "verifications": 200, "with_failure": 3, "failed": ["audit.no_cache: it was faster"],
        "sections": {"accuracy": {"pass": 200}, "speed": {"inconclusive": 180, "pass": 17, "fail": 3}},
        "planted": [
            {"planted": 0.0, "claims": 300, "verdicts": {"pass": 298, "fail": 2}, "rounds": 15.0, "ratio": 1.001},
            {"planted": 0.05, "claims": 300, "verdicts": {"inconclusive": 290, "fail": 10}, "rounds": 121.0,
             "ratio": 1.055},
            {"planted": 0.1, "claims": 300, "verdicts": {"fail": 288, "too noisy": 12}, "rounds": 11.0, "ratio": 1.11},
        ],
        "load": [0.5, 1.0, 6.0], "seconds": 3600.0, "targets": {"false failures": 0.01, "10 % not found": 0.01},
        "checks": {}, "verify_budget": 5.0, "wanted": {"verifies": 300, "trials": 300},
    }  # fmt: skip
    monkeypatch.setitem(BODIES, "verify_power", body)
    page = made("verify_power")[1]
    assert "| `speed` | 17 | 3 | 180 | 0 |" in page
    assert "| 10% | 300 | 0 | 288 | 0 | 12 | 11 | 1.110 |" in page
    assert "audit.no_cache: it was faster" in page
    assert "verifications of an unchanged model with a failure | 1.50 % | ≤ 1.00 % | **missed** by 0.500 %" in page
    assert "claims of speed on an unchanged session that failed | 0.667 % | ≤ 1.00 % | met" in page
    assert "10% slower and not found | 4.00 % | ≤ 1.00 % | **missed**" in page
    assert "Cut short: 300 verifications" in page
    monkeypatch.setitem(BODIES, "verify_power", {**body, "verifications": 300})
    assert "Cut short" not in made("verify_power")[1]
