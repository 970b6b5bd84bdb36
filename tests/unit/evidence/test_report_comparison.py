# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two reports, node by node: what is said to differ, what is not, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from evidence_records import control, unit

from xpuruntime.engines.base import Observed
from xpuruntime.errors import InputError
from xpuruntime.evidence import Boundary, Latency, Report, Time, build_report, compare_reports
from xpuruntime.runtime.machine import Library

LAYOUT = Boundary(kind="layout", where="Reorder on cpu", count=2, bytes=64)


def report(
    *units,
    controls=(),
    boundaries=(),
    sha="a" * 64,
    latency=100.0,
    detail=None,
    partial=False,
    engine="onnxruntime",
    **more,
):
    plan = {
        "engine": engine,
        "device": "cpu",
        "precision": "fp32",
        "model": {"path": "net.onnx", "sha256": sha},
        **more.pop("plan", {}),
    }
    observed = Observed(units=tuple(units), boundaries=tuple(boundaries), partial=partial)
    times = Latency(median_us=latency, p90_us=latency, min_us=latency, runs=5, detail=detail or {})
    return build_report(plan, controls, observed, latency=times, environment=more.pop("environment", {}), **more)


def fused(name, *nodes, **more):
    return unit(name, relation="fused", source_nodes=nodes, **more)


def test_the_same():
    one = report(unit("a"), unit("b", relation="folded", device="none", time=None), boundaries=[LAYOUT])
    comparison = compare_reports(one, one)
    assert comparison.same
    assert comparison.headline == "nothing moved"
    assert (comparison.groups, comparison.keys, comparison.boundaries, comparison.unchanged) == ((), (), (), 2)
    assert comparison.latency.verdict == "same"


def test_what_can_differ_about_one_node():
    a = unit("n", kernel="gemm", kernel_source="reported", layout="nchw", provider="P")
    changes = {
        "placement": [{"device": "cuda:0"}, {"engine": "openvino"}, {"provider": "Q"}],
        "kernel": [{"kernel": "gemm_v2"}],
        "precision": [{"precision_run": "fp16"}],
        "layout": [{"layout": "nhwc"}],
        "folding": [{"relation": "folded", "device": "none", "time": None}],
    }
    for what, several in changes.items():
        for change in several:
            b = msgspec.structs.replace(a, **change)
            for sides in ((a, b), (b, a)):
                comparison = compare_reports(report(sides[0], unit("other")), report(sides[1], unit("other")))
                assert [g.what for g in comparison.groups] == [{what: ("n",)}], change
                assert (comparison.nodes_that(what), comparison.unchanged, comparison.same) == (("n",), 1, False)


@pytest.mark.parametrize("field", ["kernel", "provider", "precision_run", "layout"])
def test_what_one_report_does_not_say_is_no_difference(field):
    a = unit("n", kernel="gemm", kernel_source="reported", layout="nchw", provider="P")
    assert compare_reports(report(a), report(msgspec.structs.replace(a, **{field: None}))).groups == ()
    for source in ("unknown", "inferred"):
        guessed = msgspec.structs.replace(a, kernel="other", kernel_source=source)
        assert compare_reports(report(a), report(guessed)).same


def test_units_are_compared_as_connected_groups():
    """a+b and c+d in one report, b+c in the other: one group of four, with all times in it."""
    before = report(fused("ab", "a", "b", time=10.0), fused("cd", "c", "d", time=20.0), unit("e", time=1.0))
    after = report(unit("a", time=5.0), fused("bc", "b", "c", time=30.0), unit("d", time=5.0), unit("e", time=1.0))
    comparison = compare_reports(before, after)
    (group,) = comparison.groups
    assert set(group.nodes) == {"a", "b", "c", "d"}
    assert {u.id for u in group.before} == {"ab", "cd"}
    assert {u.id for u in group.after} == {"a", "bc", "d"}
    assert set(group.what["grouping"]) == {"a", "b", "c", "d"}
    assert (group.time.before, group.time.after, group.time.verdict) == (30.0, 40.0, "slower")
    assert group.time.change == pytest.approx(1 / 3)
    assert comparison.unchanged == 1
    assert comparison.headline.startswith("nothing moved, 4 nodes are fused otherwise")


