# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How results are judged: `AccuracyPolicy`, `CalibrationPolicy` and `VerifyPolicy`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, Nested, OneOrMore
from xpuruntime.policies.device_spec import ByteSize, check_device, check_engine
from xpuruntime.policies.document import Node, Refused, describe_value, did_you_mean, quote
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES, Determinism
from xpuruntime.policies.kinds import (
    Choice,
    Duration,
    FilePath,
    Integer,
    Number,
    Percentage,
    Text,
    refuse_control_characters,
)
from xpuruntime.policies.value import Accepts, PolicyValue, field

Required = Literal["engine", "device", "precision", "placement", "kernels"]
SpeedMetric = Literal["latency.p50", "latency.p99"]
Control = Literal["reference", "anchor"]
Inconclusive = Literal["fail", "warn", "pass"]


class Floors(MappingOf):
    """Name of a metric to the least value that it may have. Sorted by name."""

    _FLOOR = Number(-math.inf, math.inf)

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of metric to its least value, such as {top1: 0.98}"

    def _check_name(self, name: str) -> None:
        refuse_control_characters(name)
        if not name.isidentifier():
            raise Refused(f"{quote(name)} is not the name of a Python function. Fix: write one such as 'top1'")

    def _read_value(self, node: Node) -> float:
        value = self._FLOOR.read(node)
        if not math.isfinite(value):
            raise Refused(f"{describe_value(value)} is out of range. Fix: state a finite number")
        return float(value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return dict(value)

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": r"^[^\W\d]\w*$"},
            "additionalProperties": {"type": "number"},
        }


class VerifyEvidence(PolicyValue, frozen=True, kw_only=True):
    """Which parts of the evidence must have been observed, and which keys may deviate.

    Attributes
    ----------
    require : tuple of {"engine", "device", "precision", "placement", "kernels"}
        A claim about one of these fails where it could not be observed. ``placement``: every unit ran on the device
        of the plan.
    allow : tuple of str
        Patterns of policy keys, such as ``"execution.layout"`` or ``"kernels.*"``, whose deviations are reported as
        skipped.
    """

    require: Accepts[tuple[Required, ...], str | Sequence[str]] = field(
        OneOrMore(Choice(get_args(Required), what="parts"), "Parts of the evidence that must be observed.", empty=True),
        default=(),
    )
    allow: Accepts[tuple[str, ...], str | Sequence[str]] = field(
        OneOrMore(Text(what="a policy key such as 'kernels.*'"), "Policy keys that may deviate.", empty=True),
        default=(),
    )


class VerifySpeed(PolicyValue, frozen=True, kw_only=True):
    """How much slower than a control, measured in the same job, a session may be.

    Attributes
    ----------
    metric : tuple of {"latency.p50", "latency.p99"}
        Of single runs. ``latency.p99`` takes 662 runs of each side at least.
    max_slowdown : float
        Share by which the time may exceed the control's: 0.05, or ``"5%"`` in a file.
    control : {"reference", "anchor"}
        What the session is timed against: the same model on ONNX Runtime's CPU provider with the policy's
        ``execution.threads`` and nothing else of it, or a fixed NumPy workload.
    confidence : float
        Of all speed claims together, from 0.5 to 0.9999.
    budget : float
        Seconds; a claim that is undecided by then is inconclusive. ``"120s"`` in a file.
    inconclusive : {"fail", "warn", "pass"} or None
        What an inconclusive speed claim does to the exit code: 1, 0 with a warning, 0; ``None``: 4.
    """

    metric: Accepts[tuple[SpeedMetric, ...], str | Sequence[str]] = field(
        OneOrMore(Choice(get_args(SpeedMetric), what="metrics"), "What is compared with the control."),
        default=("latency.p50",),
    )
    max_slowdown: Accepts[float, float | str] = field(
        Percentage("Percentage by which the time may exceed that of the control."), default=0.05
    )
    control: Control = field(
        Choice(get_args(Control), "What the session is timed against.", what="controls"), default="reference"
    )
    confidence: float = field(Number(0.5, 0.9999, "Confidence of all speed claims together."), default=0.99)
    budget: Accepts[float, float | str] = field(
        Duration("Time after which an undecided speed claim is inconclusive."), default=120.0
    )
    inconclusive: Inconclusive | None = field(
        Choice(get_args(Inconclusive), "What an inconclusive speed claim does to the exit code."), default=None
    )


