# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_generations`: two language models in folders, of one engine or of two: tokens, logprobs and gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.argument_types import COUNT, check_types
from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_text
from xpuruntime.generation.gates import GateReport, check_gates
from xpuruntime.generation.logprobs import normalized, read_texts, token_ids
from xpuruntime.inference.generation import GenerationSession
from xpuruntime.notebook import one_line
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os

    from xpuruntime.inference.session_arguments import PolicyLike
    from xpuruntime.policies.verify_policy import VerifyGeneration

#: Texts that are drawn where none are stated: so many, each of at most so many tokens.
_TEXTS, _LENGTH = 4, 32
#: Limits where the policy states none: those of models in the same format.
_LIMITS = {"top1": 0.99, "kl": 1e-3}


class GenerationComparison(msgspec.Struct, frozen=True, kw_only=True):
    """How two language models differ on the same tokens.

    Attributes
    ----------
    reference, candidate : str
        Folder, engine and device of each.
    texts : str
        Where the texts are from.
    gates : GateReport
        With the greedy tokens that both generate, as a report.
    logprobs : int
        How many logprobs were compared: of each token but the first in each text, the second half over the cache.
    bits : bool
        Whether all distributions have the same bits.
    max_difference : float
        Largest difference between logprobs of the texts' own tokens, in nats.
    first : str
        Text and token of the first difference above `atol`; empty where there is none.
    atol : float
    """

    reference: str
    candidate: str
    texts: str
    gates: GateReport
    logprobs: int
    bits: bool
    max_difference: float
    first: str
    atol: float

    @property
    def agreed(self) -> bool:
        """Whether no gate failed, and each limit could be judged."""
        return self.gates.verdict == "pass"

    def __str__(self) -> str:
        bits = "the same bits" if self.bits else f"differ by at most {self.max_difference:.3g} nats"
        first = f", first by more than {self.atol:g} in {self.first}" if self.first else ""
        lines = [f"{self.candidate}", f"against {self.reference}, on {self.texts}", str(self.gates)]
        return printable("\n".join([*lines, f"{self.logprobs} logprobs: {bits}{first}"]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines

        return fragment((fragment_lines(str(self).split("\n")),))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": "xpuruntime.generation_comparison/1", "agreed": self.agreed, **plain}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)


def compare_generations(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    device: str | None = None,
    texts: str | os.PathLike[str] | Sequence[Sequence[int] | str] | None = None,
    new_tokens: int = 16,
    atol: float = 1e-3,
) -> GenerationComparison:
    """Compare what two language models in folders say about the same tokens, and which tokens they generate.

    Parameters
    ----------
    reference, candidate : path
        Folders, as for `GenerationSession`; each runs on the engine of its format.
    policy, device : optional
        As for `GenerationSession`, of both. ``verify.generation`` of the policy has texts and limits.
    texts : path or sequence of token ids or str, optional
        In place of those of the policy. A string is encoded by the reference's tokenizer for both. Default: random
        tokens of the smaller vocabulary.
    new_tokens : int
        How many greedy tokens after the first half of each text are compared, as a report.
    atol : float
        Difference of logprobs, in nats, of which the first is named.

    Returns
    -------
    GenerationComparison

    Raises
    ------
    InputError
        A text has fewer than two tokens, or does not fit a context or vocabulary.
    XpuRuntimeError
        As `GenerationSession`.
    """
    check_types({"new_tokens": COUNT}, {"new_tokens": new_tokens})
    with (
        GenerationSession(reference, policy, device=device) as first,
        GenerationSession(candidate, policy, device=device) as second,
    ):
        limits = first.policy.verify.generation if first.policy.verify else None
        ids, origin = _texts(texts, limits, first, second)
        sources = _Source(first), _Source(second)
        stated = {"top1": limits.top1, "kl": limits.kl, "perplexity": limits.perplexity} if limits else _LIMITS
        gates = check_gates(*sources, {**stated, "tokens": new_tokens}, texts=ids)
        bits, largest, text, count = True, 0.0, "", 0
        for number, tokens in enumerate(ids):
            rows = [source.logprobs(tokens) for source in sources]
            size = min(map(len, rows))
            if rows[0].shape[1] != rows[1].shape[1]:
                bits, largest, text = False, float("inf"), text or f"the vocabulary of text {number}"
                continue
            bits = bits and np.array_equal(rows[0][-size:], rows[1][-size:])
            own = [row[-size:][np.arange(size), tokens[-size:]] for row in rows]
            off = np.abs(own[0] - own[1])
            count += size
            largest = max(largest, float(off.max()))
            above = np.flatnonzero(~(off <= atol))
            if len(above) and not text:
                text = f"token {len(tokens) - size + int(above[0])} of text {number}"
        return GenerationComparison(
            reference=_told(first),
            candidate=_told(second),
            texts=origin,
            gates=gates,
            logprobs=count,
            bits=bits,
            max_difference=largest,
            first=text,
            atol=atol,
        )


class _Source:
    """A session that runs the first half of a text at once, and the rest over its cache, as a generation does."""

    def __init__(self, session: GenerationSession) -> None:
        self._session = session
        self._known: dict[tuple[int, ...], Any] = {}

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = normalized(self._session.logprobs(list(tokens), prefill=max(1, len(tokens) // 2)))
        result: np.ndarray[Any, Any] = self._known[key]
        return result

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        return list(self._session.generate(list(tokens), count))


def _told(session: GenerationSession) -> str:
    return f"{session.model.path} on {session.plan.engine}@{session.plan.device}"


def _texts(
    stated: Any, limits: VerifyGeneration | None, first: GenerationSession, second: GenerationSession
) -> tuple[list[list[int]], str]:
    if stated is None and limits is not None:
        stated = limits.text
    if stated is None:
        facts = [session.model.source for session in (first, second)]
        length = min(_LENGTH, *(fact.context // 2 for fact in facts))
        draw = np.random.default_rng(0)
        most = min(fact.vocabulary for fact in facts)
        return draw.integers(0, most, (_TEXTS, max(2, length))).tolist(), "random tokens"
    listed = isinstance(stated, (list, tuple))
    texts, origin = (stated, "the caller's texts") if listed else (read_texts(stated).texts, str(stated))
    ids = [token_ids(text, first) for text in texts]
    short = next((number for number, tokens in enumerate(ids) if len(tokens) < 2), None)
    if short is not None or not ids:
        where = "there is no text" if short is None else f"text {short} has {len(ids[short])} tokens"
        raise InputError(where, fix="give texts of two tokens or more")
    return ids, origin