def test_steps_of_a_node_count_to_its_group():
    steps = [unit(f"s{i}", relation="inserted", serves=("softmax",), time=10.0) for i in range(3)]
    comparison = compare_reports(report(unit("softmax", time=10.0)), report(unit("softmax", time=10.0), *steps))
    (group,) = comparison.groups
    assert (group.time.before, group.time.after) == (10.0, 40.0)
    assert len(group.after) == 4


def test_inserted_work_is_a_group_without_nodes():
    cast = unit("cast", op="Cast", relation="inserted", time=5.0)
    comparison = compare_reports(report(unit("a")), report(unit("a"), cast))
    (group,) = comparison.groups
    assert (group.nodes, group.what, group.before) == ((), {"inserted": ("Cast",)}, ())
    assert "other Cast inserted" in comparison.headline
    assert not comparison.same


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (100.0, 109.9, "same"),
        (100.0, 111.0, "slower"),
        (100.0, 89.0, "faster"),
        (100.0, 90.5, "same"),
        (2.0, 2.9, "same"),  # 45 %, but less than a microsecond
        (2.0, 3.5, "slower"),
        (0.0, 0.9, "same"),
        (0.0, 5.0, "slower"),
    ],
)
def test_times_below_the_noise_claim_nothing(before, after, verdict):
    comparison = compare_reports(report(unit("a", time=before)), report(unit("a", time=after)))
    assert comparison.totals[0].verdict == verdict
    assert [g.time.verdict for g in comparison.groups] == ([] if verdict == "same" else [verdict])
    assert comparison.same, "times do not say that something else ran"


def test_the_noise_is_an_option():
    slow = report(unit("a", time=150.0)), report(unit("a", time=250.0))
    assert compare_reports(*slow).totals[0].verdict == "slower"
    assert compare_reports(*slow, noise=1.0).totals[0].verdict == "same"
    assert compare_reports(*slow, noise_us=100.0).totals[0].verdict == "same"
    assert compare_reports(report(unit("a", time=1.0)), report(unit("a", time=1.2)), noise_us=0).groups
    for wrong in ({"noise": -1}, {"noise_us": float("nan")}, {"noise": float("inf")}):
        with pytest.raises(InputError, match="must be 0 or more"):
            compare_reports(*slow, **wrong)


@pytest.mark.parametrize(
    ("before", "after", "runs", "verdict"),
    [
        ((90.0, 100.0, 110.0), (135.0, 150.0, 160.0), 20, "slower"),
        ((135.0, 150.0, 160.0), (90.0, 100.0, 110.0), 20, "faster"),
        (
            (90.0, 100.0, 1000.0),
            (117.0, 130.0, 140.0),
            20,
            "undecided",
        ),  # the first reaches beyond
        ((90.0, 100.0, 105.0), (50.0, 227.0, 300.0), 20, "undecided"),  # 127 %, and the second has shorter runs
        ((90.0, 100.0, 105.0), (110.0, 130.0, 140.0), 20, "undecided"),  # apart by less than the noise
        ((100.0, 100.0, 100.0), (300.0, 300.0, 300.0), 1, "undecided"),
        ((90.0, 100.0, 1000.0), (94.0, 104.0, 140.0), 20, "same"),
    ],
)
def test_a_difference_inside_the_spread_of_the_runs_is_not_claimed(before, after, runs, verdict):
    """A unit that takes as long as the model spreads as far: what is not claimed of runs is not claimed of units."""
    both = [
        msgspec.structs.replace(
            report(msgspec.structs.replace(unit("a"), time=Time(value=median, unit="us", kind="wall", runs=runs))),
            latency=Latency(median_us=median, min_us=least, p90_us=most, runs=runs),
        )
        for least, median, most in (before, after)
    ]
    comparison = compare_reports(*both)
    assert (comparison.latency.verdict, comparison.totals[0].verdict) == (verdict, verdict)
    assert bool(comparison.groups) == (verdict in ("slower", "faster"))
    assert ("slower" in comparison.headline or "faster" in comparison.headline) == (verdict in ("slower", "faster"))
    assert ("speed cannot be decided" in comparison.headline) == (verdict == "undecided")
    assert any("cannot be decided from" in note for note in comparison.notes) == (verdict == "undecided")
    assert ("slower" in str(comparison) or "faster" in str(comparison)) == (verdict in ("slower", "faster"))


