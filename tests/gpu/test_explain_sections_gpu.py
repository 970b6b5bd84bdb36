# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports of sessions on a device: memory over time, CUDA graphs, and what stands in their way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda_onnxruntime

torch = pytest.importorskip("torch")

QUIET = pytest.mark.filterwarnings("ignore:.*cuda_graph:xpuruntime.XpuRuntimeWarning")


def policy(**execution: Any) -> dict[str, Any]:
    return {"execution": {"device": "cuda:0", "engine": "onnxruntime", "precision": "fp32", **execution}}


def test_a_graph_is_possible_and_then_captured(wide: Path) -> None:
    x = torch.randn(16, 512, device="cuda")
    with xrt.InferenceSession(wide, policy=policy(cuda_graph="require")) as session:
        before = session.explain({"x": x}, runs=1).cuda_graph
        binding = session.bind({"x": x})
        after = session.explain({"x": x}, runs=1).cuda_graph
        binding.run()
    assert before is not None
    assert (before.status, before.asked, before.blockers) == ("possible", "require", ())
    assert after is not None
    assert after.status == "captured"


def test_a_graph_that_nobody_asked_for_is_possible(wide: Path) -> None:
    with xrt.InferenceSession(wide, policy=policy()) as session:
        status = session.explain(runs=1).cuda_graph
    assert status is not None
    assert (status.status, status.asked) == ("possible", "off")


@QUIET
@pytest.mark.parametrize(("graph", "status"), [("off", "blocked"), ("prefer", "refused")])
def test_a_node_on_the_cpu_is_named(tmp_path: Path, graph: str, status: str) -> None:
    """The node that ONNX Runtime has no CUDA kernel for, and the copies around it."""
    path = models.save(models.island(), tmp_path)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    with xrt.InferenceSession(path, policy=policy(allow_cpu_ops=["Unique"], cuda_graph=graph)) as session:
        report = session.explain({"x": x}, runs=1)
    found = report.cuda_graph
    assert found is not None
    assert found.status == status, found
    assert ("unique", "Unique", "placement") in [(blocker.node, blocker.op, blocker.kind) for blocker in found.blockers]
    assert any(blocker.kind == "copy" for blocker in found.blockers)
    assert "unique" in str(report)


@QUIET
def test_what_waits_for_the_device_is_named() -> None:
    class Waits(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * float(x.sum())

    x = torch.ones(4, 4, device="cuda")
    asked = {"execution": {"cuda_graph": "prefer"}}
    with xrt.InferenceSession(Waits().eval(), example_inputs=(x,), policy=asked, device="cuda:0") as session:
        before = session.explain({"x": x}, runs=1).cuda_graph
        session.bind({"x": x})
        after = session.explain({"x": x}, runs=1).cuda_graph
    assert before is not None
    assert before.status == "blocked", before
    assert [blocker.kind for blocker in before.blockers] == ["sync"]
    assert after is not None
    assert after.status == "refused"
    assert after.blockers == before.blockers


def test_what_is_taken_of_the_device_is_sampled(wide: Path) -> None:
    owner = "cuda:0: used"
    with xrt.InferenceSession(wide, policy=policy()) as session:
        grown: list[int] = []
        while not grown or (grown[-1] <= 400 << 20 and len(grown) < 3):  # other processes may have given memory back
            torch.cuda.empty_cache()
            first = session.explain(runs=1).memory_over_time
            held = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
            second = session.explain(runs=1).memory_over_time
            assert held.nbytes == 512 << 20
            del held
            assert all(0 < one.owners[owner] <= torch.cuda.mem_get_info()[1] for one in (*first, *second))
            grown.append(second[0].owners[owner] - first[0].owners[owner])
    assert grown[-1] > 400 << 20, grown


def test_a_pool_of_ours_is_an_owner(wide: Path) -> None:
    with xrt.InferenceSession(wide, policy=policy(memory={"pool": "caching"})) as session:
        report = session.explain(runs=1)
    name = f"pool session {wide.name}: in use"
    assert all(one.owners[name] > 0 for one in report.memory_over_time)
    assert all(one.owners["session: engine"] > 0 for one in report.memory_over_time)
    assert report.live
