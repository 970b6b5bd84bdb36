# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Items`: how much of a request may be decoded item by item, which takes a client little to send."""

from __future__ import annotations

from xpuruntime.serving.status import ServingError, Status

__all__ = ["MOST_ITEMS", "Items"]

#: Items of one request at most: each takes about a microsecond, and a string a hundred bytes of memory.
MOST_ITEMS = 1 << 20


class Items:
    """How many more items one request may have: fields of messages, strings, inputs and outputs.

    Parameters
    ----------
    most : int
    """

    __slots__ = ("left", "most")

    def __init__(self, most: int = MOST_ITEMS) -> None:
        self.left = self.most = most

    def take(self, count: int) -> None:
        """Count so many items. Raises `ServingError` where they are too many."""
        self.left -= count
        if self.left < 0:
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"the request has more than {self.most} fields, strings and tensors together. "
                "Fix: send it in parts, and numbers as raw bytes",
            )
