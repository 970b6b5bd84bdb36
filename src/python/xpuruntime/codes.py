# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Code`: enumerations of the words that programs read, each with the sentence that it stands for."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class Code(enum.StrEnum):
    """A word of a closed list. It is a string: it compares, hashes, prints and is written as the word itself."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> Self:
        """Make a member of its word and its meaning."""
        code = str.__new__(cls, word)
        code._value_ = word
        code.meaning = meaning
        return code

    __repr__ = str.__repr__
