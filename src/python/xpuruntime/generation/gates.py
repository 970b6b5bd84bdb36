# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates: how far a model's next-token distributions on held-out texts may be from those of a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.generation.logprobs import LogprobSource, greedy_tokens, normalized, read_texts, token_ids
from xpuruntime.notebook import one_line
from xpuruntime.policies.kinds import share_text
from xpuruntime.policies.verify_policy import VerifyGeneration
from xpuruntime.printable import printable

#: How many tokens may be the most likely one together.
_ALIKE = 2

Array = np.ndarray[Any, Any]
GateVerdict = Literal["pass", "fail", "inconclusive", "reported"]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One limit on the distributions of a model, and what was measured.

    Attributes
    ----------
    name : {"top1", "kl", "perplexity", "tokens"}
    requested, observed : str
    verdict : {"pass", "fail", "inconclusive", "reported"}
        ``inconclusive``: the texts cannot decide the limit. ``reported``: there is no limit.
    reason : str
    figures : dict of str to float
    """

    name: str
    requested: str
    observed: str
    verdict: GateVerdict
    reason: str
    figures: dict[str, float] = {}


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `check_gates` measured.

    Attributes
    ----------
    gates : tuple of Gate
    texts, positions : int
        How many texts, and how many next tokens in them, were compared.
    sha256 : str
        Of the file of the texts; empty where they were given as values.
    """

    gates: tuple[Gate, ...]
    texts: int
    positions: int
    sha256: str = ""

    @property
    def verdict(self) -> Literal["pass", "fail", "inconclusive"]:
        """``fail`` where a gate failed, else ``inconclusive`` where one could not be judged."""
        verdicts = {gate.verdict for gate in self.gates}
        return "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.positions} next tokens of {self.texts} texts"]
        lines += [f"  {gate.name:10}  {gate.verdict:12}  {gate.observed} ({gate.requested})" for gate in self.gates]
        lines += [f"  {gate.name}: {gate.reason}" for gate in self.gates if gate.verdict != "pass"]
        return printable("\n".join(lines))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import Badge, fragment, fragment_lines, fragment_table

        marks = {"pass": "honoured", "fail": "substituted"}
        rows = [
            (gate.name, Badge(marks.get(gate.verdict, "inconclusive")), gate.observed, gate.requested, gate.reason)
            for gate in self.gates
        ]
        headline = f"{self.verdict}: {self.positions} next tokens of {self.texts} texts"
        columns = ("gate", "verdict", "observed", "requested", "reason")
        return fragment((fragment_lines([headline]), fragment_table("Gates", columns, rows)))


def check_gates(
    reference: LogprobSource,
    candidate: LogprobSource,
    limits: VerifyGeneration | Mapping[str, Any],
    *,
    texts: Sequence[Sequence[int] | str] | None = None,
) -> GateReport:
    """Compare what two sources say about the next tokens of held-out texts, and judge it by limits.

    Parameters
    ----------
    reference : LogprobSource
        Of the same weights, in the format that the policy states: then a wrong kernel and the error of a format are
        told apart.
    candidate : LogprobSource
    limits : VerifyGeneration or mapping
        The section ``verify.generation`` of a policy. Limits that are left out are reported, and decide nothing.
    texts : sequence of token ids or str, optional
        In place of the file that `limits` names.

    Returns
    -------
    GateReport
        Printable.

    Raises
    ------
    InputError
        The texts cannot be read, or both sources are the same object.

    Examples
    --------
    >>> import numpy as np
    >>> from xpuruntime.generation import check_gates
    >>> class Source:
    ...     def __init__(self, scale):
    ...         self.scale = scale
    ...
    ...     def logprobs(self, tokens):
    ...         return self.scale * np.eye(4)[[(token + 1) % 4 for token in tokens[:-1]]]
    >>> report = check_gates(Source(3.0), Source(3.1), {"kl": 1e-4}, texts=[[0, 1, 2, 3]])
    >>> [(gate.name, gate.verdict) for gate in report.gates]
    [('top1', 'reported'), ('kl', 'fail'), ('perplexity', 'reported')]
    """
    if reference is candidate:
        raise InputError(
            "the reference is the candidate, which agrees with itself whatever it computes. Fix: give two sources, "
            "such as xpuruntime.pytorch.logprobs_of(model) and xpuruntime.pytorch.logprobs_of(model, policy=policy)"
        )
    if isinstance(limits, Mapping):
        limits = VerifyGeneration(**limits if texts is None else {"text": "texts", **limits})
    digest = ""
    if texts is None:
        texts, digest = read_texts(str(limits.text))
    ids = [token_ids(text, reference) for text in texts]
    sums = _Sums()
    for tokens in ids:
        if len(tokens) > 1:
            sums.add(tokens, reference.logprobs(tokens), candidate.logprobs(tokens))
    gates = [_top1(sums, limits.top1), _kl(sums, limits.kl), _perplexity(sums, limits.perplexity)]
    if limits.tokens:
        gates.append(_tokens(ids, reference, candidate, limits.tokens))
    return GateReport(gates=tuple(gates), texts=len(ids), positions=sums.positions, sha256=digest)


