# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ZIP archives that are not trusted: how large they unpack is judged before anything is unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zipfile

__all__ = ["unpacked_too_large"]

#: Bytes that any archive may unpack to, and times its own size that a larger one may.
_FREE = 256 << 20
_TIMES = 32
_MEMBERS = 1_000_000


def unpacked_too_large(archive: zipfile.ZipFile, packed: int) -> str | None:
    """Return why an archive is not unpacked; ``None`` where its sizes are plausible.

    A member never unpacks to more than its entry states, since Python stops there.

    Parameters
    ----------
    archive : zipfile.ZipFile
    packed : int
        Bytes of the archive itself.
    """
    members = archive.infolist()
    if len(members) > _MEMBERS:
        return f"it has {len(members):,} members, and at most {_MEMBERS:,} are read"
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        return "two of its members have one name"
    total = sum(member.file_size for member in members)
    if total > max(_FREE, _TIMES * packed):
        return (
            f"it has {packed:,} bytes and unpacks to {total:,}: more than {_TIMES} times its size, and more than "
            f"{_FREE >> 20} MiB"
        )
    return None
