# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CandidateState`: code, figures and gain of one candidate as the search goes on."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.tuning.result.tune_result import CandidateResult, Ratio
from xpuruntime.tuning.trial import Candidate, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.measuring.statistics import Interval
    from xpuruntime.tuning.spec.tune_spec import TuneSpec

__all__ = ["FINAL", "CandidateState", "exit_text", "gain_from_ratio", "op_share"]

#: Codes of candidates that may be finalists: those that ran, and were not proven to be slower than the control.
FINAL = (CandidateCode.UNDECIDED, CandidateCode.BEATEN, CandidateCode.SLOWER, CandidateCode.NOT_FASTER)

#: Words in operator types by operation.
_WORDS = {
    "matmul": ("matmul", "gemm", "fullyconnected", "linear", "addmm"),
    "conv": ("conv",),
    "attention": ("attention", "sdpa", "softmax"),  # written out, it has a Softmax between two products
    "layer_norm": ("layernorm", "layer_norm", "mvn"),
    "rms_norm": ("rmsnorm", "simplifiedlayernorm", "rms_norm"),
}


class CandidateState:
    """Code, reason, figures and gain of one candidate; changes as the search goes on."""

    def __init__(self, candidate: Candidate, code: CandidateCode = CandidateCode.UNDECIDED, reason: str = "") -> None:
        self.candidate, self.code, self.reason = candidate, code, reason
        self.trial = Trial()
        self.figures: list[float] = []
        self.gain: Ratio | None = None
        #: Where it was opened at last.
        self.device: str | None = None
        #: Whether it was tried when nothing led, in time that was kept back for the decision.
        self.late = False
        #: Estimated ratio of its figure to that of the control.
        self.estimate: float | None = None

    @property
    def trial_key(self) -> str:
        """What its trial is called in the journal. One that is late is not taken for one in time when it is resumed."""
        return f"trial/{self.candidate.id}" + ("/late" if self.late else "")

    def result(self) -> CandidateResult:
        """Return it as a record."""
        one, trial = self.candidate, self.trial
        return CandidateResult(
            id=one.id, engine=one.engine, device=self.device or one.device, changes=one.changes, code=self.code,
            reason=self.reason, figure=statistics.median(self.figures) if self.figures else None, gain=self.gain,
            start=trial.start, memory=trial.memory, error=trial.error, cosine=trial.cosine,
            cuda_graph=trial.graph,
        )  # fmt: skip


def op_share(op: str, shares: Mapping[str, float]) -> float:
    """Return the share of time of an operation, from those of operator types; ``auto_strategy`` is about all."""
    if op == "auto_strategy":
        return 1.0
    words = _WORDS.get(op, (op,))
    return sum(share for name, share in shares.items() if any(word in name.lower() for word in words))


def gain_from_ratio(ratio: Interval | None, against: str, rounds: int) -> Ratio | None:
    """Return how many times better: the inverse of the ratio of figures."""
    if ratio is None:
        return None
    return Ratio(value=1 / ratio.ratio, low=1 / ratio.high, high=1 / ratio.low, against=against, rounds=rounds)


def exit_text(code: CandidateCode, against: str, ratio: Interval | None, spec: TuneSpec) -> str:
    """Say how a candidate left a race."""
    shown = "" if ratio is None else f": {gain_from_ratio(ratio, against, 0)}"
    if code == CandidateCode.BEATEN:
        return f"{against} is better{shown}"
    if code == CandidateCode.SLOWER:
        return f"worse than {against}{shown}"
    return f"not better than {against} by {spec.decide.min_effect:.3g}{shown}"
