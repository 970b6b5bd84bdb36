# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policy and process-wide switches of a session, active for its calls alone."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.torch.names import CELLS, RECURRENT, RECURRENT_KERNELS, TorchSettings
from xpuruntime.errors import EngineError
from xpuruntime.evidence.metadata import OP_OF_TORCH, module_of_node
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.policies.call_facts import UNKNOWN, CallFacts, NameSet, escape, unknown_sizes
from xpuruntime.policies.kernel_rules import KernelRule, RuleMatch

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.context import thread_policy
    from xpuruntime.pytorch.switches.shared_switches import SwitchClaim

#: Operators that are made of products, and of what no policy speaks of.
_OF_PRODUCTS = RECURRENT | RECURRENT_KERNELS | CELLS


def operation_of(node: NodeInfo) -> str | None:
    """Return the operation of a `KernelPolicy` that an operator of PyTorch is, or is made of, or ``None``.

    Attention that is computed by products is where its softmax is.
    """
    if node.by_products is not None:
        return "attention"
    name = node.op.rpartition(".")[2]
    return "matmul" if name in _OF_PRODUCTS else OP_OF_TORCH.get(name)


def facts_of_program_node(node: NodeInfo, **known: Any) -> CallFacts:
    """Return the facts of an operator's calls in a program, whose sizes, device and type are known when it runs.

    `known` are facts that are known already.
    """
    op = operation_of(node)
    facts: dict[str, Any] = {"phase": UNKNOWN}
    facts.update(dict.fromkeys(("dtype", "device", "arch"), UNKNOWN), op=op, **unknown_sizes(op or ""))
    facts.update(node=node.name, module=module_of_node(node.name) or None, **known)
    return CallFacts(**facts)


def placed_rules(policy: KernelPolicy, nodes: Iterable[NodeInfo]) -> tuple[tuple[KernelRule, str], ...]:
    """Return what a policy asks of kernels as rules that hold while PyTorch runs, each with the key it is from.

    A running operator knows its module and not its node: rules by node become rules for the modules of these nodes.
    The short forms come last, as rules of their own, so that each call is decided by itself and no switch of the
    process is set.
    """
    places: dict[str, dict[CallFacts, None]] = {}
    for node in nodes:
        if (facts := facts_of_program_node(node)).op is not None and facts.module is not None:
            places.setdefault(node.name, {})[facts] = None
    names = NameSet(places)
    placed: dict[tuple[KernelRule, str], None] = {}
    for compiled in policy.compiled_rules.rules:
        rule = compiled.rule
        if rule.use is None or rule.precision is not None:
            continue
        match = rule.match
        if match.node is None:
            placed[KernelRule(match=match, use=rule.use), compiled.source] = None
            continue
        for name in names.matching(match.node):
            for facts in places[name]:
                if compiled.certainty(facts) != "no":
                    here = match.replace(node=None, module=escape(str(facts.module)), op=facts.op)
                    placed[KernelRule(match=here, use=rule.use), compiled.source] = None
    for op, kernel_names in policy.preferences.items():
        placed[KernelRule(match=RuleMatch(op=op), use=kernel_names), f"kernels.{op}"] = None
    return tuple(placed)


def kernel_names_of(policy: KernelPolicy, key: str) -> tuple[str, ...]:
    """Return the kernels that a key of a policy asks for, in order."""
    name = key.removeprefix("kernels.")
    match = re.fullmatch(r"rules\[(\d+)\]", name)
    use = policy.rules[int(match[1])].use if match else policy.preferences[name]
    return (use,) if isinstance(use, str) else tuple(use or ())


class _Here(threading.local):
    #: What holds in this thread instead of the session's own.
    held: CompiledPolicy | None = None