def cycles(name, value, kind="cycles"):
    return (
        unit(name, time=None)
        if value is None
        else msgspec.structs.replace(unit(name), time=Time(value=value, unit="cycles", kind=kind, runs=3))
    )


def test_times_of_different_kinds_are_not_compared():
    comparison = compare_reports(report(unit("a", time=10.0)), report(cycles("a", 90000.0)))
    assert (comparison.groups, comparison.totals) == ((), ())
    assert any("different kinds" in note for note in comparison.notes)
    wall, device = (
        report(unit("a")),
        report(msgspec.structs.replace(unit("a"), time=Time(value=90.0, unit="us", kind="device", runs=1))),
    )
    assert compare_reports(wall, device).totals == ()
    # cycles with cycles: only the share counts, there are no microseconds in them
    (total,) = compare_reports(report(cycles("a", 2.0)), report(cycles("a", 2.5))).totals
    assert (total.verdict, total.unit, total.kind) == ("slower", "cycles", "cycles")
    assert compare_reports(report(cycles("a", 2.0)), report(cycles("a", 9.0, "simulated"))).totals == ()


def test_a_unit_that_ran_unseen_leaves_its_time_open():
    unseen = unit("a", time=None, status="unobservable")
    comparison = compare_reports(report(unit("a", time=50.0), unit("b")), report(unseen, unit("b")))
    assert (comparison.groups, comparison.totals) == ((), ())
    assert "a unit has no time although it ran" in "\n".join(comparison.notes)


def test_times_of_other_inputs_are_not_compared():
    a = report(unit("a", time=10.0), detail={"inputs": {"x": "float32 [1, 8]"}})
    b = report(unit("a", time=90.0), detail={"inputs": {"x": "float32 [9, 8]"}}, latency=900.0)
    comparison = compare_reports(a, b)
    assert (comparison.groups, comparison.totals, comparison.latency) == ((), (), None)
    assert "the inputs differ (x float32 [1, 8]; x float32 [9, 8])" in comparison.notes[0]


def test_policy_keys():
    before = report(
        unit("a"), controls=[control("execution.tf32", "true"), control("kernels.conv", "x", "-", "unsupported")]
    )
    after = report(unit("a", ran="fp16"), controls=[control("execution.tf32", "false")])
    found = {k.key: k for k in compare_reports(before, after).keys}
    assert set(found) == {"execution.precision", "execution.tf32", "kernels.conv"}
    assert (found["execution.precision"].status_before, found["execution.precision"].status_after) == (
        "honoured",
        "substituted",
    )
    assert (found["execution.tf32"].requested_before, found["execution.tf32"].requested_after) == ("true", "false")
    # That a CPU has no TF32 answers the second, and leaves the first open.
    assert (found["execution.tf32"].status_before, found["execution.tf32"].status_after) == ("unobservable", "honoured")
    assert found["kernels.conv"].status_after is None
    assert [k.key for k in found.values() if k.deviates] == ["execution.precision", "execution.tf32", "kernels.conv"]