class _Sums:
    def __init__(self) -> None:
        self.positions = self.judged = self.agreeing = 0
        self.kl = self.reference_nll = self.candidate_nll = 0.0
        #: What is wrong with the numbers of the candidate, and of the reference.
        self.faulty = self.unusable = ""

    def add(self, tokens: Sequence[int], reference: Any, candidate: Any) -> None:
        want, got = normalized(reference), normalized(candidate)
        rows = min(len(want), len(got), len(tokens) - 1)
        if not rows:  # to leave a text out would pass whatever is wrong with it
            self.unusable = self.unusable or ("" if len(want) else "the reference says nothing about a text")
            self.faulty = self.faulty or ("" if len(got) else "it says nothing about a text")
            return
        want, got = want[-rows:], got[-rows:]
        if want.shape != got.shape:
            self.faulty = f"it tells {got.shape[1]} tokens apart, and the reference {want.shape[1]}"
            return
        actual = np.asarray(tokens[-rows:])
        if actual.min() < 0 or actual.max() >= want.shape[1]:
            raise InputError(
                f"a text has the token {actual.max() if actual.min() >= 0 else actual.min()}, and the model tells "
                f"tokens 0 to {want.shape[1] - 1} apart. Fix: encode the texts with the model's own tokenizer"
            )
        if np.isnan(want).any():
            self.unusable = "the reference gives NaN"
            return
        if np.isnan(got).any():
            self.faulty = f"it gives NaN at {int(np.isnan(got).any(axis=1).sum())} of {rows} positions"
        self.positions += rows
        best = want.argmax(axis=1)
        every = np.arange(rows)
        # Where the reference itself has a tie, neither of its tokens is the right one.
        second = np.partition(want, -2, axis=1)[:, -2] if want.shape[1] > 1 else want[:, 0]
        sure = want[every, best] > second
        self.judged += int(sure.sum())
        # Types of few bits have two tokens alike. A model that prefers none has all of them alike.
        largest = got.max(axis=1)
        alike = (got == largest[:, None]).sum(axis=1)
        self.agreeing += int((sure & (got[every, best] >= largest) & (alike <= _ALIKE)).sum())
        with np.errstate(invalid="ignore"):
            terms = np.where(want > -np.inf, np.exp(want) * (want - got), 0.0)
        self.kl += float(terms.sum())
        self.reference_nll -= float(want[every, actual].sum())
        self.candidate_nll -= float(got[every, actual].sum())


def _judged(
    name: str, requested: str, observed: str, failure: str, doubt: str, figures: dict[str, float], *, limited: bool
) -> Gate:
    verdict: GateVerdict = "pass"
    if not limited:
        verdict, failure, doubt = "reported", "", ""
        requested = "no limit"
    elif failure:
        verdict = "fail"
    elif doubt:
        verdict = "inconclusive"
    reason = failure or doubt or ("within the limit" if limited else "a report, which decides nothing")
    finite = {key: value for key, value in figures.items() if math.isfinite(value)}
    return Gate(name=name, requested=requested, observed=observed, verdict=verdict, reason=reason, figures=finite)


