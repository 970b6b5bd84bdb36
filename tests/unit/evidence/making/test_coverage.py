# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which share of an instrumented run the units explain."""

from __future__ import annotations

import pytest

from xpuruntime.evidence.making.coverage import coverage_note, instrumented


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
