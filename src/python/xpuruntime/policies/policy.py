# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Policy`: all that a user asks, in one value and one file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from xpuruntime.errors import PolicyError
from xpuruntime.policies import files
from xpuruntime.policies.compound_kinds import Nested, object_schema
from xpuruntime.policies.device_spec import DEVICE_PATTERN, DeviceSpec
from xpuruntime.policies.document import Refused, describe_value, from_python, quote
from xpuruntime.policies.execution_policy import ExecutionPolicy, Precision
from xpuruntime.policies.kernel_policy import KernelPolicy
from xpuruntime.policies.kinds import Choice, Kind, Text, in_folder, seen_from
from xpuruntime.policies.value import Accepts, PolicySection, PolicyValue, field, home_in_file, read_fields
from xpuruntime.policies.verify_policy import AccuracyPolicy, CalibrationPolicy, VerifyPolicy

#: The version of the file format that this release writes, and the only one it reads.
SCHEMA = "xpuruntime.policy/1"

Mode = Literal["prefer", "strict", "auto"]
_MODES: tuple[Mode, ...] = get_args(Mode)


def _check_schema(text: str) -> str:
    if text != SCHEMA:
        near = "; upgrade xpuruntime to read it" if text.startswith("xpuruntime.policy/") else ""
        raise Refused(f"{quote(text)} is not a version that this release reads{near}. Fix: write {SCHEMA}")
    return text


class Policy(PolicyValue, frozen=True, kw_only=True):
    r"""All that a user asks: how strictly, who runs it, with which kernels, how exactly.

    Attributes
    ----------
    mode : {"prefer", "strict", "auto"}
        ``prefer``: a key that cannot be enforced still runs, with a warning. ``strict``: it raises. ``auto``: the
        plan chooses freely where the policy states nothing, and records why.
    execution : ExecutionPolicy
    kernels : KernelPolicy
    accuracy : AccuracyPolicy or None
    calibration : CalibrationPolicy or None
        The inputs that a model is quantized with.
    verify : VerifyPolicy or None
        Claims of ``xrt verify``. They ask nothing of a run: `stated` leaves them out.

    Raises
    ------
    PolicyError
        For an unknown field or a bad value; names the nearest valid one.

    Examples
    --------
    >>> policy = Policy.loads("mode: strict\nkernels: {matmul: cublasLt}\n")
    >>> policy
    Policy(mode='strict', kernels=KernelPolicy(matmul='cublasLt'))
    >>> policy.stated()
    {'mode': 'strict', 'kernels.matmul': 'cublasLt'}
    """

    mode: Mode = field(Choice(_MODES, "How strictly the policy is enforced.", what="modes"), default="prefer")
    execution: Accepts[ExecutionPolicy, ExecutionPolicy | dict[str, Any]] = field(
        Nested(ExecutionPolicy, "Who runs a model, where, and how."), default=ExecutionPolicy()
    )
    kernels: Accepts[KernelPolicy, KernelPolicy | dict[str, Any]] = field(
        Nested(KernelPolicy, "Which kernel runs each operation.", hidden=KernelPolicy.OUTSIDE), default=KernelPolicy()
    )
    accuracy: Accepts[AccuracyPolicy | None, AccuracyPolicy | dict[str, Any] | None] = field(
        Nested(AccuracyPolicy, "How close the results must be to a reference."), default=None
    )
    calibration: Accepts[CalibrationPolicy | None, CalibrationPolicy | dict[str, Any] | None] = field(
        Nested(CalibrationPolicy, "Which inputs a model is quantized with."), default=None
    )
    verify: Accepts[VerifyPolicy | None, VerifyPolicy | dict[str, Any] | None] = field(
        Nested(VerifyPolicy, "Which claims `xrt verify` checks."), default=None
    )

    #: The keys of a file.
    DOCUMENT: ClassVar[dict[str, Kind]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a policy file: ``.yaml``, ``.yml`` or ``.json``, UTF-8, at most 1 MiB.

        Paths in it are relative to its folder, and absolute in the policy.

        Raises
        ------
        PolicyError
            ``file:line:column: message``, when the file cannot be read or is not a valid policy.
        """
        return cls.from_document(files.load(path))

    @classmethod
    def loads(cls, text: str, format: Literal["yaml", "json"] = "yaml", *, name: str = "policy") -> Self:
        """Read the text of a policy file; `name` stands for the file in messages. Raises `PolicyError`."""
        return cls.from_document(files.loads(text, format, name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a policy file, in the format that the name ends in. Only what is away from its default is written.

        Paths below the folder of the file are written relative to it, others as absolute paths.

        The file is replaced as a whole or not at all; one that exists keeps its permissions.

        Raises
        ------
        PolicyError
            Names path and reason when the file cannot be written; what was there before stays.
        """
        folder = os.path.dirname(os.fspath(path))  # noqa: PTH120 - of a name that may be no path
        files.save(self.relocated(seen_from(folder)).to_dict(), path)

    def dumps(self, format: Literal["yaml", "json"] = "yaml") -> str:
        """Return the text of a policy file. ``Policy.loads(p.dumps(f), f) == p`` for every policy and format."""
        return files.dumps(self.to_dict(), format)

    def to_dict(self) -> dict[str, Any]:
        """Return what a policy file says, as new dicts, lists and scalars; `coerce` reads it back."""
        kernels = self.kernels
        document = {"schema": SCHEMA, "mode": self.mode, **self.to_plain()}
        if not document.get("kernels", True):
            del document["kernels"]  # states only what stands outside
        for name in KernelPolicy.OUTSIDE.intersection(kernels.stated_fields()):
            document[name] = KernelPolicy.KINDS[name].plain(getattr(kernels, name))
        return {key: document[key] for key in self.DOCUMENT if key in document}

    @classmethod
    def coerce(cls, value: Policy | str | os.PathLike[str] | Mapping[str, Any] | None) -> Policy:
        """Make a policy of what a caller may give.

        Parameters
        ----------
        value : Policy, "auto", path, mapping or None
            The word ``"auto"`` is ``Policy(mode="auto")``; other text is the path of a file; a mapping has the keys
            of a file; ``None`` is the default policy.

        Raises
        ------
        PolicyError
        """
        if isinstance(value, Policy):
            return value
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            try:
                document = files.Document(from_python(dict(value)), "policy")
            except Refused as refused:
                raise files.policy_error(refused, "policy") from None
            return cls.from_document(document)
        if isinstance(value, (KernelPolicy, ExecutionPolicy, AccuracyPolicy, CalibrationPolicy, VerifyPolicy)):
            name = type(value).__name__
            fields = {"KernelPolicy": "kernels"}
            field = fields.get(name, name.removesuffix("Policy").lower())
            raise PolicyError(f"policy: a {name} is a part of a policy. Fix: write Policy({field}=...)")
        if isinstance(value, str) and value in _MODES:
            if value == "auto":
                return cls(mode="auto")
            raise PolicyError(f"policy: {value!r} is a mode, not a file. Fix: write Policy(mode={value!r})")
        if isinstance(value, str) and re.fullmatch(DEVICE_PATTERN, value) and not os.path.exists(value):  # noqa: PTH110
            raise PolicyError(f"policy: {value!r} is a device, not a file. Fix: device={value!r}")
        if isinstance(value, str) or hasattr(value, "__fspath__"):
            return cls.load(value)
        raise PolicyError(f"policy: got {describe_value(value)}. Fix: give a Policy, a path, a mapping or 'auto'")

    def with_overrides(
        self,
        *,
        mode: Mode | None = None,
        engine: str | Sequence[str] | None = None,
        device: str | DeviceSpec | None = None,
        precision: Precision | None = None,
        kernel_policy: KernelPolicy | None = None,
        exec_policy: ExecutionPolicy | None = None,
    ) -> Policy:
        """Return a new policy in which what is given here, and is not ``None``, replaces what this one says.

        `exec_policy` and `kernel_policy` replace the whole section: nothing of the old one is left, so that a default
        in the new one counts too. Then `engine`, `device` and `precision` replace single keys. An argument always
        wins over a file, and `stated` of the result lists what it set.

        Raises
        ------
        PolicyError
            For a bad value, or when the keys left together contradict each other.
        """
        for name, value, cls in (
            ("kernel_policy", kernel_policy, KernelPolicy),
            ("exec_policy", exec_policy, ExecutionPolicy),
        ):
            if value is not None and not isinstance(value, cls):
                raise PolicyError(f"{name}: got {describe_value(value)}. Fix: give a {cls.__name__}")
        execution = self.execution if exec_policy is None else exec_policy
        single = {"engine": engine, "device": device, "precision": precision}
        changes: dict[str, Any] = {
            "mode": self.mode if mode is None else mode,
            "execution": execution.replace(**{key: value for key, value in single.items() if value is not None}),
            "kernels": self.kernels if kernel_policy is None else kernel_policy,
        }
        return self.replace(**changes)

    def stated(self) -> dict[str, Any]:
        """Return every key that asks something of a run: dotted key to canonical value.

        These are the keys away from their default: a default asks nothing, wherever it is written. Lists of rules
        have one key a rule, ``"kernels.rules[0]"``; provider options one an option,
        ``"execution.provider_options.onnxruntime.use_tf32"``; shapes one an input, ``"execution.shapes.image"``;
        `auto_strategy` is ``"kernels.auto_strategy"``. `verify` and `tuning`, which ask nothing of a run, have none.
        """
        stated: dict[str, Any] = {} if self.mode == "prefer" else {"mode": self.mode}
        sections = ("execution", "kernels", "accuracy", "calibration")
        for section, value in ((name, getattr(self, name)) for name in sections):
            for key, held in ({} if value is None else value.stated_fields()).items():
                if key == "tuning":
                    continue
                _flatten(stated, f"{section}.{key}", held)
        return stated

    @classmethod
    def from_document(cls, document: files.Document) -> Self:
        """Make a policy of a document that was read. Raises `PolicyError` with the place."""
        try:
            fields = read_fields(document.root, cls.DOCUMENT)
        except Refused as refused:
            for part in refused.everything:
                if part.unknown_key is not None:
                    part.reason = home_in_file(part.unknown_key, cls.DOCUMENT) or part.reason
            raise files.policy_error(refused, document.name) from None
        fields.pop("schema", None)
        outside = {name: fields.pop(name) for name in KernelPolicy.OUTSIDE if fields.get(name) is not None}
        if outside:
            fields["kernels"] = fields.get("kernels", KernelPolicy()).replace(**outside)
        policy = cls(**fields)
        of_file = document.sha256 is not None
        folder = os.path.dirname(document.name)  # noqa: PTH120
        return policy.relocated(in_folder(folder)) if of_file else policy


Policy.DOCUMENT = {
    "schema": Text("Version of the file format.", what=f"'{SCHEMA}'", parse=_check_schema, pattern=f"^{SCHEMA}$"),
    "mode": Policy.KINDS["mode"],
    "execution": Policy.KINDS["execution"],
    "kernels": Policy.KINDS["kernels"],
    "auto_strategy": KernelPolicy.KINDS["auto_strategy"],
    "tuning": KernelPolicy.KINDS["tuning"],
    "accuracy": Policy.KINDS["accuracy"],
    "calibration": Policy.KINDS["calibration"],
    "verify": Policy.KINDS["verify"],
}
PolicySection.WHOLE = Policy
PolicyValue.ROOTS.append(Policy)


def _flatten(stated: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, PolicyValue) and key in ("execution.memory", "execution.artifacts", "execution.weights"):
        for name, field in value.stated_fields().items():
            stated[f"{key}.{name}"] = field
    elif isinstance(value, dict):
        for name, item in value.items():
            _flatten(stated, f"{key}.{name}", item)
    elif key == "kernels.rules":
        for index, rule in enumerate(value):
            stated[f"{key}[{index}]"] = rule
    else:
        stated[key] = value


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a policy file, as a new dict.

    It accepts every file that `Policy.load` accepts, as long as truth values are written ``true`` and ``false``, and
    refuses unknown keys, bad words and wrong types. What depends on several keys together is left to `Policy.load`.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:xpuruntime:policy:1",
        "title": "xpuruntime policy",
        "description": "What is requested of a run: engine, device, precision, kernels, memory, accuracy and "
        "calibration; and which claims `xrt verify` checks.",
        **object_schema(Policy.DOCUMENT),
    }