class VerifyMemory(PolicyValue, frozen=True, kw_only=True):
    """How much memory a session may take.

    Attributes
    ----------
    max_growth : float
        Share by which the memory of the process may grow over repeated runs, and its peak over that of a lock.
    max_peak : int or None
        Most bytes that the process may have resident while it opens and runs the model.
    """

    max_growth: Accepts[float, float | str] = field(
        Percentage("Percentage by which memory may grow over repeated runs, and over a lock."), default=0.1
    )
    max_peak: Accepts[int | None, int | str | None] = field(
        ByteSize("Most memory of the process, such as '2GiB'."), default=None
    )


class VerifyGeneration(PolicyValue, frozen=True, kw_only=True):
    """How far a language model's next tokens on held-out texts may be from the reference. At least one limit is stated.

    Attributes
    ----------
    text : str
        A JSON file with a list of texts, each a list of token ids, or a string. In a policy file it is relative to the
        folder of that file.
    top1 : float or None
        Least share of positions, from 0 to 1, at which the most likely token is that of the reference.
    kl : float or None
        Largest mean KL divergence from the reference to the model, in nats.
    perplexity : float or None
        Share by which the perplexity may be off, higher or lower: 0.01, or ``"1%"`` in a file.
    tokens : int
        How many greedy tokens after the first half of each text are compared, too. They are reported, and decide
        nothing: a wrong kernel can leave them as they are, and a right one can change them.
    """

    text: str | None = field(
        FilePath("JSON file of held-out texts, relative to the policy file.", what="the path of a JSON file"),
        default=None,
    )
    top1: float | None = field(
        Number(0.0, 1.0, "Least share of positions with the most likely token of the reference."), default=None
    )
    kl: float | None = field(
        Number(0.0, math.inf, "Largest mean KL divergence from the reference, in nats."), default=None
    )
    perplexity: Accepts[float | None, float | str | None] = field(
        Percentage("Percentage by which the perplexity may be off, either way."), default=None
    )
    tokens: int = field(
        Integer(0, 65536, "How many greedy tokens after each text are compared, as a report."), default=0
    )

    def _check_together(self) -> None:
        if self.text is None:
            raise Refused("states no 'text'. Fix: state a JSON list of texts, such as [[1, 5, 7], [1, 9]]")
        if self.top1 is None and self.kl is None and self.perplexity is None:
            raise Refused("states no limit. Fix: state 'kl', 'top1' or 'perplexity'")


class VerifyPolicy(PolicyValue, frozen=True, kw_only=True):
    """Which claims ``xrt verify`` checks beyond the policy itself. A run pays no attention to it.

    Attributes
    ----------
    evidence : VerifyEvidence
    determinism : {"none", "run_to_run", "concurrency", "restart", "batch_position", "batch_invariant"}
        Grade that is tested; each includes those before it.
    metrics : dict of str to float
        Name of a function given with ``--metric FILE.py:NAME`` to the least value that it may return. Frozen.
    speed : VerifySpeed or None
        ``None``: nothing is timed.
    memory : VerifyMemory
    generation : VerifyGeneration or None
        ``None``: next tokens are not compared.
    start : float or None
        Most seconds that opening the session may take; ``"20s"`` in a file.

    Examples
    --------
    >>> VerifyPolicy(determinism="restart", speed={"max_slowdown": "3%"}, start="20s")
    VerifyPolicy(determinism='restart', speed=VerifySpeed(max_slowdown=0.03), start=20.0)
    """

    evidence: Accepts[VerifyEvidence, VerifyEvidence | dict[str, Any]] = field(
        Nested(VerifyEvidence, "What must be observed, and what may deviate."), default=VerifyEvidence()
    )
    determinism: Determinism = field(
        Choice(DETERMINISM_GRADES, "Grade of determinism that is tested.", what="grades"), default="none"
    )
    metrics: Accepts[dict[str, float], Mapping[str, float]] = field(
        Floors("Least values of metrics that are given with --metric."), default=FrozenDict()
    )
    speed: Accepts[VerifySpeed | None, VerifySpeed | dict[str, Any] | None] = field(
        Nested(VerifySpeed, "How much slower than a control the session may be."), default=None
    )
    memory: Accepts[VerifyMemory, VerifyMemory | dict[str, Any]] = field(
        Nested(VerifyMemory, "How much memory the session may take."), default=VerifyMemory()
    )
    generation: Accepts[VerifyGeneration | None, VerifyGeneration | dict[str, Any] | None] = field(
        Nested(VerifyGeneration, "How far next tokens of a language model may be from the reference."), default=None
    )
    start: Accepts[float | None, float | str | None] = field(
        Duration("Longest time to open the session, such as '20s'."), default=None
    )


