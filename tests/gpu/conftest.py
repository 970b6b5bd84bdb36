# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""GPU tests: skipped with a reason where there is no device, one process at a time; on the GPU lane a skip fails."""

from __future__ import annotations

import fcntl
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
_ALONE = "needs the device to itself, as `pytest tests/gpu -m alone` without -n gives it"
_NO_PROVIDER = "ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu"
_TORCH = importlib.util.find_spec("torch") is not None
#: These modules give streams work through PyTorch and cannot be imported without it.
collect_ignore_glob = [] if _TORCH else ["test_*_gpu.py"]


def pytest_configure(config: pytest.Config) -> None:
    if not _TORCH and config.getoption("--fail-on-skip"):
        msg = "the GPU tests need PyTorch: pip install torch"
        raise pytest.UsageError(msg)


def pytest_report_header() -> str | None:
    return None if _TORCH else "tests/gpu: not collected, because PyTorch is not installed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped GPU test is a failure")


def _reason() -> str | None:
    import xpuruntime as xrt

    if any(device.type == "cuda" for device in xrt.get_all_devices()):
        return None
    return "no CUDA device: " + str(xrt.DeviceManager.instance().cuda_reason())


def _has_cuda_provider() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in Path(item.path).parents]
    reason = _reason() if ours else None
    without_provider = bool(ours) and not _has_cuda_provider()
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif without_provider and item.get_closest_marker("cuda_onnxruntime"):
            item.add_marker(pytest.mark.skip(reason=_NO_PROVIDER))
        elif hasattr(config, "workerinput") and item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.skip(reason=_ALONE))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--fail-on-skip") and not _declared(report):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped on the GPU lane: {report.longrepr}"


def _declared(report: pytest.TestReport) -> bool:
    """Say whether the skip is excused: an engine declares the check unsupported, or the test needs two devices."""
    return any(words in str(report.longrepr) for words in ("declares", "needs two CUDA devices"))


@pytest.fixture(scope="session", autouse=True)
def one_process_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep other runs away; workers of pytest-xdist share the device, as whoever starts them asks for."""
    path = Path(tempfile.gettempdir()) / "xpuruntime-gpu-tests.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if hasattr(request.config, "workerinput") else fcntl.LOCK_EX)
        yield


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    from xpuruntime.testing import models

    return models.save(models.mlp(), tmp_path)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    from xpuruntime.testing import models

    return models.save(models.mlp(width=512), tmp_path)


@pytest.fixture
def operators_of_onnxruntime() -> None:
    from xpuruntime import _core

    _core.Dispatcher.instance().clear_decisions()
