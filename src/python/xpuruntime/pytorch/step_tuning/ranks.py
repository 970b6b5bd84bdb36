# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks of a distributed step: the first decides how often each variant runs and which one wins, for all."""

from __future__ import annotations

import datetime
import functools
import json
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from xpuruntime.error_text import error_line
from xpuruntime.errors import EngineError, InputError
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from xpuruntime.measuring.rounds import Sampler
    from xpuruntime.policies import KernelPolicy

__all__ = ["Ranks"]


class _Turn(NamedTuple):
    """What the first rank asks the others to do: a number of steps of a variant, or to stop, with why."""

    name: str = ""
    calls: int = 0
    samples: int = 0
    failure: str = ""


class Ranks:
    """The processes that do a step together; one process is a group of its own.

    A step has collectives, so that all ranks have to do the same number of steps in the same order. What they agree on
    goes through a group of its own: a step that broke off leaves collectives of the step's group open. Where a rank
    fails, all raise; where one ends or is silent for `timeout` seconds, the others do.
    """

    def __init__(self, timeout: float) -> None:
        self.count = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        self.rank = distributed.get_rank() if self.count > 1 else 0
        self._timeout = timeout
        self._group: Any = None
        #: Whether the other ranks know already that this one stops.
        self._all_know = False

    def __enter__(self) -> Ranks:
        if self.count > 1 and distributed.is_gloo_available():
            try:
                within = datetime.timedelta(seconds=self._timeout)
                self._group = distributed.new_group(backend="gloo", timeout=within)
            except Exception as error:  # of the store that ranks meet in, or of gloo
                raise EngineError(
                    f"tune: rank {self.rank} did not meet the other ranks within {self._timeout:g} s: {_shown(error)}. "
                    "Fix: call tune on all of them, raise rank_timeout, or set GLOO_SOCKET_IFNAME where gloo finds no "
                    "network interface"
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        if group is not None:  # which ends the waiting of ranks that are told nothing else
            distributed.destroy_process_group(group)

    def agree(self, what: str, do: Callable[[], Any]) -> Any:
        """Do something on every rank, and return what it returns here."""
        if self.count == 1:
            return do()
        found, failure = None, None
        try:
            found = do()
        except Exception as error:
            failure = error
        reasons = self.gather("" if failure is None else _shown(failure))
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
        self._all_know = bool(failed)
        if failure is not None and len(failed) == 1:
            raise failure
        if failed:
            raise self._failed(what, failed) from failure
        return found

    def check_same(self, device: torch.device, policies: Mapping[str, KernelPolicy | None]) -> None:
        """Refuse ranks that differ in device, libraries or variants. Raises InputError on all of them."""
        facts = _facts(device, policies)
        for rank, other in enumerate(self.gather(facts)):
            for key in dict.fromkeys((*facts, *other)):
                if other.get(key) != facts.get(key):
                    msg = (
                        f"rank {rank} has {key} {other.get(key)!r}, and rank {self.rank} has {facts.get(key)!r}: what "
                        "is measured here holds for ranks of one kind. Fix: use the same devices, libraries, launches "
                        "and kernels on all ranks"
                    )
                    raise InputError(msg)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises EngineError where a rank is gone."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        self._wait(lambda: distributed.all_gather_object(found, value, group=self._group))
        return found

    def share(self, value: Any) -> Any:
        """Return the value of the first rank. Raises EngineError where a rank is gone."""
        if self.count == 1:
            return value
        box = [value]
        self._wait(lambda: distributed.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

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
        try:
            found = measure()
        except Exception as error:  # of what only this rank does, such as a callback
            if self.count > 1 and not self._all_know:
                self.share(_Turn(failure=_shown(error)))
            raise
        if self.count > 1:
            self.share(None)
        return found

    def follow(self, variants: Mapping[str, Sampler]) -> None:
        """Do the turns that the first rank asks for, until it has measured enough."""
        while (turn := self.share(None)) is not None:
            if turn.failure:
                raise self._failed("measuring", {0: turn.failure})
            step = functools.partial(variants[turn.name], turn.calls, turn.samples)
            self.agree(f"steps of {turn.name!r}", step)

    def _failed(self, what: str, reasons: Mapping[int, str]) -> EngineError:
        """Return the error of ranks that failed; where one leaves a step, the others fail in waiting for it."""
        failed = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        return EngineError(f"tune: failed in {what}, so rank {self.rank} stops. {failed}. Fix: see the errors of these")

    def _wait(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # of a backend: a connection that was closed, or a timeout
            self._all_know = True
            raise EngineError(
                f"tune: rank {self.rank} waited for the other ranks, and one ended, or was silent for "
                f"{self._timeout:g} s: {_shown(error)}. Fix: see the output of the others; call tune on all of "
                "them; raise rank_timeout where one compiles for longer"
            ) from error


def _shown(error: Exception) -> str:
    return printable(error_line(error, named=True))[:500]


def _facts(device: torch.device, policies: Mapping[str, KernelPolicy | None]) -> dict[str, str]:
    """Return what has to be the same on all ranks."""
    from xpuruntime import __version__

    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "PyTorch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "xpuruntime": __version__,
        "variants": ", ".join(policies),
    }
    for name, policy in policies.items():
        if policy is not None:
            facts[f"for {name}"] = json.dumps(policy.to_plain(), sort_keys=True, default=str)
    return facts
