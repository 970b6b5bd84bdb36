# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks of a distributed step: the first decides how often each variant runs and which one wins, for all."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import EngineError
from xpuruntime.printable import error_line, printable
from xpuruntime.pytorch.rank_agreement import RankAgreement

if TYPE_CHECKING:
    from xpuruntime.measuring.rounds import Sampler
    from xpuruntime.policies import KernelPolicy


class _Turn(NamedTuple):
    name: str
    calls: int
    samples: int


class Ranks(RankAgreement):
    """The processes that do a step together; one process is a group of its own.

    A step has collectives, so that all ranks have to do the same number of steps in the same order.
    """

    def agree(self, what: str, do: Callable[[], Any]) -> Any:
        """Do something on every rank, and return what it returns here."""
        if self.count == 1:
            return do()
        result, failure = None, None
        try:
            result = do()
        except Exception as error:
            failure = error
            self.note(f"{what}: {_shown(error)}")
        reasons = self.gather("" if failure is None else _shown(failure))
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
        if failure is not None and len(failed) == 1:
            raise failure
        if failed:
            named = "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
            raise EngineError(
                f"tune: failed in {what}, so rank {self.rank} stops. {named}. Fix: see the errors of these"
            ) from failure
        return result

    def check_variants(self, policies: Mapping[str, KernelPolicy | None]) -> None:
        """Refuse ranks that differ in variants. Raises InputError on all of them."""
        facts = {"variants": ", ".join(policies)}
        for name, policy in policies.items():
            if policy is not None:
                facts[f"for {name}"] = json.dumps(policy.to_plain(), sort_keys=True, default=str)
        self.check_same(facts)

    def leading(self, variants: Mapping[str, Sampler]) -> dict[str, Sampler]:
        """Return variants for the first rank whose turns the others follow."""
        if self.count == 1:
            return dict(variants)

        def led(name: str, sampler: Sampler) -> Sampler:
            def turn(calls: int, samples: int) -> Sequence[float]:
                self.share(_Turn(name, calls, samples))
                return self.agree(f"steps of {name!r}", lambda: sampler(calls, samples))  # type: ignore[no-any-return]

            return turn

        return {name: led(name, sampler) for name, sampler in variants.items()}

    def lead(self, measure: Callable[[], Any]) -> Any:
        """Measure on the first rank, and have the others stop with it."""
        result = measure()
        self.share(None)
        return result

    def follow(self, variants: Mapping[str, Sampler]) -> None:
        """Do the turns that the first rank has them do, until it has measured enough."""
        while (turn := self.share(None)) is not None:
            step = functools.partial(variants[turn.name], turn.calls, turn.samples)
            self.agree(f"steps of {turn.name!r}", step)


def _shown(error: Exception) -> str:
    return printable(error_line(error, named=True))[:500]
