# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What an export gives back, the state that it may change, and the metadata of its policy."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

import xpuruntime
from xpuruntime.errors import warn
from xpuruntime.lockfile.canonical import ExportLock, locked_kernels
from xpuruntime.notebook import one_line
from xpuruntime.policies import ExecutionPolicy, Policy
from xpuruntime.policies.call_facts import NameSet
from xpuruntime.policies.kernel_rules import FAMILIES
from xpuruntime.printable import printable
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import context

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.policies.kernel_rules import KernelRule

#: The first opset in which attention is one operator.
OPSET = 23


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes
    ----------
    path : Path
    format : {"onnx", "pt2"}
    policy : Policy or None
        The policy that the file carries, as it was translated for inference.
    lock : ExportLock
    pinned : dict of str to tuple of str
        Node to the kernels that a rule of the policy asks for it; of ONNX files.
    notes : tuple of str
        What was changed or left out on the way, each with its reason.
    """

    path: Path
    format: Literal["onnx", "pt2"]
    policy: Policy | None
    lock: ExportLock
    pinned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as plain text."""
        lock = self.lock
        lines = [
            f"{self.path}: {lock.exporter}" + (f", opset {lock.opset}" if lock.opset else ""),
            f"  policy: {'none' if self.policy is None else json.dumps(self.policy.to_dict())}",
        ]
        lines += [f"  {node}: {', '.join(kernels)}" for node, kernels in self.pinned.items()]
        return printable("\n".join([*lines, *(f"  note: {note}" for note in self.notes)]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines

        return fragment((fragment_lines(str(self).splitlines()),))


def written_state(program: Any) -> tuple[str, ...]:
    """Return the buffers and inputs that an exported program writes to when it runs."""
    signature = program.graph_signature
    written_names = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    names = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    for node in program.graph.nodes:
        schema = _private_api.operator_schema(node.target)
        for argument, value in zip(schema.arguments if schema is not None else (), node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and getattr(value, "op", None) == "placeholder":
                written_names[value.name] = names.get(value.name, value.name)
    return tuple(dict.fromkeys(written_names.values()))


def warn_state_changes(model: torch.nn.Module, changed: tuple[str, ...], what_becomes_of_it: str) -> str:
    """Warn of state that a module writes to, and return what is said."""
    names = ", ".join(map(repr, changed[:3])) + (" and others" if len(changed) > 3 else "")
    msg = (
        f"<{type(model).__qualname__}> changes {names} when it runs, and {what_becomes_of_it}. Fix: have forward take "
        "that state as an input and return the new one"
    )
    warn(msg)
    return msg


#: What of a policy active also holds where the model is run; the rest says where and how it was trained.
_KEPT = ("tf32", "determinism", "precision")
#: Marks a further call of a module in the paths that PyTorch writes.
_CALL = re.compile(r"@\d+")


def in_force() -> Policy | None:
    """Return the policy that holds in this thread, without what it says of the machine that trains."""
    active = context.active_policy()
    if active is None:
        return None
    execution = active.policy.execution
    kept = {name: value for name, value in execution.stated_fields().items() if name in _KEPT}
    return active.policy.replace(execution=ExecutionPolicy(**kept))


def translate(
    policy: Policy | None, nodes: Collection[str], modules: Collection[str], *, by_node: bool
) -> tuple[Policy | None, list[str]]:
    """Return a policy of training as it holds in an exported graph, and what was changed."""
    if policy is None:
        return None, []
    named, paths = NameSet(nodes), NameSet(modules)
    rules: list[KernelRule] = []
    notes: list[str] = []
    if by_node:
        policy = _without_torch(policy, notes)
    for index, rule in enumerate(policy.kernels.rules):
        key, match = f"kernels.rules[{index}]", rule.match
        phases = (match.phase,) if isinstance(match.phase, str) else match.phase
        if phases is not None and "infer" not in phases:
            notes.append(f"{key} is left out: it is for {' and '.join(phases)}, and the exported model infers")
            continue
        if phases is not None:
            match = match.replace(phase=None)
        if match.node is not None and not named.matches(match.node):
            if match.module is None and paths.matches(match.node):
                notes.append(f"{key}: node {match.node!r} names modules, and became module {match.node!r}")
                match = match.replace(module=match.node, node=None)
            else:
                notes.append(f"{key} is left out: node {match.node!r} names no node of the exported graph")
                continue
        elif match.module is not None and not paths.matches(match.module):
            notes.append(f"{key} is left out: module {match.module!r} names no module with nodes in the exported graph")
            continue
        if by_node and match.module is not None and match.node is None:
            match = match.replace(node=f"{match.module}/*")
        if match.stated_fields():
            rules.append(rule.replace(match=match))
        elif rule.use is not None or rule.precision is not None:
            notes.append(f"{key} is left out: without its phase it would be for everything; state an op as well")
    return policy.replace(kernels=policy.kernels.replace(rules=tuple(rules))), notes


def _without_torch(policy: Policy, notes: list[str]) -> Policy:
    """Return a policy in which what leaves the choice to PyTorch leaves it to the engine that the file runs on."""

    def translated(key: str, use: str | tuple[str, ...] | None) -> Any:
        kernel_names = (use,) if isinstance(use, str) else tuple(use or ())
        if "torch" not in kernel_names:
            return use
        notes.append(f"{key}: 'torch' became 'auto', since the file runs on other engines")
        other = tuple("auto" if kernel_name == "torch" else kernel_name for kernel_name in kernel_names)
        return other[0] if isinstance(use, str) else other

    kernels = policy.kernels
    short = {op: translated(f"kernels.{op}", kernels.get(op)) for op in FAMILIES if kernels.get(op) is not None}
    rules = tuple(
        rule.replace(use=translated(f"kernels.rules[{index}]", rule.use)) if rule.use is not None else rule
        for index, rule in enumerate(kernels.rules)
    )
    return policy.replace(kernels=kernels.replace(rules=rules, **short))


def plain_path(path: str) -> str:
    """Return the path of a module without the number of the call."""
    return _CALL.sub("", path)


def lock_of(model: torch.nn.Module, tensors: Any, *, exporter: str, opset: int, weights: str) -> ExportLock:
    """Return the lock of an export."""
    from xpuruntime.ops.decision_log import decisions
    from xpuruntime.pytorch._private_api import pytree

    state_tensors = [*model.parameters(), *model.buffers()]
    state_tensors += [leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    device = state_tensors[0].device if state_tensors else torch.device("cpu")
    cuda = device.type == "cuda"
    name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}" if cuda else device.type
    return ExportLock(
        torch=str(torch.__version__),
        xpuruntime=xpuruntime.__version__,
        exporter=exporter,
        opset=opset,
        weights=weights,
        device=name,
        device_name=torch.cuda.get_device_name(device) if cuda else "",
        arch=context.arch_of(device) or "",
        kernels=locked_kernels(decisions(), name),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what PyTorch's exporter says of its own parts to itself; what it says of the model is let through."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield
    finally:
        logger.setLevel(before)
    for warning in said:
        if not issubclass(warning.category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Give every part of a module its mode back afterwards: some exporters change it."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
