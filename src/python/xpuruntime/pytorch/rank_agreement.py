# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RankAgreement`: processes of ``torch.distributed`` run the same kernels, and end together, naming who failed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import platform
import re
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xpuruntime.argument_types import NUMBER, check_types
from xpuruntime.errors import EngineError, InputError
from xpuruntime.ops import tuned_records
from xpuruntime.printable import error_line, printable
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import CONTEXT, forget_tuned_routes
from xpuruntime.pytorch.dispatch.tuning import may_measure

#: Of `rank_timeout`: how long a rank may be silent, and how long the others then have to leave by themselves.
_SILENT, _GRACE = 0.8, 0.2
#: Signs of life in a `rank_timeout`, and the most seconds between two.
_SIGNS, _LONGEST = 20, 1.0
#: How many signs of life a rank may miss after a collective has failed; each of a second at least.
_MISSED = 5
#: How an error of a collective reads whose peer is gone.
_OF_COLLECTIVES = re.compile(
    r"gloo|NCCL|CUDA error|Connection (closed|reset)|process group|Broken pipe|store", re.IGNORECASE
)

_entered = itertools.count()
ValueT = TypeVar("ValueT")


def several_ranks() -> bool:
    """Say whether this process is one of several of ``torch.distributed``."""
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


class _Sign(NamedTuple):
    """What a rank writes of itself: how often it wrote, its steps and collectives, and why it ends."""

    written: int = 0
    steps: int = 0
    collectives: int = 0
    left: bool = False
    #: The rank that failed, and how; of another rank where this one ends because of it.
    failed: int = -1
    reason: str = ""
    note: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        return self.steps, self.collectives


