# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A policy change by another thread while the kernel of a call is looked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_calls import call  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.dispatch import context  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]

OURS = {"matmul": "cpu.reference", "layer_norm": "cpu.reference", "rms_norm": "cpu.reference"}
BACKWARD = [{"match": {"op": op, "phase": "backward", "module": "nowhere"}, "use": "cpu.reference"} for op in OURS]


def product():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    return lambda: torch.mm(a, b)


RUNS = {"mm": product, "layer_norm": lambda: call("layer_norm"), "rms_norm": lambda: call("rms_norm")}


def forget_routes():
    active = context.active_policy()
    for key in list(active.routes):
        active.keep(key, None)


@pytest.mark.parametrize(
    ("form", "route"),
    # Without the addon, norms have no fast kernel that could have kept what held before.
    [*(("mm", route) for route in ("addon", "stable", "python")), ("layer_norm", "addon"), ("rms_norm", "addon")],
    indirect=["route"],
)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.usefixtures("route")
def test_it_is_obeyed_by_the_next_call(form, at, monkeypatch):
    run = RUNS[form]()
    asked = []
    real = context.phase

    def phase():  # which is asked for on the way
        asked.append(1)
        if len(asked) == at:
            context.set_process_policy(ours)
        return real()

    monkeypatch.setattr(context, "phase", phase)
    with torch.no_grad(), xt.kernel_policy(**OURS):
        ours = context.active_policy()
        with xt.kernel_policy(rules=BACKWARD):
            while context.active_policy() is not ours:
                forget_routes()
                run()
            for _ in range(3):
                xrt.clear_decisions()
                run()
                assert [decision.kernel for decision in xrt.decisions()] == ["cpu.reference"]
