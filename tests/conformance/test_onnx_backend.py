# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The test cases of the `onnx` package: what an engine computes, it computes in a session too."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "onnx_backend_suite.py"
#: A part of the 1,700 cases: `make test-patterns` runs all of them.
EVERY = 1 if os.environ.get("XPURUNTIME_ALL_PATTERNS") else 4


@pytest.fixture(scope="module")
def suite():
    spec = importlib.util.spec_from_file_location("onnx_backend_suite", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_nothing_is_lost(suite, engine: str) -> None:
    pytest.importorskip(engine)
    rows = suite.run_engine(engine, EVERY)
    assert len(rows) >= 1500 // EVERY
    assert sum(row["ours"] == "passed" for row in rows) >= 1000 // EVERY
    lost = [(row["name"], row["ours"], row["reason"]) for row in rows if suite.worse(row, engine)]
    assert not lost


def test_the_page_is_made_from_the_results(suite) -> None:
    assert suite.main(["--check"]) == 0


def test_a_case_that_is_lost_is_told(suite) -> None:
    row = {"name": "test_abs", "raw": "passed", "ours": "wrong", "reason": "not equal"}
    assert suite.worse(row, "mine")
    results = {"cases": 2, "onnx": "1", "engines": {"mine": {"version": "1", "left": [row]}}}
    assert "| mine (1) | 1 | 0 | 1 | 1 |" in suite.page(results)


def test_an_input_that_openvino_adds_and_nobody_gives_is_no_pass(suite) -> None:
    # It turns an empty sequence into an input of its own, and takes for it what happens to be in its memory.
    pytest.importorskip("openvino")
    from onnx.backend.test.loader import load_model_tests

    (case,) = (case for case in load_model_tests(kind="simple") if case.name == "test_sequence_model1")
    model, sets = suite.load(case)
    outcome = suite.outcome(partial(suite.directly, "openvino", model), sets, case, built_only=False)
    assert outcome == ("ValueError", "the case has no value for out")
