# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Threads that work while a test does something else."""

from __future__ import annotations

import threading
from contextlib import contextmanager


@contextmanager
def at_work(work, count):
    """Have `count` threads call `work` again and again until the block ends; what one of them raises is a failure."""
    errors = []
    done = threading.Event()

    def loop():
        try:
            while not done.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
