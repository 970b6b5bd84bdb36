# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Generation by language models, of any engine: what a model says about the next token, and gates on how it says it."""

from xpuruntime.generation.gates import Gate, GateReport, check_gates
from xpuruntime.generation.logprobs import LogprobSource, SessionLogprobs, read_texts

__all__ = ["Gate", "GateReport", "LogprobSource", "SessionLogprobs", "check_gates", "read_texts"]