def _top1(sums: _Sums, limit: float | None) -> Gate:
    judged, missed = sums.judged, sums.judged - sums.agreeing
    share = sums.agreeing / judged if judged else math.nan
    failure = doubt = ""
    if limit is not None:
        failure = sums.faulty or (
            f"the most likely token is another at {missed} of {judged} positions" if judged and share < limit else ""
        )
        doubt = sums.unusable or ("the texts have no position that decides" if not judged else "")
        if not doubt and not missed and limit < 1 and judged * (1 - limit) < 1 - 1e-9:
            doubt = f"{judged} positions cannot tell {limit:g} from 1; {math.ceil(1 / (1 - limit) - 1e-9)} are needed"
    observed = f"the same most likely token at {sums.agreeing} of {judged} positions"
    return _judged(
        "top1", f"at least {limit}", observed, failure, doubt, {"top1": share, "positions": judged},
        limited=limit is not None,
    )  # fmt: skip


def _kl(sums: _Sums, limit: float | None) -> Gate:
    mean = max(0.0, sums.kl / sums.positions) if sums.positions else math.nan
    failure = sums.faulty or (
        f"the mean KL divergence is {mean:.3g} nats"
        if limit is not None and sums.positions and not mean <= limit
        else ""
    )
    doubt = sums.unusable or ("" if sums.positions else "the texts have no position to compare")
    return _judged(
        "kl", f"at most {limit} nats", f"mean KL divergence {mean:.3g} nats", failure, doubt, {"kl": mean},
        limited=limit is not None,
    )  # fmt: skip


def _perplexity(sums: _Sums, limit: float | None) -> Gate:
    want, got = (
        _exp(nll / sums.positions) if sums.positions else math.nan for nll in (sums.reference_nll, sums.candidate_nll)
    )
    moved = math.nan if not sums.positions else _exp((sums.candidate_nll - sums.reference_nll) / sums.positions) - 1
    doubt = sums.unusable
    if not doubt and not math.isfinite(want):
        doubt = "the reference has no finite perplexity on these texts"
    failure = sums.faulty
    if limit is not None and not failure and not doubt and not abs(moved) <= limit:
        failure = f"the perplexity is {abs(moved):.2%} {'lower' if moved < 0 else 'higher'} than that of the reference"
    return _judged(
        "perplexity",
        "" if limit is None else f"within {share_text(limit)} of the reference, either way",
        f"{got:.4f} against {want:.4f}",
        failure,
        doubt,
        {"perplexity": got, "reference": want, "change": moved},
        limited=limit is not None,
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf if value == value else math.nan


def _tokens(ids: list[list[int]], reference: LogprobSource, candidate: LogprobSource, count: int) -> Gate:
    same = total = 0
    first = ""
    figures: dict[str, float] = {}
    for number, tokens in enumerate(ids):
        prompt = tokens[: max(1, len(tokens) // 2)]
        if not prompt:
            continue
        want, got = (greedy_tokens(source, prompt, count) for source in (reference, candidate))
        total += 1
        same += want == got
        if want == got or first:
            continue
        index = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            first = f"text {number} ends after {len(got)} tokens in place of {len(want)}"
            continue
        row = normalized(reference.logprobs([*prompt, *want[: index + 1]]))[-1]
        margin = float(row[want[index]] - row[got[index]])
        first = f"the first other token is {got[index]} in place of {want[index]}, token {index} after text {number}, "
        first += f"where the reference has them {margin:.3g} nats apart"
        figures = {"text": number, "token": index, "margin": margin}
    observed = f"{same} of {total} greedy continuations of {count} tokens are the same"
    gate = _judged("tokens", "", observed, "", "", {"same": same, "texts": total, **figures}, limited=False)
    return msgspec.structs.replace(gate, reason=f"{first}; {gate.reason}") if first else gate
