# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The decisions of a search, on simulated candidates."""

from __future__ import annotations

import re

import pytest
from sampled import ALL
from simulated_executor import SimulatedExecutor, run

from xpuruntime.engines.base import Tunable, of_options, of_policy
from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.torch.names import OPTIONS as TORCH_OPTIONS
from xpuruntime.tuning.space import Space, kernel_values
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import CandidateFailed, Trial

THREADS = Tunable(key="execution.threads", values=(None, 1, 2, 4))
#: Searches of which at most one in 100 may name a winner by chance.
SEARCHES = 100 if ALL else 30
LAYOUT = Tunable(key="execution.layout", values=("auto", "nhwc"))


def space(*tunables: Tunable, engines: tuple[str, ...] = ("a", "b")) -> Space:
    return Space("cpu", dict.fromkeys(engines, tunables), ())


def codes(found):
    return {candidate.id: candidate.code for candidate in found.candidates}


@pytest.mark.parametrize(("turns", "processes", "tied"), [(0.02, 0.003, 90), (0.05, 0.015, 0)])
def test_identical_candidates_have_at_most_one_winner_in_100_searches(turns, processes, tied):
    verdicts = []
    for seed in range(SEARCHES):
        executor = SimulatedExecutor(lambda changes: 1e-3, seed=seed, turns=turns, processes=processes)
        verdicts.append(run(executor, space(THREADS, engines=("a",))).verdict)
    assert verdicts.count("winner") <= 1, verdicts
    assert verdicts.count("tied") >= tied * SEARCHES // 100, verdicts


def test_a_candidate_that_is_better_by_less_than_the_effect_never_wins():
    def seconds(changes):
        return 1e-3 * (0.99 if changes.get("execution.threads") == 1 else 1.0)

    verdicts = [
        run(SimulatedExecutor(seconds, seed=seed), space(THREADS, engines=("a",))).verdict for seed in range(10)
    ]
    assert "winner" not in verdicts


def test_the_fastest_wins_with_an_interval_that_holds_the_truth():
    def seconds(changes):
        return 1e-3 / (1.3 if changes.get("execution.threads") == 4 and changes["execution.engine"] == "b" else 1.0)

    found = run(SimulatedExecutor(seconds, seed=3), space(THREADS))
    assert found.verdict == "winner"
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes == {"execution.engine": "b", "execution.device": "cpu", "execution.threads": 4}
    assert found.gain is not None
    assert found.gain.low < 1.3 < found.gain.high
    assert found.gain.low > 1.2


def test_settings_that_gain_alone_are_combined():
    def seconds(changes):
        gain = 1.1 if changes.get("execution.threads") == 1 else 1.0
        return 1e-3 / gain / (1.15 if changes.get("execution.layout") == "nhwc" else 1.0)

    executor = SimulatedExecutor(seconds, seed=1, turns=0.005, processes=0.001)
    found = run(executor, space(THREADS, LAYOUT, engines=("a",)))
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes["execution.threads"] == 1
    assert winner.changes["execution.layout"] == "nhwc"


def test_a_gain_that_shows_only_beside_another_setting_is_found():
    """Precisions of which one loses alone, where launches take the time, and wins where a graph launches all."""
    compute = {None: 0.6, "tf32": 0.4, "fp16": 0.25, "bf16": 0.26}
    launches = {None: 1.0, "tf32": 0.95, "fp16": 1.2, "bf16": 1.2}

    def seconds(changes):
        precision, graph = changes.get("execution.precision"), changes.get("execution.cuda_graph") == "require"
        return 1e-3 * (compute[precision] + 0.05 if graph else max(compute[precision], launches[precision]))

    precision = Tunable(key="execution.precision", values=tuple(compute))
    graph = Tunable(key="execution.cuda_graph", values=("off", "require"))
    for seed in range(2):
        executor = SimulatedExecutor(seconds, seed=seed, turns=0.005, processes=0.001)
        found = run(executor, space(precision, graph, engines=("a",)))
        winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
        assert winner.changes["execution.cuda_graph"] == "require"
        assert winner.changes["execution.precision"] in ("fp16", "bf16")


def test_an_option_that_gains_only_beside_another_setting_is_found():
    """A compiler that gains nothing where launches take the time, and half of it inside a graph."""

    def seconds(changes):
        graph = changes.get("execution.cuda_graph") == "require"
        compiled = changes.get("execution.provider_options.a.mode") == "compile"
        return 1e-3 * ((0.4 if compiled else 0.8) if graph else 4.0)

    graph = Tunable(key="execution.cuda_graph", values=("off", "require"))
    mode = Tunable(key="execution.provider_options.a.mode", values=(None, "compile"))
    executor = SimulatedExecutor(seconds, seed=1, turns=0.005, processes=0.001)
    found = run(executor, space(graph, mode, engines=("a",)))
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes["execution.provider_options.a.mode"] == "compile"
    assert winner.changes["execution.cuda_graph"] == "require"