class RankAgreement:
    """Context in which the processes of ``torch.distributed`` run the same kernels and end together.

    Kernels that a policy leaves to measured times (``auto``) are measured by the rank that first needs them, and the
    others take what it chose. Where a rank raises, ends, or is behind the others for `rank_timeout` seconds, the others
    raise an `EngineError` that names it; a rank that is blocked in a collective, and so cannot raise, prints that error
    and ends its process with the exit code 1. Nothing of the block is stored then.

    Parameters
    ----------
    rank_timeout : float
        Seconds after which the others have ended. A rank that compiles, measures or saves for longer while the others
        wait for it is taken for one that hangs.

    Raises
    ------
    InputError
        On entry, where ranks differ in device, PyTorch or xpuruntime; inside, where a rank has another library than
        the one that has measured a kernel. Names the rank.
    EngineError
        Another rank failed, ended, or was silent.

    Notes
    -----
    All ranks enter it together, in the default process group; in a single process it does nothing. What ranks say to
    each other goes through the store of the process group. Steps are those of optimizers, and of captured steps.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.RankAgreement(rank_timeout=60), xrt_torch.kernel_policy(matmul="auto"):
    ...     product = torch.ones(2, 3) @ torch.ones(3, 2)
    """

    #: The innermost one of this process.
    active: RankAgreement | None = None

    def __init__(self, rank_timeout: float = 300.0) -> None:
        check_types({"rank_timeout": NUMBER}, {"rank_timeout": rank_timeout})
        if not 0 < rank_timeout < float("inf"):
            raise InputError(f"rank_timeout is {rank_timeout!r}. Fix: give seconds above 0, such as 300.0")
        self.count = distributed.get_world_size() if several_ranks() else 1
        self.rank = distributed.get_rank() if self.count > 1 else 0
        self._timeout = rank_timeout
        self._others = [rank for rank in range(self.count) if rank != self.rank]
        self._store: Any = None
        self._guard = threading.Lock()
        self._mine = _Sign()
        self._seen: dict[int, tuple[_Sign, float, float]] = {}
        #: The rank that failed, and how.
        self._failure: tuple[int, str] | None = None
        self._ended = threading.Event()
        self._gathered = 0
        self._outer: RankAgreement | None = None
        self._times: tuned_records.SharedTimes | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        if self.count == 1:
            return self
        store = _private_api.default_store()()
        clone = getattr(store, "clone", None)  # a connection of its own, so that nothing waits for another thread
        self._store = distributed.PrefixStore(f"xpuruntime/agreement/{next(_entered)}", clone() if clone else store)
        now = time.monotonic()
        self._seen = {rank: (_Sign(), now, now) for rank in self._others}
        threading.Thread(target=self._watch, name="xpuruntime-ranks", daemon=True).start()
        self._outer, RankAgreement.active = RankAgreement.active, self
        try:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.stepped())
            self.check_same(_facts())
            CONTEXT.times.clear()
            forget_tuned_routes()
            self._times = tuned_records.SharedTimes(_Exchange(self))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        RankAgreement.active = self._outer
        if self._hook is not None:
            self._hook.remove()
        if self._times is not None:
            self._times.close()
        if error is not None and self._failure is None and _is_of_collective(error):
            self._find_lost()
        if error is None and self._failure is None:
            self._leave()
        with self._guard:
            failed, reason = self._failure or (-1, "")
            if error is not None and self._failure is None:
                failed, reason = self.rank, _shown(error)
            self._mine = self._mine._replace(left=True, failed=failed, reason=reason)
        self._ended.set()
        if error is not None or self._failure is not None:
            with contextlib.suppress(Exception):  # of a store that is gone
                self._write()
        self._store = None
        if self._failure is not None and self._failure[0] != self.rank and (error is None or _is_of_collective(error)):
            raise self._error() from error

    def _leave(self) -> None:
        """Say that this rank has done all; the first one, which may keep the store, waits until all have."""
        with self._guard:
            self._mine = self._mine._replace(left=True)
        try:
            self._write()
            while self.rank == 0 and self._failure is None and not all(sign.left for sign, _, _ in self._seen.values()):
                time.sleep(0.005)
                self._look()
        except Exception as error:
            self._store_lost(error)

    def note(self, text: str) -> None:
        """Have others that wait for this rank say what it met."""
        with self._guard:
            self._mine = self._mine._replace(note=printable(text)[:300])

    def stepped(self) -> None:
        """Say that this rank begins a step. Raises EngineError where another rank has failed."""
        with self._guard:
            self._mine = self._mine._replace(steps=self._mine.steps + 1)
        self.check()

    def check(self) -> None:
        """Raise EngineError where a rank has failed."""
        if self._failure is not None:
            raise self._error()

    def gather(self, value: ValueT) -> list[ValueT]:
        """Return the values of all ranks. Raises EngineError where a rank is gone."""
        if self.count == 1:
            return [value]
        self._gathered += 1
        with self._guard:
            self._mine = self._mine._replace(steps=self._mine.steps + 1)
        keys = [f"value/{self._gathered}/{rank}" for rank in range(self.count)]
        self._set(keys[self.rank], pickle.dumps(value))
        self._wait_for(keys, range(self.count))
        return [pickle.loads(self._store.get(key)) for key in keys]

    def share(self, value: ValueT) -> ValueT:
        """Return the value of the first rank. Raises EngineError where it is gone."""
        if self.count == 1:
            return value
        self._gathered += 1
        with self._guard:
            self._mine = self._mine._replace(steps=self._mine.steps + 1)
        key = f"value/{self._gathered}/0"
        if self.rank == 0:
            self._set(key, pickle.dumps(value))
            return value
        self._wait_for([key], [0])
        return cast("ValueT", pickle.loads(self._store.get(key)))

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse ranks that differ in facts. Raises InputError on all of them, which names those of a minority."""
        everyone = self.gather(dict(facts))
        for key in dict.fromkeys(key for facts in everyone for key in facts):
            values = [facts.get(key) for facts in everyone]
            usual = max(values, key=values.count)  # the first one of the most frequent
            odd = [rank for rank, value in enumerate(values) if value != usual]
            if odd:
                ranks = ", ".join(f"rank {rank} has {key} {values[rank]!r}" for rank in odd)
                raise InputError(
                    f"{ranks}, and rank {values.index(usual)} has {usual!r}. What is measured on a rank holds for "
                    "ranks of one kind. Fix: use the same devices, libraries, launches and kernels on all ranks"
                )

    def refuse(self, reason: str) -> None:
        """Have all ranks fail, as this one differs. Raises InputError."""
        with self._guard:
            self._mine = self._mine._replace(failed=self.rank, reason=reason)
        self._write()
        self._failure = self._failure or (self.rank, reason)
        raise InputError(f"rank {self.rank} {reason}. Fix: use the same devices, libraries and packages on all ranks")

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except Exception as error:
            self._store_lost(error)
            raise self._error() from error

    def _wait_for(self, keys: list[str], ranks: Any) -> None:
        """Wait until ranks have set keys. Raises EngineError where they do not."""
        until, pause = time.monotonic() + _SILENT * self._timeout, 2e-4
        while True:
            failed = self._failure is not None
            try:
                if self._store.check(keys):
                    return
            except Exception as error:
                self._store_lost(error)
            if failed:
                self.check()
            if time.monotonic() > until and self._failure is None:
                missing = [rank for key, rank in zip(keys, ranks, strict=True) if not self._store.check([key])]
                if missing:
                    self._fail(missing[0], self._silence(missing[0], _SILENT * self._timeout))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _write(self) -> None:
        with self._guard:
            world = distributed.group.WORLD
            number = -1 if world is None else _private_api.collective_number(world)()
            self._mine = self._mine._replace(written=self._mine.written + 1, collectives=number)
            sign = self._mine
        self._store.set(f"sign/{self.rank}", json.dumps(sign))

    def _look(self) -> None:
        now, limit = time.monotonic(), _SILENT * self._timeout
        for rank in self._others:
            sign, living, moved = self._seen[rank]
            if self._store.check([f"sign/{rank}"]):
                new = _Sign(*json.loads(self._store.get(f"sign/{rank}")))
                living = now if new.written != sign.written else living
                moved = now if new.progress != sign.progress else moved
                self._seen[rank] = sign, living, moved = new, living, moved
            if sign.failed not in (-1, self.rank):
                self._fail(sign.failed, sign.reason)
            elif not sign.left and now - living > limit:
                self._fail(rank, self._silence(rank, limit))
        most = max([self._mine.progress, *(sign.progress for sign, _, _ in self._seen.values())])
        for rank, (sign, _, moved) in self._seen.items():
            if sign.progress < most and now - moved > limit:
                self._fail(rank, "has left, while others go on" if sign.left else self._silence(rank, limit))

    def _watch(self) -> None:
        pause = min(self._timeout / _SIGNS, _LONGEST)
        while self._failure is None:
            try:
                self._write()
                self._look()
            except Exception as error:
                if not self._ended.is_set():
                    self._store_lost(error)
            if self._ended.wait(pause):
                return
        with self._guard:
            rank, reason = self._failure
            self._mine = self._mine._replace(failed=rank, reason=reason)
        with contextlib.suppress(Exception):  # of a store that is gone
            self._write()
        if not self._ended.wait(_GRACE * self._timeout):
            sys.stderr.write(f"xpuruntime: {self._error()}\n")
            sys.stderr.flush()
            os._exit(1)  # a collective that waits for a rank that is gone cannot be left otherwise

    def _fail(self, rank: int, reason: str) -> None:
        notes = [f"rank {other} noted: {sign.note}" for other, (sign, _, _) in self._seen.items() if sign.note]
        if self._failure is None:
            self._failure = rank, "; ".join([reason, *notes])

    def _silence(self, rank: int, seconds: float) -> str:
        if rank == self.rank:
            return f"was silent for {seconds:g} s"
        sign, living, _ = self._seen[rank]
        if time.monotonic() - living >= seconds / 2:
            return f"gave no sign of life for {seconds:g} s: its process has ended or is stopped"
        return f"was silent for {seconds:g} s in step {sign.steps}, after {sign.collectives} collectives"

    def _store_lost(self, error: Exception) -> None:
        keeper = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        self._fail(0, f"ended, or the store that {keeper} keeps: {_shown(error)}")

    def _find_lost(self) -> None:
        """Find the rank because of which a collective has failed: one that says so, or gives no sign of life."""
        begun = time.monotonic()
        patience = min(_SILENT * self._timeout, _MISSED * _LONGEST)
        before = {rank: sign.written for rank, (sign, _, _) in self._seen.items()}
        while self._failure is None and not self._ended.wait(0.02):
            silent = [  # one sign may have been written before
                rank for rank, (sign, _, _) in self._seen.items() if sign.written < before[rank] + 2 and not sign.left
            ]
            if not silent:
                return
            if time.monotonic() - begun > patience:
                self._fail(silent[0], self._silence(silent[0], patience))

    def _error(self) -> EngineError:
        rank, reason = self._failure or (self.rank, "")
        return EngineError(
            f"rank {rank} failed, so rank {self.rank} stops. Rank {rank}: {reason}. Fix: see the output of that rank; "
            "have all ranks do the same steps; raise rank_timeout where one compiles, measures or saves for longer"
        )


class _Exchange:
    """Times that the rank which first needs them measures for all."""

    def __init__(self, ranks: RankAgreement) -> None:
        self._ranks = ranks
        #: What this rank measures, and what it has given of that.
        self._own: set[str] = set()
        self._given: set[str] = set()

    def take(self, key: str) -> tuple[int, dict[str, Any]] | None:
        """Return which rank has measured, and what; ``None`` where this one is to measure, or cannot wait."""
        store = self._ranks._store
        if self.measures(key):
            return None
        times = f"times/{key}"
        if not store.check([times]):
            if not may_measure() or self._claim(key):
                return None
            claimed = f"claim/{key}"
            self._ranks._wait_for([claimed], [0])
            self._ranks._wait_for([times], [int(store.get(claimed))])
        document: tuple[int, dict[str, Any]] = tuple(json.loads(store.get(times)))
        return document

    def _claim(self, key: str) -> bool:
        store, claimed = self._ranks._store, f"claim/{key}"
        if store.add(f"{claimed}/count", 1) != 1:
            return False
        self._own.add(key)
        store.set(claimed, str(self._ranks.rank))
        return True

    def measures(self, key: str) -> bool:
        return key in self._own and key not in self._given

    def give(self, key: str, entry: Mapping[str, Any]) -> None:
        if self.measures(key) or (key not in self._own and self._claim(key)):
            self._given.add(key)
            self._ranks._set(f"times/{key}", json.dumps([self._ranks.rank, dict(entry)]).encode())

    def refuse(self, rank: int, key: str, differences: str) -> None:
        """Have all ranks fail, since this one has other libraries than the rank that has measured. Raises."""
        self._ranks.refuse(f"cannot run what rank {rank} has measured for {key}: {differences}")


def note_step() -> None:
    """Say that a step begins, to the agreement that holds, if one does."""
    if RankAgreement.active is not None:
        RankAgreement.active.stepped()


def _is_of_collective(error: BaseException) -> bool:
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, EngineError)
        and bool(_OF_COLLECTIVES.search(f"{type(error).__name__} {error}"))
    )


def _shown(error: BaseException) -> str:
    return printable(error_line(error, named=True))[:500]


def _facts() -> dict[str, str]:
    """Return what has to be the same on all ranks."""
    from xpuruntime import __version__

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "PyTorch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "xpuruntime": __version__,
    }
