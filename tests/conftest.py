# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What every test relies on."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests marked slow, and files that take long")
    parser.addoption("--skip-logged", metavar="FILE", help="leave out passed tests of FILE that no engine can change")
    parser.addoption(
        "--timed", action="store_true", help="run the tests marked timed, on a quiet machine, and only those"
    )


#: Folders and files whose tests give the same result whichever engines are installed.
_WITHOUT_ENGINES = (
    *(f"tests/unit/{name}/" for name in ("evidence", "files", "fuzz", "ops", "policies", "serving", "tools")),
    *(f"tests/unit/cli/test_{name}.py" for name in ("process", "streams", "terminations", "tune_command")),
    "tests/unit/distributed/test_rendezvous.py",
    "tests/unit/interruption/test_process_life.py",
    "tests/unit/interruption/test_session_interruptions.py",
    "tests/unit/runtime/test_tensor_dlpack.py",
    "tests/unit/test_notebook.py",
    "tests/unit/engines/onnxruntime_engine/",
    "tests/unit/engines/quantization/test_quantize.py",
    "tests/unit/locks/test_planted_drift.py",
    "tests/unit/tuning/test_devices.py",
    "tests/unit/tuning/test_tune.py",
    "tests/conformance/test_operator_patterns.py",
    "tests/conformance/test_onnx_backend.py",
    "tests/docs/test_blocks.py",
    "tests/unit/test_imports.py::test_imports_go_one_way",
    "tests/unit/test_imports.py::test_the_tests_of_a_file_are_those_that_reach_it",
)


#: Files that take half a minute or more begin first, so that no process runs one of them alone at the end.
_LONG = (
    "tests/docs/test_blocks.py",
    "tests/conformance/test_onnx_backend.py",
    "tests/conformance/test_operator_patterns.py",
    "tests/conformance/test_op_kernels.py",
    "tests/unit/engines/onnxruntime_engine/test_rewriting_suite.py",
    "tests/docs/test_examples.py",
    "tests/docs/test_names.py",
    "tests/docs/test_torchrun.py",
    "tests/unit/pytorch/test_captured_decode.py",
    "tests/unit/pytorch/test_compiled_calls.py",
    "tests/unit/pytorch/test_rank_agreement.py",
    "tests/unit/pytorch/test_torch_compile.py",
    "tests/unit/test_typed_names.py",
    "tests/unit/tools/test_pytorch_test_suite.py",
    "tests/unit/tuning/test_killed.py",
    "tests/unit/tuning/test_tune.py",
)


