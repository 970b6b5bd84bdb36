# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The rules that the operators of one session decide by."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.rewriting.asking import module_of
from xpuruntime.evidence.carried.policy import literally

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xpuruntime import _core
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.policies.kernel_rule import KernelRule

__all__ = ["THREADS", "session_rules", "threads_of_ours"]

#: How many threads the kernels of the CPU share; see the reference of environment variables.
THREADS = "XPURUNTIME_CPU_THREADS"


def threads_of_ours() -> int | None:
    """Return how many threads the environment gives to our kernels on the CPU; ``None`` where it says nothing."""
    text = os.environ.get(THREADS, "")
    return int(text) if text.isdecimal() else None


def session_rules(
    policy: KernelPolicy, nodes: Iterable[str], *, strict: bool, log: _core.DecisionLog | None = None
) -> _core.OnnxRuntimeRules:
    """Return a policy's rules under a name that nodes can carry; keep it until the sessions are open.

    Parameters
    ----------
    policy : KernelPolicy
    nodes : iterable of str
        Names of the rewritten nodes.
    strict : bool
        Whether a kernel that cannot serve the sizes of a run is an error, instead of another one serving.
    log : DecisionLog, optional
        Where what is decided for these nodes is recorded, instead of the log of the process.
    """
    from xpuruntime import _core
    from xpuruntime.ops.rules import compile_placed

    placed = _placed(policy, tuple(nodes))
    return _core.OnnxRuntimeRules(compile_placed(policy, placed, "strict" if strict else "prefer", log))


def _placed(policy: KernelPolicy, nodes: tuple[str, ...]) -> Iterator[tuple[int, KernelRule]]:
    """Yield the rules with their places. An operator knows its node and no module: rules for modules name the nodes."""
    for place, rule in enumerate(policy.rules):
        match = rule.match
        if match.module is None:
            yield place, rule
            continue
        for name in nodes:
            module = module_of(name)
            inside = bool(module) and fnmatchcase(module, match.module)
            if inside and (match.node is None or fnmatchcase(name, match.node)):
                yield place, rule.replace(match=match.replace(module=None, node=literally(name)))