def test_every_candidate_has_a_code_and_a_sentence():
    def fails(one):
        threads = one.changes.get("execution.threads")
        if threads == 1:
            return Trial(code="inaccurate", reason="for input 3, 1 elements became NaN and 0 infinite", seconds=1.0)
        return CandidateFailed("crashed", "the worker was ended in turn by SIGSEGV") if threads == 2 else None

    executor = SimulatedExecutor(
        lambda changes: 1e-3 / (3 if changes.get("execution.threads") in (1, 2) else 1), fails=fails
    )
    found = run(executor, space(THREADS, engines=("a", "missing")))
    assert found.verdict == "tied"
    by = {
        candidate.changes.get("execution.threads"): candidate
        for candidate in found.candidates
        if candidate.engine == "a"
    }
    assert by[1].code == "inaccurate"
    assert "NaN" in by[1].reason
    assert by[2].code == "crashed"
    assert "SIGSEGV" in by[2].reason
    assert "infeasible" in codes(found).values()
    assert "duplicate" in codes(found).values()
    assert all(candidate.reason for candidate in found.candidates)


def test_the_control_is_replaced_when_it_does_not_keep_the_constraints():
    def fails(one):
        return (
            Trial(code="memory", reason="it held 9 bytes, over the 8 allowed", seconds=1.0) if one.id == "c0" else None
        )

    found = run(SimulatedExecutor(lambda changes: 1e-3, fails=fails), space(THREADS, engines=("b",)))
    assert found.verdict == "winner"
    assert found.gain is None
    assert "does not keep the constraints" in found.reason


def test_no_candidate_keeps_the_constraints():
    found = run(
        SimulatedExecutor(lambda changes: 1e-3, fails=lambda one: Trial(code="timeout", reason="it hung", seconds=1.0)),
        space(THREADS, engines=("b",)),
    )
    assert found.verdict == "none"


def test_a_finalist_that_fails_a_grade_is_passed_over():
    def seconds(changes):
        return 1e-3 / {2: 2.0, 4: 1.5}.get(changes.get("execution.threads"), 1.0)

    found = run(SimulatedExecutor(seconds), space(THREADS, engines=("a",)), grade="run_to_run")
    assert found.verdict == "winner"
    by = {
        candidate.changes.get("execution.threads"): candidate for candidate in found.candidates if candidate.id != "c0"
    }
    assert by[2].code == "nondeterministic"
    assert by[4].code == "winner"


def test_a_p99_over_its_limit_is_passed_over():
    spec = TuneSpec.loads("constraints: {latency.p99: '<=700us'}")

    def seconds(changes):
        return 1e-3 / {2: 2.0, 4: 3.0}.get(changes.get("execution.threads"), 1.0)

    found = run(SimulatedExecutor(seconds), space(THREADS, engines=("a",)), spec)
    assert found.verdict == "winner"
    assert "constraints" in found.reason, "the control has a p99 of 1.5 ms"


def test_a_budget_that_ends_is_undecided():
    spec = TuneSpec.loads("budget: {time: 6s}")
    found = run(SimulatedExecutor(lambda changes: 1e-3), space(THREADS), spec)
    assert found.verdict == "undecided"
    assert "not_tried" in codes(found).values()


def test_candidates_beyond_the_budget_are_named():
    spec = TuneSpec.loads("budget: {candidates: 2}")
    found = run(SimulatedExecutor(lambda changes: 1e-3), space(THREADS, engines=("a",)), spec)
    assert found.verdict == "tied"
    assert list(codes(found).values()).count("not_tried") == 2
    assert any(note.startswith("2 candidates were not tried: budget.candidates") for note in found.notes)
    spec = TuneSpec.loads("budget: {candidates: 3}")
    found = run(SimulatedExecutor(lambda changes: 1e-3), space(THREADS, engines=("a",)), spec)
    assert any(note.startswith("1 candidate was not tried: budget.candidates") for note in found.notes)


def test_a_space_of_which_the_plan_takes_nothing_is_said():
    found = run(SimulatedExecutor(lambda changes: 1e-3), space(THREADS, engines=("missing",)))
    assert found.verdict == "tied"
    assert {code for name, code in codes(found).items() if name != "c0"} == {"infeasible"}
    first = next(candidate for candidate in found.candidates if candidate.code == "infeasible")
    (note,) = (note for note in found.notes if "nothing was compared with the policy given" in note)
    assert f"{first.id} because {first.reason}" in note


