# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``set_allocator(scope="process")`` on a CUDA device, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError


def test_the_process_cannot_be_set_too_late() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(UnsupportedOperationError, match=r"has begun to use CUDA with its own allocator \(native\)"):
        xt.set_allocator(scope="process")


def run_alone(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_allocator_of_the_process() -> None:
    out = run_alone(
        """
        import gc, time
        import torch
        import xpuruntime.pytorch as xt

        MIB = 1 << 20
        active = xt.set_allocator(scope="process", limit=1 << 30)
        assert not torch.cuda.is_initialized()
        tensor = torch.full((4 * MIB,), 2.0, device="cuda")
        stats = xt.allocator_stats()
        assert stats.scope == "process", stats
        assert stats.uses[0].current >= 16 * MIB, stats
        assert float(tensor.sum()) == 8.0 * MIB

        weight = torch.ones(MIB, device="cuda", requires_grad=True)
        (weight * weight).sum().backward()
        assert float(weight.grad.max()) == 2.0
        a = torch.randn(256, 256, device="cuda")
        torch.testing.assert_close((a @ a).cpu(), a.cpu() @ a.cpu(), rtol=1e-3, atol=1e-3)

        # Another stream still reads what is freed.
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            copy = tensor.clone()
        tensor.record_stream(side)
        del tensor
        for value in range(5):
            torch.full((4 * MIB,), 10.0 + value, device="cuda")
        side.synchronize()
        assert float(copy.min()) == float(copy.max()) == 2.0
        del copy

        # The limit.
        try:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            assert "limit 1.00 GiB" in str(error), error
        else:
            raise AssertionError("the limit does not hold")
        assert xt.allocator_stats().failures == 1
        assert "limit 1.00 GiB" in xt.allocator_stats().uses[0].last_failure
        assert torch.ones(8, device="cuda").sum() == 8

        # A graph holds what it captured.
        static = torch.ones(2 * MIB, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = (static * 2 + 1) * 3
        held = xt.allocator_stats().uses[0].in_graphs
        assert held >= 8 * MIB, held
        others = [torch.full((2 * MIB,), 9.0, device="cuda") for _ in range(8)]
        static.fill_(3.0)
        graph.replay()
        assert float(out.min()) == float(out.max()) == 21.0
        assert all(float(one.max()) == 9.0 for one in others)
        del graph, out, others
        gc.collect()
        torch.cuda.synchronize()
        for _ in range(100):
            if xt.allocator_stats().uses[0].in_graphs == 0:
                break
            time.sleep(0.1)
        assert xt.allocator_stats().uses[0].in_graphs == 0

        before = active.pools[0].stats().reserved
        torch.cuda.empty_cache()
        assert active.pools[0].stats().reserved < before

        for call in (xt.reset_allocator, xt.set_allocator, lambda: xt.set_allocator(scope="process")):
            try:
                call()
            except xt_error as error:
                print(type(error).__name__)
        print("report", "pluggable" not in str(xt.memory_report()) and "torch@cuda:0" in str(xt.memory_report()))
    """.replace("xt_error", "Exception")
    )
    assert out.split() == ["UnsupportedOperationError"] * 3 + ["report", "True"]


def test_a_process_may_end_inside_of_a_scope() -> None:
    out = run_alone("""
        import torch, xpuruntime.pytorch as xt
        xt.set_allocator(limit=1 << 30)
        kept = torch.ones(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kept + 1
        graph.replay()
        print("ends", float(out.sum()))
    """)
    assert out.split() == ["ends", "16.0"]
