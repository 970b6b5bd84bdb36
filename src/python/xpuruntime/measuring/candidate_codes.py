# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CandidateCode`: why a candidate of a search won, or did not."""

from __future__ import annotations

from xpuruntime.codes import Code

__all__ = ["CandidateCode"]


class CandidateCode(Code):
    """Why a candidate of a search won, or did not: of policies, and of variants of a training step."""

    WINNER = "winner", "It is the best of those that keep the constraints."
    CONTROL = "control", "It is what was there before the search, which all are compared with."
    UNDECIDED = "undecided", "The budget ended before it was decided whether it is faster."
    BEATEN = "beaten", "It is faster than the control, and the winner is faster still."
    NOT_FASTER = "not_faster", "It is not faster by the least effect that counts."
    SLOWER = "slower", "It is slower than what it was compared with."
    INFEASIBLE = "infeasible", "It cannot run here: the plan rejects it, or an obstacle is known beforehand."
    DUPLICATE = "duplicate", "The engine gets for it what it gets for another candidate."
    OPEN_FAILED = "open_failed", "It could not be opened."
    RUN_FAILED = "run_failed", "It was opened, and a run of it failed."
    FAILED = "failed", "It raised an error that is none of xpuruntime's."
    CRASHED = "crashed", "Its process ended while it was opened or run."
    TIMEOUT = "timeout", "It gave no result within the time allowed."
    INACCURATE = "inaccurate", "Its results are too far from the reference."
    MEMORY = "memory", "It needs more memory than is allowed, or than there is."
    SLOW_START = "slow_start", "Its first result took longer than is allowed."
    LATENCY = "latency", "Its tail latency is longer than is allowed."
    NONDETERMINISTIC = "nondeterministic", "Its results do not repeat in the grade asked for."
    NODE_LOST = "node_lost", "The computer that it was measured on was lost, and so was another one."
    NOT_TRIED = "not_tried", "The budget had no room for it."