#: Files that keep two processors busy for more than five seconds, or wait as long: `make quick` leaves them out.
_NOT_QUICK = (
    "tests/conformance/",
    "tests/docs/test_blocks.py",
    "tests/docs/test_examples.py",
    *(
        f"tests/unit/{room}/test_{name}.py"
        for room, names in {
            "cli": ("process", "terminations", "tune_command"),
            "engines": ("engine_plugins", "known_errors", "passes_apart"),
            "engines/onnxruntime_engine": (
                "arithmetic", "decision_reports", "rewriting_attention", "rewriting_evidence", "rewriting_products",
                "rewriting_suite",
            ),
            "engines/openvino_engine": ("openvino_artifacts", "openvino_evidence"),
            "engines/qnn_engine": (
                "qnn_accuracy", "qnn_artifact", "qnn_evidence", "qnn_known_errors", "qnn_session", "qnn_worker",
            ),
            "engines/quantization": ("int8_engines", "quantize"),
            "engines/tensorrt_engine": ("trt_artifacts", "trt_building"),
            "engines/torch_engine": ("pt2_trust", "torch_decisions", "torch_multi_head"),
            "files": ("writers",),
            "inference": ("buffer_sweep", "symbols"),
            "locks": ("diff", "file_metrics", "locked_figures", "planted_drift", "unchanged", "version_bisect"),
            "locks/export": ("native",),
            "pytorch": (
                "export_onnx", "export_program", "fast_products", "flex_attention", "fused_attention", "fused_norms",
                "module_paths", "odd_arguments", "opinfo_under_policy", "parity", "sdp_backend_scopes", "step_tuning",
            ),
            "tuning": ("killed", "tune"),
        }.items()
        for name in names
    ),
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
    left = [item for item in items if bool(item.get_closest_marker("timed")) != config.getoption("--timed")]
    if config.getoption("--quick"):
        left += [item for item in items if item.get_closest_marker("slow") or item.nodeid.startswith(_NOT_QUICK)]
    config.hook.pytest_deselected(items=left)
    left_ids = set(map(id, left))
    items[:] = [item for item in items if id(item) not in left_ids]
    if (log := config.getoption("--skip-logged")) and Path(log).exists():  # no test passed where there is none
        outcomes = [line.split(" ", 1) for line in Path(log).read_text().splitlines()]
        passed = {test for outcome, test in outcomes if outcome == "passed"}
        # A file that skips nothing where no engine is installed needs none.
        engines = {test.partition("::")[0] for outcome, test in outcomes if outcome != "passed"}

        def without(test: str) -> bool:
            return bool(
                test.startswith(_WITHOUT_ENGINES)
                or test.partition("::")[0] not in engines
                or re.search(r"[\[-]onnxruntime[]-]", test)  # a parameter
            )

        done = {item for item in items if item.nodeid in passed and without(item.nodeid)}
        config.hook.pytest_deselected(items=list(done))
        items[:] = [item for item in items if item not in done]


#: NumPy and PyTorch read these when they are loaded, which is while tests are collected. Processes of tests share the
#: cores, where threads that wait actively for others keep these from their work. What tests start has neither.
_WHILE_COLLECTING = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Nearly all that the modules of tests and frameworks hold stays to the end: no garbage collection goes through it.
    gc.disable()
    added = _WHILE_COLLECTING.keys() - os.environ.keys()
    os.environ.update({name: _WHILE_COLLECTING[name] for name in added})
    try:
        return (yield)
    finally:
        for name in added:
            del os.environ[name]
        gc.enable()
        gc.freeze()


class _OutcomeLog:
    """Log of the outcome of every test, written by the process that collects the reports."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            with self.path.open("a") as file:
                file.write(f"{report.outcome} {report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    # These tests tell what happens without a GPU, where a session takes the CPU by itself.
    if any({"unit", "conformance"}.intersection(Path(arg.partition("::")[0]).parts) for arg in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A shell that starts a job in the background has it ignore Ctrl-C, and every process below inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (log := os.environ.get("XPURUNTIME_LOG_TEST_OUTCOMES")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_OutcomeLog(log))
    if folder := os.environ.get("XPURUNTIME_PUBLIC_COVERAGE"):
        config.pluginmanager.register(_PublicCoverage(folder))


class _PublicCoverage:
    """Records in this process what a share of the quick tests runs of the package; see `tools/public_coverage.py`."""

    def __init__(self, folder: str) -> None:
        from public_coverage import recorded, recorder

        self._coverage, self._recorded = recorder(folder), recorded

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("slow") or item.nodeid.startswith(_NOT_QUICK) or not self._recorded(item.nodeid):
            return (yield)
        with self._coverage.collect():
            return (yield)

    def pytest_sessionfinish(self) -> None:  # xdist kills its processes soon after
        self._coverage.save()


#: What a core may be built without, and how to build it with that.
_BUILDS = {
    "cuda": "needs a core built with CUDA: put nvcc on the path and run `make install`",
    "cublas": "needs a core built with cuBLAS: with nvcc on the path, run `make cuda-headers install`",
    "cudnn": "needs a core built with cuDNN: with nvcc on the path, run `make cuda-headers install`",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    from xpuruntime import _core

    for mark in item.iter_markers("needs_module"):
        for name in mark.args:
            if find_spec(name) is None:
                pytest.skip(f"needs {name}: make engines installs the engines, pip PyTorch")
    for mark in item.iter_markers("needs_build"):
        for part in mark.args:
            if not _core.build_info()[part]:
                pytest.skip(_BUILDS[part])


@pytest.fixture
def own_tuning_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tuners in Python keep what they measure in a file of the test, which is returned."""
    from xpuruntime.ops import tuned_records

    path = tmp_path / "tuning.json"
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(path))
    monkeypatch.setattr(tuned_records, "_open_store", functools.cache(tuned_records._open_store.__wrapped__))
    return path


@pytest.fixture
def nothing_is_tuned(own_tuning_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PyTorch's kernels have not been measured against ours; returns where their times are kept."""
    from xpuruntime.pytorch.dispatch.context import CONTEXT

    monkeypatch.setattr(CONTEXT, "times", {})
    monkeypatch.setattr(CONTEXT, "lags", {})
    monkeypatch.setattr(CONTEXT, "route_costs", {})
    return own_tuning_cache