_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "model")
_PATTERN = rf"^[A-Za-z][A-Za-z0-9_-]*\.[a-z]+(:[0-9]+)?\.({'|'.join(_PRECISIONS)})$"


def _check_reference(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 3:
        raise Refused(
            f"{quote(text)} is not a reference. Fix: state 'engine.device.precision', such as 'onnxruntime.cpu.fp32'"
        )
    engine, device, precision = parts
    check_engine(engine)
    check_device(device)
    if precision not in _PRECISIONS:
        raise Refused(f"{quote(precision)} is not a precision{did_you_mean(precision, _PRECISIONS, 'precisions')}")
    if re.fullmatch("auto(:.*)?", device):
        raise Refused(f"{quote(text)} is not a reference: its device is 'auto'. Fix: name one, such as 'cpu'")
    return text


class AccuracyPolicy(PolicyValue, frozen=True, kw_only=True):
    """How close results must be to a reference. At least one limit is stated; the others are those of the precision.

    Attributes
    ----------
    reference : str
        ``"engine.device.precision"``: who computes the reference.
    rtol, atol : float or None
        Each output ``y`` must meet ``max(abs(y - r)) <= atol + rtol * max(abs(r))``.
    cosine : float or None
        Least cosine similarity of each output, from 0 to 1.
    """

    reference: str = field(
        Text(
            "Who computes the reference: engine.device.precision.",
            what="a reference such as 'onnxruntime.cpu.fp32'",
            parse=_check_reference,
            pattern=_PATTERN,
        ),
        default="onnxruntime.cpu.fp32",
    )
    rtol: float | None = field(Number(0.0, math.inf, "Largest relative error."), default=None)
    atol: float | None = field(Number(0.0, math.inf, "Largest absolute error."), default=None)
    cosine: float | None = field(Number(0.0, 1.0, "Least cosine similarity of each output."), default=None)

    def _check_together(self) -> None:
        if self.rtol is None and self.atol is None and self.cosine is None:
            raise Refused("states no limit. Fix: state 'rtol', 'atol' or 'cosine'")


_COMMAND = "xrt policy calibration MODEL PATH"
_MOST = 10**9


class CalibrationPolicy(PolicyValue, frozen=True, kw_only=True):
    """Which inputs a model is quantized with, and the digest that they must have.

    Attributes
    ----------
    path : str
        An ``.npz`` or ``.npy`` file, or a folder of them, as ``calibration=`` of a session takes it. In a policy file
        it is relative to the folder of that file; in a value that was made otherwise, to the current folder.
    digest : str
        ``"sha256:…"`` over names, types, shapes and values of all samples in their order, as
        ``xrt policy calibration`` prints it. Inputs with another digest are refused before anything is quantized.
    samples : int or None
        How many there are.
    """

    path: str | None = field(
        FilePath(
            "File or folder of the inputs, relative to the policy file.",
            what="the path of calibration inputs",
        ),
        default=None,
    )
    digest: str | None = field(
        Text(
            "SHA-256 over all samples in their order, as `xrt policy calibration` prints it.",
            what="'sha256:' and 64 digits of 0-9 and a-f",
            parse=lambda text: _check_digest(text),
            pattern="^sha256:[0-9a-f]{64}$",
        ),
        default=None,
    )
    samples: int | None = field(Integer(1, _MOST, "How many samples there are."), default=None)

    def _check_together(self) -> None:
        for name in ("path", "digest"):
            if getattr(self, name) is None:
                raise Refused(f"states no {name!r}. Fix: {_COMMAND}")


def _check_digest(text: str) -> str:
    head, colon, digits = text.partition(":")
    if head != "sha256" or not colon or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise Refused(f"is no digest. Fix: {_COMMAND}")
    return text
