# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Public functions with arguments of a wrong type: the error is ours, and names argument, expected and found."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from wrong_arguments import bare_errors

import xpuruntime as xrt
from xpuruntime import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = str(xrt.demo_model_path())
FEEDS = {"image": np.zeros((1, 1, 8, 8), np.float32)}


GIVEN = {"model": MODEL}
#: Each function, `None` for a method of the open session, with arguments that are right; one at a time is wrong.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "InferenceSession": (xrt.InferenceSession, GIVEN),
    "SessionSpec": (xrt.SessionSpec, GIVEN),
    "plan": (xrt.plan, GIVEN),
    "compile_model": (xrt.compile_model, {**GIVEN, "output": "made.xrt"}),
    "compare_engines": (xrt.compare_engines, {**GIVEN, "engines": ["null"], "search": False}),
    "compare_environments": (xrt.compare_environments, {"before": "no report", "after": "no report"}),
    "compare_reports": (xrt.compare_reports, {"before": "no report", "after": "no report"}),
    "determinism": (xrt.determinism, {**GIVEN, "grade": "run_to_run", "trials": 1, "device": "cpu"}),
    "lock": (xrt.lock, {**GIVEN, "policy": {"execution": {"device": "cpu"}}}),
    "verify": (xrt.verify, {**GIVEN, "policy": {"execution": {"device": "cpu"}}, "only": ["evidence"]}),
    "tune": (xrt.tune, {**GIVEN, "inputs": "none.npz"}),
    "export_lock": (xrt.export_lock, {"lock": "none.lock", "target": "ort-python", "output": "out"}),
    "export_targets": (xrt.export_targets, {}),
    "load_lock": (xrt.load_lock, {}),
    "use_policy": (xrt.use_policy, {}),
    "watch_tuning": (xrt.watch_tuning, {}),
    "Policy": (xrt.Policy, {}),
    "Policy.load": (xrt.Policy.load, {}),
    "KernelPolicy": (xrt.KernelPolicy, {}),
    "ExecutionPolicy": (xrt.ExecutionPolicy, {}),
    "MemoryPolicy": (xrt.MemoryPolicy, {}),
    "AccuracyPolicy": (xrt.AccuracyPolicy, {}),
    "Plan.from_json": (xrt.Plan.from_json, {}),
    "Report.load": (xrt.Report.load, {}),
    "get_device_count": (xrt.get_device_count, {}),
    "synchronize": (xrt.synchronize, {}),
    "session.run": (None, {}),
    "session.run_async": (None, {"inputs": FEEDS}),
    "session.bind": (None, {}),
    "session.explain": (None, {"inputs": FEEDS, "runs": 1}),
    "session.intermediates": (None, {"inputs": FEEDS, "names": ["image"]}),
    "session.save_compiled": (None, {"folder": "made.xrt"}),
    "serving.Server": (serving.Server, {"models": {}, "http": "127.0.0.1:0"}),
    "serving.Models": (serving.Models, {}),
    "serving.asgi_app": (serving.asgi_app, {}),
    "serving.ServeSettings": (serving.ServeSettings, {}),
}


@pytest.fixture(scope="module")
def session() -> Iterator[xrt.InferenceSession]:
    with xrt.InferenceSession(MODEL, device="cpu", engine="onnxruntime") as opened:
        yield opened


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_types_are_named(
    name: str, session: xrt.InferenceSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, right = FUNCTIONS[name]
    if function is None:
        function = getattr(session, name.partition(".")[2])
    elif name in ("serving.Server", "serving.asgi_app"):
        models = {"digits": session}
        right = {**right, "models": models} if name == "serving.Server" else {"service": serving.Models(None, models)}
    monkeypatch.chdir(tmp_path)

    def finish(made: Any) -> None:
        if isinstance(made, xrt.InferenceSession):
            made.close()
        shutil.rmtree(tmp_path / "made.xrt", ignore_errors=True)

    assert not (bare := bare_errors(function, right, finish=finish)), "\n".join(bare)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: xrt.plan(MODEL, registry=3), "registry is an EngineRegistry, .*, got 3 of type int"),  # type: ignore[arg-type]
        (lambda: xrt.plan(MODEL, machine="here"), "machine is a Machine, .*, got 'here' of type str"),  # type: ignore[arg-type]
        (lambda: xrt.compare_engines(MODEL, runs="3"), "runs is a whole number, got '3' of type str"),  # type: ignore[arg-type]
        (
            lambda: xrt.verify(MODEL, inputs=[1]),
            "inputs is a mapping of input name to array, got an object",
        ),  # type: ignore[arg-type]
        (lambda: serving.Server({}, tls=("a.pem", "b.pem")), "tls is a Tls, .*, got an object of type tuple"),  # type: ignore[arg-type]
        (lambda: serving.Server({}, pages={"/a": 1}), "pages is a mapping of path to function, got an object"),  # type: ignore[dict-item]
        (lambda: serving.asgi_app(serving.Models(), {}), "options is a TransportOptions, .*, got an object"),  # type: ignore[arg-type]
        (lambda: xrt.plan(MODEL, lock=3), "lock is a path, str or os.PathLike"),  # type: ignore[arg-type]
        (lambda: serving.Server(object), "models is a mapping of name to InferenceSession, .*, got the class object"),  # type: ignore[arg-type]
    ],
)
def test_argument_expected_and_found_are_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


def test_numbers_of_numpy_are_numbers(session: xrt.InferenceSession) -> None:
    assert session.explain(FEEDS, runs=np.int64(1)).units  # type: ignore[arg-type]
