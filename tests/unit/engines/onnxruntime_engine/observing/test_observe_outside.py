# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What ONNX Runtime's profile has outside of nodes."""

from __future__ import annotations

import pytest
from observe_models import conv_net, feeds, maker

from xpuruntime.engines.onnxruntime.observing.kernels import outside
from xpuruntime.engines.onnxruntime.observing.profile import NodeSpan, read_profile


def span(start: float, end: float, thread: int = 1) -> NodeSpan:
    return NodeSpan("n", 0, "Add", start, end, thread, "CPUExecutionProvider")


def test_before_between_and_after() -> None:
    assert outside([(0, 100)], [span(5, 40), span(50, 90)]) == {"call": 15.0, "between": 10.0}


def test_nodes_at_the_same_time_count_once() -> None:
    nested = [span(10, 60), span(20, 30), span(40, 80, thread=2), span(85, 90)]
    assert outside([(0, 100)], nested) == {"call": 20.0, "between": 5.0}


def test_the_median_of_the_runs() -> None:
    runs = [(0, 100), (1000, 1100), (2000, 2900)]
    spans = [span(s + 2, s + 50) for s, _ in runs] + [span(s + 53, e - 1) for s, e in runs]
    assert outside(runs, spans) == {"call": 3.0, "between": 3.0}
    assert outside([*runs, (3000, 3100)], spans) == {"call": 3.0, "between": 3.0}, "a run without nodes says nothing"


def test_without_nodes() -> None:
    assert outside([(0, 100)], []) == {}
    assert outside([], []) == {}


def test_nodes_and_the_rest_are_each_run_of_a_real_profile(tmp_path) -> None:
    proto = conv_net()
    session = maker(proto)(str(tmp_path / "p"), None)
    for _ in range(5):
        session.run(None, feeds(proto))
    profile = read_profile(session.end_profiling())
    for window, run, nodes in zip(profile.windows, profile.run_us, profile.nodes_us, strict=True):
        inside = [one for one in profile.spans if window[0] <= one.start_us <= window[1]]
        assert nodes + sum(outside([window], inside).values()) == pytest.approx(run, abs=len(inside))
