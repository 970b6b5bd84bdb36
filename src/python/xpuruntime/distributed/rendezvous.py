# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks meet in a store of PyTorch, say what they are, and get the id that rank 0 made of NCCL."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from xpuruntime.distributed.nccl import run_within
from xpuruntime.errors import EngineError, EngineUnavailable, InputError
from xpuruntime.runtime.packages import install_command

_KINDS = "'env://', 'tcp://host:port', or a torch.distributed.Store"
_TORCHRUN = "start the program with torchrun, set it, or name rank, world_size and init_method in Communicator.init"
_START = "start every rank, and see whether one failed before it came; raise timeout= if they start slowly"
#: Seconds that rank 0 keeps its store open for the others to read the id, and after an error.
_LINGER, _LINGER_FAILED = 5.0, 1.0
#: What a rank that gives up leaves in place of what it said of itself.
_GONE = "gone"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself."""

    rank: int
    world_size: int
    attempt: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    gpu: str = ""
    library: str = ""
    policy: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others."""

    id: str = ""
    members: list[Member] = []
    error: str = ""


class MeetingPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks meet."""

    store: Any = None
    host: str = ""
    port: int = 0
    kept: bool = True
    prefix: str = "xpuruntime/nccl"

    def __str__(self) -> str:
        return f"the store {type(self.store).__name__}" if self.store is not None else f"{self.host}:{self.port}"


def meeting_place(init_method: Any, environ: Mapping[str, str] | None = None) -> MeetingPlace:
    """Return where ranks meet, from ``init_method=``. Raises `InputError` naming what is missing or wrong."""
    env = os.environ if environ is None else environ
    if not isinstance(init_method, str):
        if all(callable(getattr(init_method, name, None)) for name in ("add", "set", "get", "check")):
            return MeetingPlace(store=init_method)
        raise InputError(f"init_method is {init_method!r}. Fix: give {_KINDS}")
    if init_method == "env://":
        return _from_environment(env)
    parts = urlsplit(init_method)
    if parts.scheme != "tcp":
        raise InputError(f"init_method is {init_method!r}. Fix: give {_KINDS}")
    port = None
    with suppress(ValueError):
        port = parts.port
    if not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise InputError(f"init_method is {init_method!r}. Fix: give 'tcp://host:port' with a port from 1 to 65535")
    return MeetingPlace(host=parts.hostname, port=port, kept=False)


def environment_number(name: str, environ: Mapping[str, str] | None = None) -> int:
    """Return a variable that is a whole number from 0. Raises `InputError` naming it and the fix."""
    env = os.environ if environ is None else environ
    text = env.get(name)
    if text is None:
        raise InputError(f"the environment has no {name}. Fix: {_TORCHRUN}")
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name} is {text!r} in the environment; expected a whole number from 0. Fix: {_TORCHRUN}")
    return int(text)


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return LOCAL_RANK; ``None`` where it is not set."""
    env = os.environ if environ is None else environ
    return environment_number("LOCAL_RANK", env) if "LOCAL_RANK" in env else None