def test_kernels_are_searched_where_a_plan_takes_them():
    def seconds(changes):
        return 1e-3 / (1.4 if changes.get("kernels.matmul") == "fast" else 1.0)

    kernels = {"matmul": ("no", "slow", "fast"), "conv": ("fast",)}
    found = run(SimulatedExecutor(seconds), space(engines=("a",)), kernels=kernels)
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes["kernels.matmul"] == "fast"
    assert not any("kernels.conv" in candidate.changes for candidate in found.candidates), (
        "it takes no time of the model"
    )
    assert any("refuses 1" in note for note in found.notes)


def test_the_measured_choice_is_tried_before_single_kernels():
    def seconds(changes):
        return 1e-3 / (1.5 if "kernels.auto_strategy" in changes else 1.4 if "kernels.matmul" in changes else 1.0)

    kernels = kernel_values(TuneSpec().space, {"matmul": ("fast", "auto")})
    found = run(SimulatedExecutor(seconds), space(engines=("a",)), kernels=kernels)
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes["kernels.auto_strategy"] == "best_performance"
    assert "kernels.matmul" not in winner.changes
    first = next(
        candidate for candidate in found.candidates if any(key.startswith("kernels.") for key in candidate.changes)
    )
    assert first.id == winner.id


def test_a_final_duel_that_does_not_decide_calls_nobody_the_leader():
    def seconds(changes):
        return 1e-3 / (1.05 if changes.get("execution.threads") == 2 else 1.0)

    found = run(SimulatedExecutor(seconds, seed=0), space(THREADS), TuneSpec.loads("budget: {time: 20s}"))
    assert found.verdict == "undecided"
    assert re.match(r"the final duel of c\d+ \(\S+x \[\S+, \S+\] of c0 so far\) did not decide: ", found.reason)


def test_a_search_can_be_cancelled():
    executor = SimulatedExecutor(lambda changes: 1e-3)
    found = run(executor, space(THREADS), cancel=lambda: executor.now > 3)
    assert found.verdict == "undecided"
    assert "cancelled" in found.reason


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_never_drops_what_is_twice_as_fast(seed):
    def seconds(changes):
        return 1e-3 / (2.0 if changes.get("execution.threads") == 2 else 1.0)

    executor = SimulatedExecutor(seconds, seed=seed, turns=0.25, processes=0.05)
    assert run(executor, space(THREADS, engines=("a",))).verdict == "winner"


def cuda_space(*engines: str) -> Space:
    """Return what ONNX Runtime declares on CUDA, as if several engines did."""
    options = OnnxRuntimeEngine().option_table("cuda:0")
    return Space("cuda:0", {engine: (*of_policy("cuda:0"), *of_options(engine, options)) for engine in engines}, ())


def cuda_seconds(changes):
    """Return the time of a run where precision, layout, graph and a kernel gain, and options a little or nothing."""
    gain = {"fp16": 1.8, "tf32": 1.3, "bf16": 1.4}.get(changes.get("execution.precision"), 1.0)
    gain *= 1.2 if changes.get("execution.layout") == "nhwc" else 1.0
    gain *= 1.4 if changes.get("execution.cuda_graph") == "require" else 1.0
    gain *= 1.02 if any("auto_tune" in key for key in changes) else 1.0
    gain *= 1.05 if changes.get("kernels.conv") == "cudnn_exhaustive" else 1.0
    return 2e-3 / gain * (1.6 if changes.get("execution.engine") == "slow" else 1.0)


HAND_TUNED = {"execution.precision": "fp16", "execution.layout": "nhwc", "execution.cuda_graph": "require"}


@pytest.mark.parametrize("opens", [4.0, 12.0])
def test_what_is_tuned_by_hand_is_found_within_ten_minutes(opens):
    executor = SimulatedExecutor(cuda_seconds, seed=1, opens=lambda changes: opens)
    kernels = {"conv": ("cudnn_exhaustive", "cudnn_heuristic")}
    found = run(executor, cuda_space("a", "slow"), TuneSpec(), kernels=kernels)
    assert executor.now <= 600
    assert found.verdict == "winner", found.reason
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert HAND_TUNED.items() <= winner.changes.items(), winner.changes
    assert found.gain is not None
    assert found.gain.low > 2.5


def test_options_leave_time_for_kernels():
    def seconds(changes):
        return cuda_seconds(changes) / (1.15 if changes.get("kernels.matmul") == "fast" else 1.0)

    executor = SimulatedExecutor(seconds, seed=1, opens=lambda changes: 12.0)
    found = run(executor, cuda_space("a"), TuneSpec(), kernels={"matmul": ("slow", "slower", "slowest", "fast")})
    assert executor.now <= 600
    assert "not_tried" in codes(found).values(), "there is time for all"
    best = min(
        (candidate for candidate in found.candidates if candidate.figure), key=lambda candidate: candidate.figure
    )
    assert {**HAND_TUNED, "kernels.matmul": "fast"}.items() <= best.changes.items(), best.changes


