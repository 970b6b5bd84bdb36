# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rendezvous by files beside a path that all ranks see."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.distributed.rendezvous.member import Member, late, misfit, refused
from xpuruntime.files.paths import user_path
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FileRendezvous"]

#: Bytes that an xpuruntime file may have.
_MAX_BYTES = 1 << 20
_FIX = "start every rank with the same path, which all of them must see; raise timeout= if they start slowly"


class _Joining(msgspec.Struct, frozen=True):
    """What a rank writes: which session of rank 0 it joins, by what name of its own, and what it is."""

    session: str
    name: str
    member: Member


class _Result(msgspec.Struct, frozen=True):
    """What rank 0 writes in the end: whom it saw, and the id or an error."""

    session: str
    names: dict[int, str]
    id: str = ""
    error: str = ""


class FileRendezvous:
    """Ranks meet through ``PATH.session``, ``PATH.rank-N`` and ``PATH.result``, which are taken away after.

    Every start has a random name, so files that an earlier run left do no harm. Files are replaced as a whole, so no
    locks are needed, and a shared file system serves.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = user_path(path, "the rendezvous")

    def exchange(self, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
        """As `Rendezvous.exchange`."""
        run = _gather if member.rank == 0 else _join
        try:
            return run(self._path, member, make_id, timeout)
        except OSError as error:
            reason = f"{error.filename or self._path} cannot be used: {error.strerror or error}"
            raise refused(member, f"{reason}. Fix: pass a path in a folder that exists and can be written to") from None


def _gather(path: Path, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    session = secrets.token_hex(8)
    session_file, result_file = _beside(path, "session"), _beside(path, "result")
    _write(session_file, session)
    joined: dict[int, _Joining] = {}

    def answer(**words: str) -> None:
        names = {rank: joining.name for rank, joining in joined.items()}
        _write(result_file, _Result(session, names, **words))

    pause = _Pause()
    while len(joined) < member.world_size - 1:
        for rank in range(1, member.world_size):
            if rank in joined or (found := _read(_beside(path, f"rank-{rank}"), _Joining)) is None:
                continue
            if found.session != session:
                continue  # of an earlier run, or of a rank that has yet to see this session
            reason = misfit([member, *(other.member for other in joined.values())], found.member)
            joined[rank] = found
            if reason is not None:
                answer(error=reason)
                raise refused(member, reason)
        if _read(session_file, str) != session:
            raise refused(member, _two_of_one(member, f"{session_file} was written by another process"))
        if len(joined) < member.world_size - 1 and not pause.until(deadline):
            missing = [str(rank) for rank in range(1, member.world_size) if rank not in joined]
            error = late(member, timeout, f"rank {', '.join(missing)} did not come to {path}", _FIX)
            answer(error=f"rank 0 gave up: {error}")
            raise error
    made = make_id()
    answer(id=made.hex())
    # Each rank takes its file away when it has read the result.
    while any(
        (left := _read(_beside(path, f"rank-{rank}"), _Joining)) is not None and left == joined[rank] for rank in joined
    ):
        if not pause.until(deadline):
            break
    for file in (session_file, result_file):
        file.unlink(missing_ok=True)
    return made


def _join(path: Path, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
    del make_id
    deadline = time.monotonic() + timeout
    name = secrets.token_hex(8)
    own_file = _beside(path, f"rank-{member.rank}")
    pause, written, other = _Pause(), "", False
    try:
        while True:
            result = _read(_beside(path, "result"), _Result)
            # One that does not name this start is of an earlier run, or for another process of this rank.
            if written and result is not None and result.session == written:
                seen = result.names.get(member.rank)
                if seen == name:
                    if result.error:
                        raise refused(member, result.error)
                    return bytes.fromhex(result.id)
                other = seen is not None
            session = _read(_beside(path, "session"), str)
            if session is not None and session != written:
                _write(own_file, _Joining(session, name, member))
                written = session
            elif written and session == written:
                found = _read(own_file, _Joining)
                if found is not None and found.session == written and found.name != name:
                    raise refused(member, _two_of_one(member, f"{own_file} was written by {found.member}"))
            if not pause.until(deadline):
                reason = f"rank 0 did not answer at {path}" if written else f"rank 0 did not come to {path}"
                if other:
                    reason += f", where it took another process for rank {member.rank}"
                raise late(member, timeout, reason, _FIX)
    finally:
        found = _read(own_file, _Joining)
        if found is not None and found.name == name:
            own_file.unlink(missing_ok=True)


def _two_of_one(member: Member, seen: str) -> str:
    return (
        f"two processes say they are rank {member.rank}: {seen}. Fix: give each process a rank of its own, and end "
        "what is left of an earlier run"
    )


class _Pause:
    """Waits that become longer, to a twentieth of a second."""

    def __init__(self) -> None:
        self._seconds = 0.002

    def until(self, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._seconds, left))
        self._seconds = min(0.05, self._seconds * 1.3)
        return True


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _write(path: Path, value: Any) -> None:
    replace_file(path, msgspec.json.encode(value), private=False)


def _read(path: Path, kind: type[Any]) -> Any:
    """Return what a file says; ``None`` where it is not there, or is no xpuruntime file."""
    try:
        return decode_json(read_regular(path, _MAX_BYTES), kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
