# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which share of an instrumented run the units explain."""

from __future__ import annotations

import pytest

from xpuruntime.evidence.render_text.tables import outside_text
from xpuruntime.evidence.report_building import coverage_note, instrumented, profiler_overhead_note


def test_the_median_of_the_shares_of_single_runs():
    """One run in which the machine was busy between units does not move the figure."""
    found = instrumented((100.0, 100.0, 9_000.0), (95.0, 97.0, 96.0), 12)
    assert found == {
        "run_us": 100.0,
        "runs": 3,
        "statistic": "median",
        "units_us": 96.0,
        "units": 12,
        "coverage": pytest.approx(0.95),
        "outside_us": 5.0,
    }
    assert coverage_note(found) is None


def test_means_where_only_means_are_known():
    found = instrumented((100.0, 300.0), (180.0,), 3)
    assert (found["statistic"], found["run_us"], found["coverage"]) == ("mean", 200.0, pytest.approx(0.9))


def test_units_without_wall_times_have_no_share():
    assert instrumented((100.0, 120.0, 110.0), (), 0) == {"run_us": 110.0, "runs": 3, "statistic": "median"}
    assert instrumented((100.0,), (50.0,), 0) == {"run_us": 100.0, "runs": 1, "statistic": "median"}
    assert "coverage" not in instrumented((0.0,), (0.0,), 1)
    assert instrumented((), (), 0) == {}
    assert coverage_note({}) is None


@pytest.mark.parametrize(("units", "told"), [(89.0, True), (91.0, False), (109.0, False), (111.0, True)])
def test_more_than_a_tenth_is_told(units, told):
    note = coverage_note(instrumented((100.0,), (units,), 10))
    assert (note is not None) is told


def test_what_is_told():
    note = coverage_note(instrumented((100.0,), (60.0,), 8))
    assert note.startswith("the units explain 60% of an instrumented run, 60.0 of 100.0 us (median): ")
    assert "5.0 us for each of 8" in note
    assert "side by side" in coverage_note(instrumented((100.0,), (160.0,), 8))


def test_what_was_measured_outside_of_units():
    found = instrumented((100.0,), (60.0,), 8, outside_us={"call": 6.25, "between": 16.0}, cut_us=12.0)
    assert (found["outside_us"], found["outside"], found["cut_us"]) == (40.0, {"call": 6.25, "between": 16.0}, 12.0)
    assert outside_text(found) == "outside of units (call 6.2, between units 16.0, cut off at most 12.0)"
    assert coverage_note(found) == (
        "the units explain 60% of an instrumented run, 60.0 of 100.0 us (median): outside of them, 6.2 us is the call "
        "itself; 16.0 us passes between units, 2.0 for each of 8, in dispatch and the profiler's own work; up to 12.0 "
        "us is cut off, because the engine counts whole microseconds; the rest is whatever else engine and machine did"
    )


def test_what_was_not_measured_outside_of_units_is_not_there():
    found = instrumented((100.0,), (95.0,), 8)
    assert found["outside_us"] == 5.0
    assert not {"outside", "cut_us"} & set(found)
    assert outside_text(found) == "outside of units"
    assert instrumented((100.0,), (120.0,), 8)["outside_us"] == 0.0
    assert "outside_us" not in instrumented((100.0,), (), 0, outside_us={"call": 1.0}, cut_us=1.0)


def test_units_that_took_longer_than_a_run_that_nobody_watched():
    found = instrumented((100.0,), (60.0,), 8)
    assert profiler_overhead_note(found, 55.0) is None
    note = profiler_overhead_note(found, 23.5)
    assert note.startswith("the units together took 60.0 us of an instrumented run")
    assert "at most 23.5" in note
    assert profiler_overhead_note({}, 23.5) is None