def machine_identity() -> str:
    """Return text that identifies this running machine, as far as that can be known: host name and boot ID."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def meet(place: MeetingPlace, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
    """Return the id that rank 0 made with `make_id` once all ranks had joined.

    The n-th meeting of a rank in a store that others keep is the n-th of the other ranks.
    """
    meeting = _Meeting(place, member, timeout)
    try:
        return meeting.gather(make_id) if member.rank == 0 else meeting.join()
    finally:
        meeting.close()


class _Meeting:
    def __init__(self, place: MeetingPlace, member: Member, timeout: float) -> None:
        self._place, self._member, self._timeout = place, member, timeout
        self._title = f"rank {member.rank} of {member.world_size} cannot make a communicator: "
        self._deadline = time.monotonic() + timeout
        self._store: Any = None
        self._turn, self._key = 1, ""

    def join(self) -> bytes:
        pause = 0.02
        while True:
            try:
                reply = self._ask()
                if not self._is_stale(reply):
                    break
            except EngineError:
                if self._place.kept or time.monotonic() >= self._deadline:
                    raise
            # Rank 0 still had the store of the meeting before this one, and takes it down.
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
            self.close()
        # Rank 0 does not look for ranks beyond its world_size.
        others = [other for other in reply.members if other.attempt != self._member.attempt]
        reason = reply.error or _misfit(others, self._member)
        if reason:
            raise self._refused(reason)
        return bytes.fromhex(reply.id)

    def _ask(self) -> _Reply:
        self._open()
        name = f"{self._key}/rank/{self._member.rank}"
        entry = f"{name}/{self._call('add', name, 1)}"
        self._call("set", entry, _encode(self._member))
        try:
            if not self._wait(lambda: self._call("check", [f"{self._key}/result"])):
                raise self._late(f"rank 0 at {self._place} did not answer in communicator {self._turn} of this store")
        except BaseException:
            with suppress(EngineError):  # the store may be what failed
                self._call("set", entry, _GONE)
            raise
        reply = msgspec.json.decode(self._call("get", f"{self._key}/result"), type=_Reply)
        self._call("set", f"{self._key}/read/{self._member.attempt}", "read")
        return reply

    def _is_stale(self, reply: _Reply) -> bool:
        mine = [other for other in reply.members if _process(other) == _process(self._member)]
        return not self._place.kept and bool(mine) and all(other.attempt != self._member.attempt for other in mine)

    def gather(self, make_id: Callable[[], bytes]) -> bytes:
        self._open()
        joined = [self._member]
        try:
            if not self._wait(lambda: self._take_all(joined)):
                come = {member.rank for member in joined}
                missing = [str(rank) for rank in range(self._member.world_size) if rank not in come]
                named = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
                raise self._late(f"rank {named} did not come to {self._place}")
            unique_id = make_id()
        except BaseException as error:
            reason = f"rank 0 gave up: {str(error).removeprefix(self._title) or type(error).__name__}"
            with suppress(EngineError):  # the store may be what failed
                self._answer(_Reply(error=reason, members=joined), _LINGER_FAILED)
            raise
        self._answer(_Reply(id=unique_id.hex(), members=joined), _LINGER)
        return unique_id

    def _take_all(self, joined: list[Member]) -> bool:
        """Take who has come and has not left again. Returns whether all have come."""
        del joined[1:]
        for rank in range(1, self._member.world_size):
            name = f"{self._key}/rank/{rank}"
            for number in range(1, self._call("add", name, 0) + 1):
                entry = f"{name}/{number}"
                text = self._call("get", entry) if self._call("check", [entry]) else b""
                if text in (b"", _GONE.encode()):
                    continue
                new = msgspec.json.decode(text, type=Member)
                reason = _misfit(joined, new)
                joined.append(new)
                if reason is not None:
                    raise self._refused(reason)
        return len(joined) == self._member.world_size

    def _answer(self, reply: _Reply, linger: float) -> None:
        self._call("set", f"{self._key}/result", _encode(reply))
        if not self._place.kept:  # the store ends with this meeting
            self._deadline = time.monotonic() + linger
            marks = [f"{self._key}/read/{member.attempt}" for member in reply.members[1:]]
            self._wait(lambda: not marks or self._call("check", marks))

    def close(self) -> None:
        """Let go of the store: an error that is kept keeps this object, and the port would not become free."""
        self._store = None

    def _open(self) -> None:
        meeting = self._place
        self._store = meeting.store if meeting.store is not None else self._open_store()
        self._turn = self._call("add", f"{meeting.prefix}/turns/{self._member.rank}", 1) if meeting.kept else 1
        self._key = f"{meeting.prefix}/{self._turn}"

    def _open_store(self) -> Any:
        meeting, member = self._place, self._member
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise EngineUnavailable(
                f"ranks meet in a store of PyTorch at {meeting}, and it cannot be imported: {error}. Fix: "
                f"{install_command('torch')}, or pass an object with add, set, get and check as init_method=",
                engine="nccl",
            ) from None
        keeps = not meeting.kept and member.rank == 0
        options: dict[str, Any] = {"master_listen_fd": self._listen()} if keeps else {}
        if not keeps:
            self._wait_for_listener()
        left = self._deadline - time.monotonic()
        reason = "what listens there does not answer as a store"
        try:
            done, store = run_within(
                lambda: TCPStore(
                    meeting.host,
                    meeting.port,
                    is_master=keeps,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=max(1.0, left)),
                    **options,
                ),
                left,
                "xpuruntime-nccl-store",
            )
        except Exception as error:
            done, reason = False, str(error)
        if not done:
            raise self._late(f"the store at {meeting} cannot be used: {reason}")
        return store

    def _listen(self) -> int:
        """Return a socket on that address alone; PyTorch owns it then, and would listen on every address by itself."""
        meeting = self._place
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
            return socket.create_server(address[:2], family=family).detach()
        except OSError as error:
            fixes = {
                errno.EADDRINUSE: "another process listens there, a store of torch.distributed perhaps; pass "
                "init_method='tcp://host:port' with a free port",
                errno.EADDRNOTAVAIL: "it is no address of this machine; name the machine that rank 0 runs on",
            }
            fix = fixes.get(error.errno or 0, "pass an address of this machine and a free port")
            reason = f"rank 0 cannot listen on {meeting}: {error.strerror or error}"
            raise self._refused(f"{reason}. Fix: {fix}") from None

    def _wait_for_listener(self) -> None:
        """Wait here, because PyTorch's client writes to the error stream while it waits, and cannot be interrupted."""
        reason = "there was no time to ask"

        def answers() -> bool:
            nonlocal reason
            try:
                left = max(0.01, min(5.0, self._deadline - time.monotonic()))
                socket.create_connection((self._place.host, self._place.port), timeout=left).close()
            except OSError as error:
                reason = error.strerror or str(error)
                return False
            return True

        if not self._wait(answers, longest=0.25):
            who = "torchrun's store" if self._place.kept else "rank 0"
            raise self._late(f"{who} at {self._place}: {reason}")

    def _wait(self, done: Callable[[], bool], longest: float = 0.05) -> bool:
        pause = 0.002
        while not done():
            left = self._deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(longest, pause * 1.3)
        return True

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            reason = f"the store {type(self._store).__name__} failed in {method}: {error}"
            raise self._refused(f"{reason}. Fix: see whether the process that keeps it still runs") from error

    def _refused(self, reason: str) -> EngineError:
        return EngineError(f"{self._title}{reason}", engine="nccl")

    def _late(self, reason: str) -> EngineError:
        return self._refused(f"the ranks did not all meet within {self._timeout:g} s: {reason}. Fix: {_START}")


