# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search results: the winner or why there is none, as values, text, JSON and an HTML page; and progress of a search."""

from xpuruntime.tuning.result.progress import TuneProgress
from xpuruntime.tuning.result.tune_result import CandidateResult, Ratio, TuneResult

__all__ = ["CandidateResult", "Ratio", "TuneProgress", "TuneResult"]