def test_a_key_that_only_one_states_and_that_is_honoured_is_told_and_no_difference():
    comparison = compare_reports(report(unit("a")), report(unit("a"), controls=[control("mode", "strict")]))
    assert [k.key for k in comparison.keys] == ["mode"]
    assert comparison.same


def test_boundaries_come_and_go():
    layout = msgspec.structs.replace(LAYOUT, count=3)
    for sides, counts in (((LAYOUT,), ()), (2, 0)), (((), (LAYOUT,)), (0, 2)), (((LAYOUT,), (layout,)), (2, 3)):
        comparison = compare_reports(report(unit("a"), boundaries=sides[0]), report(unit("a"), boundaries=sides[1]))
        assert [(b.count_before, b.count_after) for b in comparison.boundaries] == [counts]
        assert not comparison.same
        assert "1 boundary changed" in comparison.headline


def test_memory_and_surroundings_are_told_and_are_no_difference():
    def made(numpy, version, held, threads, variables):
        return report(
            unit("a"),
            environment={"packages": {"numpy": numpy}, "variables": variables, "driver": "CUDA 13.0"},
            libraries=[Library(name="libx.so", path="/x/libx.so", version=version, origin="pip")],
            memory=held,
            plan={"settings": {"threads": threads}},
        )

    comparison = compare_reports(
        made("2.0", "1.2", {"weights": 10}, 1, {"OMP_NUM_THREADS": "3"}),
        made("2.1", "1.3", {"weights": 20, "pool": 5}, 2, {}),
    )
    assert comparison.same
    assert [(m.owner, m.before, m.after) for m in comparison.memory] == [("weights", 10, 20), ("pool", None, 5)]
    assert {s.subject: (s.before, s.after) for s in comparison.surroundings} == {
        "packages.numpy": ("2.0", "2.1"),
        "variables.OMP_NUM_THREADS": ("3", None),
        "libraries.libx.so": ("1.2 in /x/libx.so", "1.3 in /x/libx.so"),
        "settings.threads": ("1", "2"),
    }


def test_different_models_are_refused_unless_nodes_overlap():
    with pytest.raises(InputError, match=r"different models and have no source node in common.*one model"):
        compare_reports(report(unit("a")), report(unit("z"), sha="b" * 64))
    comparison = compare_reports(report(unit("a"), unit("b")), report(unit("a"), unit("c"), sha="b" * 64))
    assert (comparison.only_before, comparison.only_after, comparison.unchanged, comparison.same) == (
        ("b",),
        ("c",),
        1,
        False,
    )
    assert "not the same file" in comparison.notes[0]
    assert "2 nodes are in one report only" in comparison.headline


def test_what_a_partial_report_does_not_show_is_not_held_against_it():
    whole, part = report(unit("a"), unit("b")), report(unit("a"), partial=True)
    comparison = compare_reports(whole, part)
    assert (comparison.only_before, comparison.nodes_that("placement")) == ((), ())
    assert any("is incomplete: 1 source nodes" in note for note in comparison.notes)
    nothing = compare_reports(whole, report(partial=True))
    assert {k.key: k.status_after for k in nothing.keys}["execution.engine"] == "unobservable"
    assert not nothing.same


def test_ordering_is_that_of_the_first_report_and_sides_swap():
    a, b = report(unit("a"), unit("b", ran="fp16")), report(unit("b"), unit("a", ran="fp16"))
    there, back = compare_reports(a, b), compare_reports(b, a)
    assert [g.nodes for g in there.groups] == [("a",), ("b",)]
    assert {g.nodes for g in back.groups} == {("a",), ("b",)}
    assert there.headline == back.headline == "nothing moved, 2 nodes changed precision"


def test_two_thousand_nodes_are_compared():

    before = report(*(unit(f"n{i}") for i in range(2000)))
    chain = report(fused("all", *(f"n{i}" for i in range(2000))))
    for other in (before, chain):
        comparison = compare_reports(before, other)
        str(comparison)
    assert len(comparison.groups) == 1
    assert isinstance(before, Report)
