# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records that are shown as tables and text: in a terminal, in a notebook and as a page for a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import os

    from rich.console import RenderableType


class Shown:
    """What `__rich__` shows in a terminal, also as text, in a notebook and as a page."""

    __slots__ = ()
    #: Columns of the text.
    WIDTH: ClassVar[int] = 100

    def __rich__(self) -> RenderableType:
        """Return tables and text."""
        raise NotImplementedError

    def __str__(self) -> str:
        from xpuruntime.notebook import plain

        return plain(self.__rich__(), self.WIDTH)

    def __repr__(self) -> str:
        from xpuruntime.notebook import one_line

        return one_line(self)

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.evidence.page.document import render_shown
        from xpuruntime.notebook import model_path

        kind = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()
        title = " of ".join(filter(None, (kind.capitalize(), Path(model_path(self)).name)))
        return render_shown(kind, title, self._repr_html_())

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`. A crash or a full disk leaves the old file, or none.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        from xpuruntime.files.writing import write_whole

        return write_whole(path, self.to_html(), f"the page of {getattr(self, 'NOUN', 'the result')}")
