# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Log of NCCL's choices: the lines of it that name algorithm, protocol and channels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.argument_types import PATH, check_types
from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import read_regular

if TYPE_CHECKING:
    import os

__all__ = ["CollectiveChoice", "read_choices"]

_LINE = re.compile(
    r"\b(?P<collective>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce): (?P<bytes>\d+) Bytes -> "
    r"Algo (?P<algorithm>\S+) proto (?P<protocol>\S+) (?:channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}|time)"
)
_COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
#: Bytes that a log may have.
_MAX_BYTES = 1 << 30
_ALGORITHMS = {"COLLNET_DIRECT": "collnet_direct", "COLLNET_CHAIN": "collnet_chain", "NVLS_TREE": "nvls_tree"}


class CollectiveChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How NCCL ran one collective, in the words of `CollectivePolicy`.

    Attributes
    ----------
    collective : str
        Such as ``"all_reduce"``.
    bytes : int
        Of the array of one rank.
    algorithm, protocol : str
    channels : int or None
        Thread blocks; ``None`` where NCCL does not say.
    """

    collective: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int | None = None


def read_choices(path: str | os.PathLike[str]) -> list[CollectiveChoice]:
    """Return what NCCL wrote of its choices to a log, in order.

    Rank 0 writes them, from NCCL 2.23 on, when the process was started with ``NCCL_DEBUG=INFO``,
    ``NCCL_DEBUG_SUBSYS=TUNING`` and ``NCCL_DEBUG_FILE=path``.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    InputError
        The file cannot be read.
    """
    check_types({"path": PATH}, {"path": path})
    try:
        text = read_regular(path, _MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {reason_of(error)}. Fix: set NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=TUNING and "
            "NCCL_DEBUG_FILE to this path before the process starts"
        ) from None
    return [
        CollectiveChoice(
            collective=_COLLECTIVES[found["collective"]],
            bytes=int(found["bytes"]),
            algorithm=_ALGORITHMS.get(found["algorithm"], found["algorithm"].lower()),
            protocol=found["protocol"].lower(),
            channels=None if found["low"] is None else int(found["high"]) - int(found["low"]) + 1,
        )
        for found in _LINE.finditer(text)
    ]
