# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Console script ``xrt``: it lies outside of `xpuruntime`, whose import a Ctrl-C can hit.

Its own import has Ctrl-C end the process with 130 and no traceback, until the command line takes signals over.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself imports much first
import gc
import os

__all__ = ["main"]

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored, as in the background
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))


def main() -> None:
    """Run the command line and exit."""
    gc.set_threshold(100_000)  # else the modules of a command are searched for garbage again and again
    from xpuruntime.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # and once more at the exit
