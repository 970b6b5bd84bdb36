# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The fuzzing loop: ``XPURUNTIME_FUZZ_CASES`` seeded cases, or as many as ``XPURUNTIME_FUZZ_SECONDS`` allow."""

from __future__ import annotations

import json
import os
import random
import resource
import time
import unicodedata
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds of a test; zero, where only cases count.
SECONDS = float(os.environ.get("XPURUNTIME_FUZZ_SECONDS") or 0)
#: Cases of a test, at least.
CASES = int(os.environ.get("XPURUNTIME_FUZZ_CASES") or 40)
#: The first seed, for a run over other cases.
FIRST = int(os.environ.get("XPURUNTIME_FUZZ_SEED") or 0)
#: Seconds that a case may take, where tests run by seconds.
SLOWEST = 10.0
#: MiB by which one test may raise the process's peak memory.
MOST_MIB = 1500

#: Numbers at which programs break.
NUMBERS = (0, 1, -1, 2, 7, 8, 31, 64, 127, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1)
#: Texts at which they do.
TEXTS = (
    "", " ", "\0", "\x1b[2J\x1b]0;owned\x07", "\u202egnp.exe", "\x9b31m", "a/b", "..", "../../etc/passwd", "%s{0}",
    "-1", "None", "?", "9" * 5000, "x" * 3000, "\ufffd", "N + 1", "N * N * N // 0", "xpuruntime.policy",
    "[red]x[/blue]", "<script>alert(1)</script>", "cuda:99999999999", "é", "가중치", "0x10", "1e999", "nan",
)  # fmt: skip


def cases() -> Iterator[tuple[int, random.Random]]:
    """Yield seeds with their generators: all cases, and further ones until the time is over."""
    end = time.monotonic() + SECONDS
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed = FIRST
    while seed < FIRST + CASES or time.monotonic() < end:
        yield seed, random.Random(seed)
        seed += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MOST_MIB, f"the peak memory grew by {grown:.0f} MiB over {seed - FIRST} cases"


def expect_ours(seed: int, call: Callable[[], Any], *also: type[BaseException]) -> Any:
    """Call, and return the result; errors of the project's own tree, and those of `also`, are fine.

    Every other exception fails the test with the seed, and so do a message that holds control characters and a case
    that takes too long.
    """
    start = time.monotonic()
    result, message = None, "a result: "
    try:
        result = call()
    except XpuRuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    except also:
        pass
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}") from error
    spent = time.monotonic() - start
    assert not message.endswith(": ") or message == "a result: ", f"seed {seed}: {message} without a text"
    assert not controls(message), f"seed {seed}: control characters in {message!r}"
    assert not SECONDS or spent < SLOWEST, f"seed {seed} took {spent:.1f} s"
    return result


def controls(text: str) -> list[str]:
    """Return the characters that steer a terminal or reorder text."""
    bidi = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return [c for c in text if (unicodedata.category(c) == "Cc" and c not in "\n\t") or c in bidi]


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some changed, cut out, repeated, or cut off."""
    choices = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not choices:
            break
        at = rng.randrange(len(choices))
        kind = rng.randrange(6)
        if kind == 0:
            choices[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            choices[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del choices[at : at + rng.randint(1, 16)]
        elif kind == 3:
            choices[at:at] = choices[at : at + rng.randint(1, 64)]
        elif kind == 4:
            choices[at:at] = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:200]
        else:
            del choices[at:]
    return bytes(choices)


def change_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value in which one place holds something else, is missing, or is doubled."""
    value = json.loads(json.dumps(value))
    spots: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for key, inner in one.items() if isinstance(one, dict) else enumerate(one):
            spots.append((one, key))
            if isinstance(inner, (dict, list)):
                waiting.append(inner)
    for _ in range(rng.randint(1, 3)):
        if not spots:
            return any_json(rng)
        holder, key = rng.choice(spots)
        kind = rng.randrange(5)
        try:
            if kind == 0 and isinstance(holder, dict):
                del holder[key]
            elif kind == 1 and isinstance(holder, dict):
                holder[rng.choice(TEXTS)] = holder[key]
            elif kind == 2 and isinstance(holder, list):
                holder.extend(holder[:100])
            else:
                holder[key] = any_json(rng)
        except (KeyError, IndexError):  # an earlier change took the place away
            continue
    return value


def any_json(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON value of any kind."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice((0.5, -0.0, 1e308, -1e-300, 3.0))
    if kind in (2, 3):
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return rng.choice(([], {}, [[]], {"": {}}))
    if kind == 6:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(TEXTS): any_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    deep: Any = rng.choice(NUMBERS)
    for _ in range(rng.choice((5, 50, 900))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep
