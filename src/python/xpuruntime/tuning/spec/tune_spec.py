# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuneSpec`: objective, constraints, search space and budget of a search: the content of a ``tune.yaml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from xpuruntime.errors import PolicyError
from xpuruntime.policies import files
from xpuruntime.policies.compound_kinds import Nested, OneOrMore, object_schema
from xpuruntime.policies.document import Refused, describe_value, from_python, quote
from xpuruntime.policies.kinds import Choice, FilePath, Integer, Kind, Text, in_folder
from xpuruntime.policies.value import PolicyValue, field, home_in_file, read_fields
from xpuruntime.tuning.spec.parts import (
    Budget,
    Constraints,
    ConstraintsKind,
    Decide,
    Objective,
    RayPlacement,
    SearchSpace,
)
from xpuruntime.tuning.trial import DEVICE_NAMES, check_devices, check_trial_device

#: The version of the file format.
SCHEMA = "xpuruntime.tune/1"


def _check_schema(text: str) -> str:
    if text != SCHEMA:
        near = "; upgrade xpuruntime to read it" if text.startswith("xpuruntime.tune/") else ""
        raise Refused(f"{quote(text)} is not a version that this release reads; it reads {SCHEMA}{near}")
    return text


class TuneSpec(PolicyValue, frozen=True, kw_only=True):
    r"""What is searched, for which objective, under which constraints.

    Attributes
    ----------
    base : str or None
        A policy file. Its keys are fixed, and the winner is compared with it.
    inputs : str or None
        Real inputs, as `Calibration` reads them: an ``.npz`` or ``.npy`` file or a folder. ``"random"`` makes some up.
    objective : Objective
    constraints : Constraints
    space : SearchSpace
    budget : Budget
    decide : Decide
    seed : int
        Of the bootstrap and of inputs that are generated.
    devices : tuple of str
        Devices that candidates are measured on at the same time, one on each: of the kind that the policy runs on, as
        ``"cuda:1"``, or disjoint sets of cores, as ``"cpu:0-3"``. Default: the device of the policy.
    ray : RayPlacement or None
        A Ray cluster whose nodes are measured on, in place of devices of this machine.
    isolation : {"process", "none"}
        ``"none"``: candidates share this process, where a crash ends all.

    Raises
    ------
    PolicyError
        For an unknown key or a bad value.

    Examples
    --------
    >>> spec = TuneSpec.loads("objective: {maximise: throughput, concurrency: 4}\nbudget: {time: 2m}\n")
    >>> spec.objective.name, spec.budget.time
    ('throughput', 120.0)
    """

    base: str | None = field(
        FilePath(
            "Policy file whose stated keys are fixed, relative to this file; --policy overrides it.",
            what="the path of a policy file",
        ),
        default=None,
    )
    inputs: str | None = field(
        FilePath(
            "Inputs, relative to this file; 'random' generates some.",
            words=("random",),
            what="a path, or 'random'",
        ),
        default=None,
    )
    objective: Objective = field(
        Nested(Objective, "What is made small or large, and under which load."), default=Objective()
    )
    constraints: Constraints = field(ConstraintsKind(Constraints, "What a candidate must keep."), default=Constraints())
    space: SearchSpace = field(Nested(SearchSpace, "Values to try."), default=SearchSpace())
    budget: Budget = field(Nested(Budget, "How long a search may take."), default=Budget())
    decide: Decide = field(Nested(Decide, "When a difference counts."), default=Decide())
    seed: int = field(Integer(0, 2**31 - 1, "Seed of the bootstrap and of generated inputs."), default=0)
    devices: tuple[str, ...] = field(
        OneOrMore(
            Text(what=DEVICE_NAMES, parse=check_trial_device),
            "Devices to measure on concurrently; by default the device of the policy.",
            empty=True,
        ),
        default=(),
    )
    ray: RayPlacement | None = field(Nested(RayPlacement, "The Ray cluster whose nodes are measured on."), default=None)
    isolation: Literal["process", "none"] = field(
        Choice(("process", "none"), "Whether each candidate has its own process; with none, a crash ends the search."),
        default="process",
    )

    #: The keys of a file.
    DOCUMENT: ClassVar[dict[str, Kind]]

    def _check_together(self) -> None:
        try:
            check_devices(self.devices)
        except Refused as refused:
            raise refused.under("devices") from None
        if self.devices and self.ray is not None:
            raise Refused("contradicts devices, which are those of this machine. Fix: state one of them", "ray")
        if self.isolation == "none" and (self.devices or self.ray is not None):
            what = "devices" if self.devices else "ray"
            raise Refused(f"contradicts {what}: each candidate needs a process of its own", "isolation")
        if self.objective.call == "run" and any(mode != "off" for mode in self.space.cuda_graph):
            why = "contradicts objective.call: run, since plain runs use no CUDA graph. Fix: state bind there"
            raise Refused(why, "cuda_graph").under("space")
        if self.space.batch and self.objective.name != "throughput":
            why = f"has no meaning for {self.objective.name}, which is of one run. Fix: state maximise: throughput"
            raise Refused(why, "batch").under("space")
        if self.space.batch and self.ray is not None:
            raise Refused("is not searched on a Ray cluster. Fix: leave one of them out", "batch").under("space")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file: ``.yaml``, ``.yml`` or ``.json``.

        Paths in it are relative to its folder, and absolute in the specification.

        Raises
        ------
        PolicyError
            ``file:line:column: message``.
        """
        folder = os.path.dirname(os.fspath(path))  # noqa: PTH120 - keeps links
        return cls.from_document(files.load(path)).relocated(in_folder(folder))

    @classmethod
    def loads(cls, text: str, format: Literal["yaml", "json"] = "yaml", *, name: str = "tune") -> Self:
        """Read the text of a file; `name` stands for the file in messages. Raises `PolicyError`."""
        return cls.from_document(files.loads(text, format, name))

    @classmethod
    def coerce(cls, value: TuneSpec | str | os.PathLike[str] | Mapping[str, Any] | None) -> TuneSpec:
        """Make a specification of what a caller may give: one, a path, a mapping with the keys of a file, or ``None``.

        Raises
        ------
        PolicyError
        """
        if value is None:
            return cls()
        if isinstance(value, TuneSpec):
            return value
        if isinstance(value, Mapping):
            try:
                document = files.Document(from_python(dict(value)), "tune")
            except Refused as refused:
                raise files.policy_error(refused, "tune", "the specification") from None
            return cls.from_document(document)
        if isinstance(value, str) or hasattr(value, "__fspath__"):
            return cls.load(value)
        raise PolicyError(f"tune: got {describe_value(value)}. Fix: give a TuneSpec, a path or a mapping")

    @classmethod
    def from_document(cls, document: files.Document) -> Self:
        """Make a specification of a document that was read. Raises `PolicyError` with the place."""
        try:
            fields = read_fields(document.root, cls.DOCUMENT)
        except Refused as refused:
            if refused.unknown_key is not None:
                refused.reason = home_in_file(refused.unknown_key, cls.DOCUMENT) or refused.reason
            raise files.policy_error(refused, document.name, "the specification") from None
        fields.pop("schema", None)
        try:
            return cls(**fields)
        except PolicyError as error:  # each key is good by itself, so keys do not go together
            why = error.__context__
            assert isinstance(why, Refused)
            raise files.policy_error(why.at(document.root), document.name, "the specification") from None

    def to_dict(self) -> dict[str, Any]:
        """Return what a file says, without what is at its default."""
        return {"schema": SCHEMA, **self.to_plain()}


TuneSpec.DOCUMENT = {
    "schema": Text("Version of the file format.", what=f"'{SCHEMA}'", parse=_check_schema, pattern=f"^{SCHEMA}$"),
    **TuneSpec.KINDS,
}
PolicyValue.ROOTS.append(TuneSpec)


def tune_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a specification, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:xpuruntime:tune:1",
        "title": "xpuruntime tuning specification",
        "description": "What is searched, for which objective, under which constraints.",
        **object_schema(TuneSpec.DOCUMENT),
    }
