# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is live around each unit: by hand, and against an allocator that keeps books tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest

from xpuruntime.evidence.memory_over_time import (
    LiveBytes,
    MemorySample,
    UnitMemory,
    live_bytes,
    most_by_owner,
    most_live,
)


def figures(found):
    return [(one.unit, one.during, one.after) for one in found]


def test_a_chain_with_a_branch_that_waits():
    steps = [
        UnitMemory(unit="a", reads=("x", "w"), makes={"t": 100}),
        UnitMemory(unit="b", reads=("t",), makes={"u": 10}),
        UnitMemory(unit="c", reads=("u",), makes={"v": 1}),
        UnitMemory(unit="d", reads=("v", "t"), makes={"y": 5}),
    ]
    assert figures(live_bytes(steps, ["y"])) == [("a", 100, 100), ("b", 110, 110), ("c", 111, 101), ("d", 106, 5)]


def test_an_output_stays_and_what_nobody_reads_goes():
    steps = [
        UnitMemory(unit="a", reads=(), makes={"y": 8, "unused": 3}),
        UnitMemory(unit="b", reads=("x",), makes={"z": 2}),
    ]
    assert figures(live_bytes(steps, ["y", "z"])) == [("a", 11, 8), ("b", 10, 10)]


def test_a_view_keeps_its_base_and_costs_nothing():
    steps = [
        UnitMemory(unit="a", reads=("x",), makes={"t": 64}),
        UnitMemory(unit="view", reads=("t",), views={"v": "t"}),
        UnitMemory(unit="again", reads=("v",), views={"w": "v"}),
        UnitMemory(unit="b", reads=("x",), makes={"u": 1}),
        UnitMemory(unit="c", reads=("w", "u"), makes={"y": 2}),
    ]
    assert [one.after for one in live_bytes(steps, ["y"])] == [64, 64, 64, 65, 2]
    assert live_bytes(steps, ["w"])[-1].after == 64


def test_views_of_weights_count_for_nothing():
    steps = [
        UnitMemory(unit="t", reads=("w",), views={"wt": "w"}),
        UnitMemory(unit="m", reads=("x", "wt"), makes={"y": 4}),
    ]
    assert figures(live_bytes(steps, ["y"])) == [("t", 0, 0), ("m", 4, 4)]


@pytest.mark.parametrize("seed", range(10))
def test_against_books_kept_tensor_by_tensor(seed):
    rng = np.random.default_rng(seed)
    steps, made = [], []
    for i in range(40):
        reads = tuple(rng.choice(made, min(len(made), int(rng.integers(0, 3))), replace=False)) if made else ()
        steps.append(
            UnitMemory(unit=f"u{i}", reads=reads, makes={f"t{i}.{k}": int(rng.integers(0, 99)) for k in range(2)})
        )
        made += list(steps[-1].makes)
    outputs = {str(name) for name in rng.choice(made, 3, replace=False)}
    held: dict[str, int] = {}
    for i, (step, found) in enumerate(zip(steps, live_bytes(steps, outputs), strict=True)):
        held |= step.makes
        assert found.during == sum(held.values())
        later = {name for other in steps[i + 1 :] for name in other.reads} | outputs
        held = {name: size for name, size in held.items() if name in later}
        assert found.after == sum(held.values())


def test_the_most():
    series = [LiveBytes(unit=name, during=size, after=0) for name, size in (("a", 1), ("b", 9), ("c", 9))]
    assert most_live(series).unit == "b"
    assert most_live([]) is None
    samples = [
        MemorySample(moment="before", at_us=0.0, owners={"pool": 5}),
        MemorySample(moment="loaded", at_us=1.0, owners={"pool": 7, "late": 1}),
        MemorySample(moment="closed", at_us=2.0, owners={"pool": 7}),
    ]
    assert most_by_owner(samples) == {"pool": (7, "loaded"), "late": (1, "loaded")}
