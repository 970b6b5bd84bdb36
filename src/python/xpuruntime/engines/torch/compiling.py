# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`torch.compile` for one session: what it makes is shared with no other policy, in this process or on disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.engines.torch.pinning import Pins
    from xpuruntime.engines.torch.program.sources import Call
    from xpuruntime.engines.torch.settings import TorchSettings

__all__ = ["compiled", "compiling_apart"]

_numbers = itertools.count(1)
#: Held while PyTorch's key of what it keeps on disk is another one.
_tagging = threading.RLock()


def compiled(module: Any, settings: TorchSettings) -> Any:
    """Return a module for `torch.compile`, with code of its own: PyTorch keeps compiled code by code object."""
    import torch

    def run(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"session_{next(_numbers)}")
    given = settings.compile
    options: dict[str, Any] = {"fullgraph": given.get("fullgraph") == "1"}
    if "compile_mode" in given:
        options["mode"] = given["compile_mode"]
    if "dynamic" in given:
        options["dynamic"] = given["dynamic"] == "1"
    return torch.compile(run, **options)


def compiling_apart(call: Call, pins: Pins) -> Call:
    """Let what is compiled for a shape be kept on disk under the session's own kernels.

    A graph has kernels built in that PyTorch's own key of it does not tell.
    """
    seen: set[Any] = set()
    tag = ""
    if pins.held is not None:
        text = json.dumps(pins.held.policy.to_dict(), sort_keys=True)
        tag = f"xpuruntime-session-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def run(tensors: Any) -> list[Any]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in seen:
            return call(tensors)
        with _tagged(tag):
            results = call(tensors)
        seen.add(key)
        return results

    return run


@contextlib.contextmanager
def _tagged(tag: str) -> Iterator[None]:
    import torch

    config = torch.compiler.config
    with _tagging:
        before = config.cache_key_tag
        config.cache_key_tag = before.partition("xpuruntime-")[0] + tag
        try:
            yield
        finally:
            config.cache_key_tag = before
