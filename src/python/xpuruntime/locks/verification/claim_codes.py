# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RULES`: the codes of claims, with identifiers that stay the same for tools that keep a history of findings."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RULES", "Rule", "rule_of"]


class Rule(NamedTuple):
    """Identifier, such as ``"XRT1001"``, name in camel case, and one sentence."""

    id: str
    name: str
    text: str


#: Code of a claim to its rule. An identifier is never given to another code.
RULES: dict[str, Rule] = {
    "substituted": Rule("XRT1001", "KeySubstituted", "Something else ran than a policy key asks for."),
    "unsupported": Rule("XRT1002", "KeyUnsupported", "The engine cannot honour a policy key."),
    "key_inconclusive": Rule("XRT1003", "KeyInconclusive", "A policy key was tested without a value to compare."),
    "unobservable": Rule("XRT1004", "KeyUnobservable", "Nothing shows whether a policy key was honoured."),
    "not_observed": Rule("XRT1005", "RequiredEvidenceMissing", "Evidence that the policy requires was not observed."),
    "misplaced": Rule("XRT1006", "UnitMisplaced", "A unit ran on another device than the plan's."),
    "incomplete": Rule("XRT1007", "EvidenceIncomplete", "The instrumented pass broke off or lacks records."),
    "not_opened": Rule("XRT1008", "SessionNotOpened", "The model could not be opened under the policy."),
    "lock_differs": Rule("XRT1009", "LockEntryDiffers", "Something else ran than the lock records."),
    "lock_stale": Rule("XRT1010", "LockStale", "A validator of the lock does not hold here."),
    "other_machine": Rule("XRT1011", "OtherMachine", "The lock was made on another machine: nothing can be compared."),
    "out_of_tolerance": Rule("XRT2001", "OutputOutOfTolerance", "An output is too far from the reference."),
    "not_compared": Rule("XRT2002", "OutputNotCompared", "An output could not be compared with the reference."),
    "below_floor": Rule("XRT2003", "MetricBelowFloor", "A metric of the user is below its least value."),
    "metric_failed": Rule("XRT2004", "MetricFailed", "A metric of the user raised, or returned no number."),
    "nondeterministic": Rule(
        "XRT3001", "Nondeterministic", "Results do not repeat bit for bit in the grade asked for."
    ),
    "not_tested": Rule("XRT3002", "DeterminismNotTested", "A grade of determinism could not be tested."),
    "slower": Rule("XRT4001", "Slower", "The session is slower than its control, beyond the margin."),
    "undecided": Rule("XRT4002", "SpeedUndecided", "The interval of the slowdown holds the margin after the budget."),
    "noisy": Rule("XRT4003", "MachineTooNoisy", "The control differs from itself by too much to compare with."),
    "worker_failed": Rule("XRT4004", "WorkerFailed", "A worker process gave no measurement."),
    "no_control": Rule("XRT4005", "NoControl", "There is no control to compare the speed with."),
    "memory_growth": Rule("XRT5001", "MemoryGrowth", "The memory of the process grew over repeated runs."),
    "memory_peak": Rule("XRT5002", "MemoryPeak", "The process held more memory than is allowed."),
    "slow_start": Rule("XRT6001", "SlowStart", "Opening the session took longer than is allowed."),
    "start_undecided": Rule("XRT6002", "StartUndecided", "Times to open the session are too noisy to compare."),
    "other_work": Rule("XRT7001", "OtherWorkWhenTimed", "Outputs of timed runs differ from those of untimed runs."),
    "cached": Rule("XRT7002", "ResultsCached", "Repeated inputs are faster than new ones: results are cached."),
    "cache_undecided": Rule("XRT7003", "CacheUndecided", "Times of new and repeated inputs are too noisy to compare."),
    "raised": Rule("XRT8001", "CheckRaised", "The engine or the check itself raised an error."),
    "allowed": Rule("XRT9001", "DeviationAllowed", "The policy allows this deviation."),
    "not_applicable": Rule("XRT9002", "NotApplicable", "There is nothing to test."),
}


def rule_of(code: str) -> Rule:
    """Return the rule of a code; one for all that have none."""
    return RULES.get(code, Rule("XRT0000", "Claim", "A claim of xrt verify."))
