# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One small locked model for each CPU engine, and edits of locks with a digest that fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

import xpuruntime as xrt
from xpuruntime.lockfile.canonical import save_lock
from xpuruntime.lockfile.records import Identity, Lock, UnitEntry, Validator, stable_id
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENGINES = ("onnxruntime", "openvino", "qnn", "torch")


@dataclass
class Case:
    """A model, the policy that it is locked under, and its lock."""

    engine: str
    model: Path
    path: Path
    policy: dict[str, Any]
    lock: Lock
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, lock: Path | None = None, **changes: Any) -> xrt.InferenceSession:
        return xrt.InferenceSession(self.model, lock=lock or self.path, **{**self.options, **changes})

    def edited(self, edit: Callable[[Identity], Identity], folder: Path) -> Path:
        return save_lock(Lock.of(edit(self.lock.identity), measured=self.lock.measured), folder / "edited.lock")


def make_case(engine: str, folder: Path) -> Case:
    """Lock a model of two products, with an input of a fixed size, on an engine."""
    execution: dict[str, Any] = {"engine": engine, "device": "cpu"}
    options: dict[str, Any] = {}
    if engine == "torch":
        model, options = _program(folder), {"trust": True}
    else:
        model = models.save(models.mlp(), folder)
    if engine == "qnn":
        shapes = {"x": [2, 64]}
        execution = {
            "engine": engine, "device": "npu", "precision": "fp16", "shapes": shapes,
            "provider_options": {"qnn": {"soc": "sm8650"}},
        }  # fmt: skip
    policy: dict[str, Any] = {"execution": execution}
    if engine in ("onnxruntime", "torch"):
        policy["kernels"] = {"matmul": "cpu.blas"}
    path = folder / "model.lock"
    lock = xrt.lock(model, policy, path, shapes={"x": (2, 64)}, **options)
    assert lock.written
    return Case(engine, model, path, policy, lock.lock, options)


def _program(folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
    program = torch.export.export(Named(net), (torch.zeros(2, 64),))
    path = folder / "model.pt2"
    torch.export.save(program, path)
    return path


def Named(net: Any) -> Any:  # noqa: N802 - makes a module
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return self.net(x)

    return Net().eval()


def with_validator(kind: str, change: Callable[[Any], Any]) -> Callable[[Identity], Identity]:
    """Return an edit of the first validator of a kind, and of the record of the model where it is that one's."""

    def edit(identity: Identity) -> Identity:
        first = next(validator for validator in identity.validators if validator.kind == kind)
        other = msgspec.structs.replace(first, expect=change(first.expect))
        if kind == "model" and identity.model is not None:
            record = msgspec.structs.replace(identity.model, sha256=other.expect["sha256"])
            identity = msgspec.structs.replace(identity, model=record)
        return msgspec.structs.replace(
            identity, validators=tuple(other if validator is first else validator for validator in identity.validators)
        )

    return edit


def with_ids(identity: Identity) -> Identity:
    """Return an identity whose validators have the ids of their kinds and keys."""
    data = msgspec.json.encode(identity)
    for validator in identity.validators:
        data = data.replace(validator.id.encode(), stable_id(validator.kind, validator.key).encode())
    return msgspec.json.decode(data, type=Identity)


def validator_of(identity: Identity, kind: str) -> Validator:
    return next(validator for validator in identity.validators if validator.kind == kind)


def with_entry(choose: Callable[[UnitEntry], bool], **changes: Any) -> Callable[[Identity], Identity]:
    """Return an edit of the first entry that is chosen."""

    def edit(identity: Identity) -> Identity:
        first = next(entry for entry in identity.entries if choose(entry))
        other = msgspec.structs.replace(first, **changes)
        return msgspec.structs.replace(
            identity, entries=tuple(other if entry is first else entry for entry in identity.entries)
        )

    return edit
