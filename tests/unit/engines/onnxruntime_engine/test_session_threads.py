# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Threads of ONNX Runtime beside `execution.threads`, their processors, and denormal numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt

pytest.importorskip("onnxruntime")

AFFINITIES = "session.intra_op_thread_affinities"
FEEDS = {"image": np.zeros((1, 1, 8, 8), np.float32)}


def policy(options: dict[str, Any], threads: int | None = None, **execution: Any) -> dict[str, Any]:
    stated = {"device": "cpu", "engine": "onnxruntime", "provider_options": {"onnxruntime": options}, **execution}
    return {"mode": "strict", "execution": stated if threads is None else {**stated, "threads": threads}}


def observed(session: xrt.InferenceSession, option: str) -> tuple[Any, str]:
    key = f"execution.provider_options.onnxruntime.{option}"
    return next(
        (observation.observed, observation.status)
        for observation in session.explain(FEEDS, runs=1).observations
        if observation.key == key
    )


def test_operators_side_by_side() -> None:
    with xrt.InferenceSession(xrt.demo_model_path(), policy=policy({"inter_op_num_threads": 2})) as session:
        assert observed(session, "inter_op_num_threads") == ("2", "honoured")
        held = session._open()._handle.get_session_options()  # type: ignore[attr-defined]
        assert (held.inter_op_num_threads, held.execution_mode.name) == (2, "ORT_PARALLEL")
        assert session.run(FEEDS)["logits"].shape == (1, 10)


def test_denormals_stay_as_they_are() -> None:
    """ONNX Runtime's entry outlives the session: the thread that opens it takes them for zero from then on."""
    stated = policy({"session.set_denormal_as_zero": True})
    with pytest.raises(xrt.UnsupportedOperationError, match="for good on the thread that opens the first session"):
        xrt.plan(xrt.demo_model_path(), policy=stated)
    code = (
        "import json, sys, numpy as np, xpuruntime as xrt\n"
        "with xrt.InferenceSession(xrt.demo_model_path(), policy=json.loads(sys.argv[1])) as session:\n"
        "    session.run({'image': np.zeros((1, 1, 8, 8), np.float32)})\n"
        "print((np.full(4, 1e-40, np.float32) + np.float32(0)).view(np.uint32).any())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps({**stated, "mode": "prefer"})],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "True"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say where a thread may run")
def test_affinities_reach_the_threads() -> None:
    first = min(os.sched_getaffinity(0)) + 1
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    with xrt.InferenceSession(xrt.demo_model_path(), policy=policy({AFFINITIES: f"{first};{first}"}, 3)) as session:
        session.run(FEEDS)
        assert observed(session, AFFINITIES) == (f"{first};{first}", "honoured")
        names = {path.name for path in Path("/proc/self/task").iterdir()} - before
        assert sum(os.sched_getaffinity(int(thread)) == {first - 1} for thread in names) >= 2


@pytest.mark.parametrize(
    ("text", "threads", "words"),
    [
        ("1;2", 2, r"2 entries.*execution\.threads is 2.*Fix: execution\.threads: 3"),
        ("1", None, r"is not stated.*Fix: execution\.threads: 2"),
        ("0", 2, "no list of processors"),
        ("1;", 3, "no list of processors"),
        ("one", 2, "no list of processors"),
        ("1-", 2, "no list of processors"),
    ],
)
def test_affinities_that_do_not_fit(text: str, threads: int | None, words: str) -> None:
    with pytest.raises(xrt.PolicyError, match=f"(?s){words}"):
        xrt.plan(xrt.demo_model_path(), policy=policy({AFFINITIES: text}, threads))


@pytest.mark.parametrize("text", ["9999", "1,9999", "2-1"])
def test_affinities_to_processors_that_are_not_there(text: str) -> None:
    with pytest.raises(xrt.EngineError, match=r"no processor that this process can use.*Fix: "):
        xrt.InferenceSession(xrt.demo_model_path(), policy=policy({AFFINITIES: text}, 2))


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [("intra_op_num_threads", 2, "execution.threads"), ("execution_mode", "parallel", "inter_op_num_threads")],
)
def test_names_of_session_options_that_have_another_place_say_which(name: str, value: object, place: str) -> None:
    with pytest.raises(xrt.PolicyError, match=f"'{name}' is set by {place}. Fix: state it there"):
        xrt.plan(xrt.demo_model_path(), policy=policy({name: value}, None))