class Pins:
    """What one session puts in place for its kernels, and takes away when it is closed."""

    def __init__(self, policy: Policy, nodes: Iterable[NodeInfo], without: Collection[str]) -> None:
        from xpuruntime.pytorch.call_scope import module_paths
        from xpuruntime.pytorch.dispatch import compiled_policy, context
        from xpuruntime.pytorch.dispatch.overrides import registry

        self._holding = context.thread_policy
        self.held: CompiledPolicy | None = None
        self.keys: dict[str, str] = {}
        self._here = _Here()
        self._undo: list[Any] = []
        rules = placed_rules(policy.kernels, nodes)
        self.by_module = any(rule.match.module is not None for rule, _ in rules)
        if not rules and policy.kernels.auto_strategy == "first_supported":
            return
        self.keys = {f"kernels.rules[{index}]": key for index, (_, key) in enumerate(rules)}
        held_rules = tuple(rule.replace(use="auto") if key in without else rule for rule, key in rules)
        kernels = KernelPolicy(
            rules=held_rules, auto_strategy=policy.kernels.auto_strategy, tuning=policy.kernels.tuning
        )
        held = compiled_policy.CompiledPolicy(Policy(mode=policy.mode, kernels=kernels))
        held.keys = self.keys
        try:
            if held.by_module:
                module_paths.require()
                self._undo.append(module_paths.release)
            ops = registry.require(held.overrides)
            self._undo.append(lambda: registry.release(ops))
        except BaseException:
            self.release()
            raise
        self.held = held

    @property
    def current(self) -> CompiledPolicy | None:
        """What holds in this thread: `held`, or the same with routes apart."""
        return self._here.held or self.held

    def hold(self) -> thread_policy:
        """Return a context in which these kernels hold, and no others."""
        return self._holding(self.current)

    @contextlib.contextmanager
    def apart(self, log: _core.DecisionLog) -> Iterator[None]:
        """Let `hold` take routes of their own in this thread, whose decisions are recorded in `log` alone."""
        if self.held is None:
            yield
            return
        self._here.held = self.held.apart(log)
        try:
            yield
        finally:
            self._here.held = None

    def release(self) -> None:
        """Take everything away. Idempotent."""
        while self._undo:
            self._undo.pop()()


_TF32 = ("matmul.allow_tf32", "cudnn.allow_tf32")


def hold(settings: TorchSettings, request: Request) -> SwitchClaim:
    """Set the switches of `settings`, and the switch that keeps attention in a module where a policy reaches it."""
    from xpuruntime.pytorch.switches import shared_switches

    wanted: dict[str, Any] = {}
    if settings.tf32 is not None:
        wanted |= dict.fromkeys(_TF32, settings.tf32)
    if settings.deterministic:
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ and _cuda_started():
            msg = (
                "execution.determinism on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment "
                "before the first CUDA call of the process. Fix: set it and start again"
            )
            raise EngineError(msg, engine="torch")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        wanted |= {"deterministic_algorithms": True, "cudnn.benchmark": False}
    if settings.threads is not None:
        wanted["num_threads"] = settings.threads
    if _has_fast_path(request):
        wanted["mha.fastpath"] = False
    try:
        return shared_switches.claim(wanted)
    except shared_switches.SwitchTakenError as error:
        raise EngineError(f"{error}. Fix: close that session, or use a process of its own", engine="torch") from None


def read_back(settings: TorchSettings, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the policy keys that switches realise, as these are now."""
    in_effect: dict[str, str] = {}
    tf32 = {name: bool(values[name]) for name in _TF32 if name in values}
    if tf32:
        # One of the two may have been changed behind the session's back: then that one is reported.
        other = next((name for name, value in tf32.items() if value is not settings.tf32), None)
        in_effect["execution.tf32"] = (
            str(settings.tf32).lower() if other is None else f"{other}={str(tf32[other]).lower()}"
        )
    if "deterministic_algorithms" in values:
        on = values["deterministic_algorithms"]
        in_effect["execution.determinism"] = "torch.use_deterministic_algorithms, for the process" if on else "none"
    if "num_threads" in values:
        in_effect["execution.threads"] = str(values["num_threads"])
    return in_effect


def _has_fast_path(request: Request) -> bool:
    """Say whether a policy names kernels for attention, and modules would run one of their own without gradients."""
    import torch

    from xpuruntime.pytorch.attention.sdpa_switch import names_kernels

    if request.model.format != "torch" or not names_kernels(request.policy):
        return False
    has_one = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    source: Any = request.model.source
    return any(isinstance(part, has_one) for part in source.module.modules())


def _cuda_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())
