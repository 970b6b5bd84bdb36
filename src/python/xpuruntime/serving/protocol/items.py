# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Items`: how much of a request may be decoded item by item, which takes a client little to send."""

from __future__ import annotations

from xpuruntime.serving.status import ServingError, Status

__all__ = ["INLINE_BYTES", "MOST_ITEMS", "Items", "NotInline"]

#: Items of one request at most, each of about a microsecond; and how many of them a tensor is.
MOST_ITEMS, _TENSOR = 1 << 20, 64
#: Items, and bytes of numbers that are converted, of a request that may be decoded in an event loop.
_INLINE_ITEMS, INLINE_BYTES = 4096, 64 << 10


class NotInline(Exception):  # noqa: N818 - a state, and no error
    """The request takes too long to decode in an event loop, and is to be decoded again in a thread."""


class Items:
    """How many more items one request may have: fields of messages, strings, parameters and tensors.

    Parameters
    ----------
    most : int
    inline : bool
        Whether the decoding holds up an event loop, and raises `NotInline` early.
    """

    __slots__ = ("inline", "left", "most")

    def __init__(self, most: int = MOST_ITEMS, *, inline: bool = False) -> None:
        self.most, self.inline = most, inline
        self.left = _INLINE_ITEMS if inline else most

    def take(self, count: int) -> None:
        """Count so many items. Raises `ServingError` where they are too many, and `NotInline`."""
        self.left -= count
        if self.left >= 0:
            return
        if self.inline:
            raise NotInline
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the request has more than {self.most} fields, strings, parameters and tensors together, where a tensor "
            f"counts as {_TENSOR}. Fix: send it in parts, and numbers as raw bytes",
        )

    def take_tensor(self) -> None:
        """Count a tensor that the request has or names."""
        self.take(_TENSOR)

    def convert(self, size: int) -> None:
        """Raise `NotInline` where so many bytes are too many to be converted in an event loop."""
        if self.inline and size > INLINE_BYTES:
            raise NotInline
