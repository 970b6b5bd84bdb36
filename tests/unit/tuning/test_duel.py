# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Duels of a finalist and the control: when they are decided, and that more rounds prove nothing by chance."""

from __future__ import annotations

import numpy as np
import pytest

from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.tuning.race import Duel
from xpuruntime.tuning.spec.parts import Decide
from xpuruntime.tuning.trial import CandidateFailed

RACE, MOST = 61, 244


def duel_of(gain, noise, *, seed, rounds=10_000, decide=None):
    """Return a duel whose finalist is so many times as fast, with lognormal noise of each opening, and its rounds."""
    rng, numbers = np.random.default_rng(seed), []

    def measured(number):
        numbers.append(number)
        if number >= rounds:
            return None
        control, finalist = np.exp(rng.normal(0.0, noise, 2))
        return [control, finalist / gain, finalist / gain, control]

    return Duel(measured, decide or Decide(), family=1, seed=0), numbers


def test_a_duel_goes_on_where_it_was_undecided():
    later = 0
    for seed in range(10):
        duel, asked = duel_of(1.2, 0.35, seed=seed)
        outputs = duel.run(RACE)
        assert asked == list(range(len(asked)))
        if outputs.won is None:
            assert len(asked) == RACE
            assert outputs.ended.startswith("so far after 61 rounds")
            outputs = duel.run(MOST)
            assert asked == list(range(len(asked)))
            later += outputs.won is True
        assert outputs.won is not False, outputs
    assert later >= 5


def test_false_positive_rate_of_a_duel_is_one_percent():
    won = sum(duel_of(1.0, 0.2, seed=1000 + seed)[0].run(MOST).won is True for seed in range(300))
    assert won <= 3, won


def test_what_ends_a_duel_is_named():
    duel, asked = duel_of(1.1, 0.5, seed=1)
    assert duel.run(RACE).won is None
    outputs = duel.run(MOST)
    assert outputs.won is None
    assert outputs.ended.startswith("decide.duel_rounds allows no more after 244 rounds; two turns of the same process")
    assert len(asked) == MOST
    outputs = duel_of(1.1, 0.5, seed=1, rounds=20)[0].run(RACE)
    assert outputs.ended.startswith("the budget of time was used up after 20 rounds")
    assert outputs.gain.rounds == 20


def test_a_failure_ends_a_duel_that_goes_on():
    duel, _ = duel_of(1.1, 0.5, seed=1)
    duel.run(RACE)

    def fail(number):
        raise CandidateFailed(CandidateCode.CRASHED, "it ended by SIGSEGV")

    duel._measured = fail
    outputs = duel.run(MOST)
    assert (outputs.won, outputs.failed, outputs.ended) == (False, CandidateCode.CRASHED, "it ended by SIGSEGV")
    assert outputs.gain.rounds == RACE


@pytest.mark.parametrize("rounds", [(3, 3), (3, 5), (7, 61), (20, 500)])
def test_looks_hold_the_end_of_a_race_and_then_double(rounds):
    looks = Decide(rounds=rounds).duel_looks(1)
    assert rounds[1] in looks
    after = looks[looks.index(rounds[1]) :]
    assert list(after) == [rounds[1], 2 * rounds[1], 4 * rounds[1]]
