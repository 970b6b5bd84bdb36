# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is open, for who watches it: told once, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from xpuruntime.runtime.session_registry import note_bound, note_open, open_bindings, open_sessions, set_open_hook


class Session:
    def memory(self) -> dict[str, int]:
        return {}


class Binding:
    pass


def test_what_is_opened_is_told_while_somebody_watches() -> None:
    told: list[tuple[Any, Any]] = []
    session, binding = Session(), Binding()
    note_open(session)
    set_open_hook(lambda *what: told.append(what))
    try:
        second = Session()
        note_open(second)
        note_bound(session, binding)
    finally:
        set_open_hook(None)
    note_open(Session())
    assert told == [(second, None), (session, binding)]
    assert session in open_sessions()
    assert (session, binding) in open_bindings()


def test_nothing_is_kept_alive() -> None:
    session, binding = Session(), Binding()
    note_open(session)
    note_bound(session, binding)
    known = weakref.ref(session)
    del session
    gc.collect()
    assert known() is None
    assert all(one is not binding for _, one in open_bindings())