def test_settings_of_a_policy_come_before_options_and_what_gained_before_pairs():
    executor = SimulatedExecutor(cuda_seconds, seed=1)
    found = run(executor, cuda_space("a", "slow"), TuneSpec())
    by = {candidate.id: candidate for candidate in found.candidates}
    order = [by[line.split()[1]].changes for line in executor.measured if line.startswith("trial")]
    alone = [one for one in order if len(one) == 3]  # engine, device and one key
    keys = [next(key for key in one if key not in ("execution.engine", "execution.device")) for one in alone]
    options = [key.startswith("execution.provider_options.") for key in keys]
    assert options == sorted(options)
    assert "execution.precision" in keys[:7]
    together = next(index for index, one in enumerate(order) if HAND_TUNED.items() <= one.items())
    pairs = [index for index, one in enumerate(order) if len(one) == 4]
    assert together < min(pairs)


@pytest.mark.parametrize("opens", [25.0, 700.0])
def test_a_search_ends_with_its_budget_however_slow_candidates_open(opens):
    executor = SimulatedExecutor(cuda_seconds, opens=lambda changes: opens if len(changes) > 2 else min(opens, 90.0))
    found = run(executor, cuda_space("a"), TuneSpec())
    assert executor.now <= 600
    assert all(candidate.reason for candidate in found.candidates)
    assert "not_tried" in codes(found).values()


@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_time_that_no_finalist_needs_is_for_candidates_that_were_skipped(gain):
    """Half of the budget is kept back for a final duel; where nothing leads there is none."""

    def seconds(changes):
        better = changes.get("execution.threads") == 4 and changes["execution.engine"] == "b"
        return 1e-3 / (gain if better else 0.8)

    opens = 4.0
    executor = SimulatedExecutor(seconds, seed=1, opens=lambda changes: opens)
    found = run(executor, space(THREADS), TuneSpec.loads("budget: {time: 60s}"))
    assert "not_tried" not in codes(found).values() or executor.now > 60 - 2 * opens
    tried = [
        candidate
        for candidate in found.candidates
        if candidate.changes.get("execution.threads") == 4 and candidate.engine == "b"
    ]
    assert [one.code for one in tried] != ["not_tried"]
    assert executor.now <= 60


def test_a_control_that_the_budget_has_no_room_for_is_undecided():
    executor = SimulatedExecutor(cuda_seconds, opens=lambda changes: 700.0)
    found = run(executor, cuda_space("a"), TuneSpec())
    assert (executor.now, found.verdict) == (600.0, "undecided")
    assert found.reason == "the policy that was given was not measured: the budget of time was used up"
    assert codes(found) == {"c0": "control"}


def test_an_option_that_an_engine_names_is_tried_with_the_keys_of_a_policy():
    """A compiler that gains inside a graph alone, with openings so slow that other options are not reached."""
    torch = {"execution.provider_options.torch.mode": "compile", "execution.cuda_graph": "require"}

    def seconds(changes):
        graph = changes.get("execution.cuda_graph") == "require"
        compiled = changes.get("execution.provider_options.torch.mode") == "compile"
        half = changes.get("execution.precision") in ("fp16", "bf16")
        return 1e-3 * ((0.45 if half else 0.6) if compiled else 0.9) if graph else 4e-3

    declared = (*of_policy("cuda:0"), *of_options("torch", TORCH_OPTIONS))
    executor = SimulatedExecutor(seconds, seed=1, opens=lambda changes: 14.0)
    found = run(executor, Space("cuda:0", {"torch": declared}, ()), TuneSpec())
    assert executor.now <= 600
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert torch.items() <= winner.changes.items(), winner.changes
    assert winner.changes["execution.precision"] in ("fp16", "bf16")


def test_time_is_kept_back_for_deciding_on_a_candidate_that_opens_slowly():
    """The control opens in 4 s, and a compiled model, which gains, in 12 s: its rounds in fresh processes do, too."""
    declared = (*of_policy("cuda:0"), *of_options("torch", TORCH_OPTIONS))

    def compiled(changes):
        return changes.get("execution.provider_options.torch.mode") == "compile"

    executor = SimulatedExecutor(
        lambda changes: 1e-3 if compiled(changes) else 4e-3,
        seed=1,
        opens=lambda changes: 12.0 if compiled(changes) else 4.0,
    )
    found = run(executor, Space("cuda:0", {"torch": declared}, ()), TuneSpec())
    assert executor.now <= 600
    assert found.verdict == "winner", found.reason