def _from_environment(env: Mapping[str, str]) -> MeetingPlace:
    host = env.get("MASTER_ADDR")
    if not host:
        raise InputError(f"the environment has no MASTER_ADDR. Fix: {_TORCHRUN}")
    port = environment_number("MASTER_PORT", env)
    if not 0 < port < 65536:
        raise InputError(f"MASTER_PORT is {port} in the environment; expected 1 to 65535. Fix: {_TORCHRUN}")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return MeetingPlace(host=host, port=port, kept=False)
    # torchrun itself listens on MASTER_PORT, and keeps a store there.
    run, restart = env.get("TORCHELASTIC_RUN_ID", "none"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return MeetingPlace(host=host, port=port, prefix=f"xpuruntime/nccl/{run}/{restart}")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _process(member: Member) -> tuple[int, int, str]:
    return member.rank, member.pid, member.host


def _misfit(members: Iterable[Member], new: Member) -> str | None:
    """Say why `new` cannot join `members`, the first of which is rank 0; ``None`` when it can."""
    known = list(members)
    first = known[0]
    if new.world_size != first.world_size:
        return (
            f"{new} says world_size {new.world_size}, and {first} says {first.world_size}. Fix: start all with one "
            "world_size, and end what is left of an earlier run"
        )
    for other in known:
        if other.rank == new.rank:
            return (
                f"two processes say they are rank {new.rank}: {other.pid} on {other.host} and {new.pid} on {new.host}. "
                "Fix: give each process a rank of its own, and end what is left of an earlier run"
            )
        if new.gpu and other.gpu == new.gpu:
            return f"{other} and {new} use the same GPU, and NCCL needs one for each rank. Fix: pass another device="
    if new.library != first.library:
        return (
            f"{new} has NCCL {new.library}, and {first} has {first.library}. Fix: install one version for all, "
            f"{install_command('nccl')}"
        )
    if new.policy != first.policy:
        return f"{new} asks for {new.policy}, and {first} for {first.policy}. Fix: pass the same config= on every rank"
    return None
