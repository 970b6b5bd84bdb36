# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules of modules that matched no call: a path that no module has is reported, and does not just do nothing."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.policies.kernel_rule import RuleMatch
from xpuruntime.policies.refusal import nearest
from xpuruntime.pytorch import module_names

if TYPE_CHECKING:
    from xpuruntime.policies import Policy
    from xpuruntime.pytorch.held import Held

__all__ = ["RuleUse", "report"]

_FIX = (
    "write the path as in named_modules() of the model, say with root= at which module paths begin, or leave the rule "
    "out where that module does not run"
)
#: Modules that a message names.
_MOST = 4


class RuleUse:
    """Which rules of modules have met their module, of one policy.

    Parameters
    ----------
    policy : Policy
    """

    def __init__(self, policy: Policy) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, RuleMatch] = {
            at: rule.match
            for at, rule in enumerate(policy.kernels.rules)
            if rule.use is not None and (rule.match.module is not None or rule.match.node is not None)
        }
        self._others: dict[int, dict[str, None]] = {}

    def note(self, op: str, facts: dict[str, Any]) -> None:
        """Take note of a kind of calls, by what `KernelPolicy.choose` takes; an earlier rule may decide them.

        A rule has its module where any call came from that. Whether it was one of the rule's operation does not count.
        """
        if not self._open:
            return
        place = {"module": facts.get("module"), "node": facts.get("node")}
        with self._lock:
            for at, match in list(self._open.items()):
                if RuleMatch(module=match.module, node=match.node).matches(**place):
                    del self._open[at]
                elif msgspec.structs.replace(match, module=None, node=None).matches(op=op, **facts):
                    self._others.setdefault(at, {})[facts.get("module") or ""] = None

    def unmatched(self) -> list[str]:
        """Return a sentence for each rule that no call matched, though some would have if they were of its module."""
        with self._lock:
            found = [(at, match, list(self._others[at])) for at, match in self._open.items() if at in self._others]
        return [_sentence(at, match, others) for at, match, others in found]


def _sentence(at: int, match: RuleMatch, others: list[str]) -> str:
    stated = match.module if match.module is not None else match.node
    key = "module" if match.module is not None else "node"
    named = [repr(one) if one else "the model itself, or none that is known" for one in others[:_MOST]]
    if len(others) > _MOST:
        named.append(f"{len(others) - _MOST} more")
    near = nearest(str(stated), module_names.known())
    hint = f"; did you mean {near}?" if near and near != stated else ""
    return f"kernels.rules[{at}] ({key}: {stated}) matched no call: they came from {', '.join(named)}{hint}"


def report(held: Held | None) -> None:
    """Warn of rules that matched no call under a policy that holds no more. Raises where it is strict."""
    if held is None or held.policy.mode == "auto":
        return
    for sentence in held.rule_use.unmatched():
        msg = f"{sentence}. Fix: {_FIX}"
        if held.strict:
            raise UnsupportedOperationError(msg, engine="torch")
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=3)
