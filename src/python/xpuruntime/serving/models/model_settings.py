# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelSettings`: one model of ``serve.yaml``, with its canary, its shadow, and the latency asked for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from xpuruntime.policies.compound_kinds import Nested
from xpuruntime.policies.device_spec import DeviceText
from xpuruntime.policies.document import Node, Refused, describe, describe_value, quote, to_python
from xpuruntime.policies.kinds import Choice, FilePath, Flag, Integer, Kind
from xpuruntime.policies.quantities import Duration, Percentage, ShortDuration
from xpuruntime.policies.value import PolicyValue
from xpuruntime.serving.batching.settings import BatchSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CanarySettings", "ModelSettings", "ShadowSettings", "SloSettings", "check_model_name"]

Warmup = Literal["auto", "lock", "probe", "none"]
Curve = Literal["auto", "lock", "load"]
Against = Literal["reference", "self"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_model_name(text: str) -> str:
    """Return the name of a model. Raises `Refused` for one that could not stand in a URL as it is."""
    if _NAME.fullmatch(text) is None or text in (".", ".."):
        raise Refused(
            f"{quote(text)} cannot name a model: use 1 to 128 letters, digits, '.', '_' and '-', and not '.' or '..'"
        )
    return text


class CanarySettings(PolicyValue, frozen=True, kw_only=True):
    """Sampled requests that run once more, apart from the answers."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "every": Integer(1, 10**9, "One request of so many."),
        "against": Choice(get_args(Against), "What sampled requests are compared with.", what="references"),
        "rtol": Percentage("Relative tolerance.", most=10.0, optional=True),
        "atol": Percentage("Absolute tolerance.", most=10.0, optional=True),
    }
    every: int = 1000
    against: Against = "reference"
    rtol: float | None = None
    atol: float | None = None


class ShadowSettings(PolicyValue, frozen=True, kw_only=True):
    """A share of requests that a second policy runs as well, for a comparison of outputs and times."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "policy": FilePath("Policy file of the other session.", what="a path"),
        "share": Percentage("Percentage of requests.", most=1.0),
        "margin": Percentage("Smallest difference in time that counts.", most=10.0),
        "rtol": Percentage("Relative tolerance.", most=10.0, optional=True),
        "atol": Percentage("Absolute tolerance.", most=10.0, optional=True),
    }
    REQUIRED: ClassVar[tuple[str, ...]] = ("policy",)
    policy: str = ""
    share: float = 0.01
    margin: float = 0.05
    rtol: float | None = None
    atol: float | None = None


class SloSettings(PolicyValue, frozen=True, kw_only=True):
    """The latency that batch size and delay are chosen for."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "p99": ShortDuration("Latency that 99 % of requests stay within."),
        "curve": Choice(
            get_args(Curve),
            "Execution times to choose by: of the lock, measured while the model is loaded, or of the lock if it "
            "has them.",
            what="sources",
        ),
    }
    REQUIRED: ClassVar[tuple[str, ...]] = ("p99",)
    p99: float = 0.0
    curve: Curve = "auto"


class _Versions(Kind):
    """``latest``, ``all``, or a list of numbers."""

    def expects(self) -> str:
        """Say what is accepted."""
        return "'latest', 'all', or a list of version numbers such as [1, 3]"

    def _check(self, value: Any) -> Any:
        if value in ("latest", "all"):
            return value
        if isinstance(value, (list, tuple)) and value and all(type(one) is int and one > 0 for one in value):
            return tuple(sorted(set(value)))
        raise self.wrong_type(describe_value(value))

    def _read(self, node: Node) -> Any:
        value = to_python(node)
        return self._check(value) if not isinstance(value, dict) else self._refuse(node)

    def _refuse(self, node: Node) -> Any:
        raise self.wrong_type(describe(node))

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return list(value) if isinstance(value, tuple) else value

    def _schema(self) -> dict[str, Any]:
        numbers = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
        return {"anyOf": [{"enum": ["latest", "all"]}, numbers]}


class ModelSettings(PolicyValue, frozen=True, kw_only=True):
    """One model of ``serve.yaml``."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "source": FilePath("Model file, compiled artifact, or folder of versions.", what="a path"),
        "policy": FilePath("Policy file; by default the policy in the model.", what="a path", optional=True),
        "lock": FilePath("Lock file; if it does not hold, the model is not served.", what="a path", optional=True),
        "device": DeviceText("Device to run on, over that of the policy.", optional=True),
        "trust": Flag("Load a .pt2 file even if that can run code of the file."),
        "versions": _Versions("Which versions of a folder are served."),
        "batching": Nested(BatchSettings, "How requests are batched."),
        "slo": Nested(SloSettings, "Latency that batch size and delay are chosen for.", optional=True),
        "instances": Integer(1, 256, "Batches that run concurrently, on one session and its weights."),
        "warmup": Choice(
            get_args(Warmup),
            "What runs before the model is ready: every shape of the lock, or probe inputs of 1 and "
            "max_batch_size rows in each padded size; auto takes the lock if there is one.",
        ),
        "load": Choice(("startup", "on_demand"), "When the model is loaded; on_demand is at the first request."),
        "required": Flag("Whether the server is ready only while this model is."),
        "max_execution": Duration("A batch that runs longer makes the model not ready."),
        "evidence": Flag("Run an instrumented copy and store its report before the model is ready."),
        "canary": Nested(CanarySettings, "Sampled requests that run once more.", optional=True),
        "shadow": Nested(ShadowSettings, "A second policy on a share of the requests.", optional=True),
    }
    REQUIRED: ClassVar[tuple[str, ...]] = ("source",)

    source: str = ""
    policy: str | None = None
    lock: str | None = None
    device: str | None = None
    trust: bool = False
    versions: str | tuple[int, ...] = "latest"
    batching: BatchSettings = BatchSettings()
    slo: SloSettings | None = None
    instances: int = 1
    warmup: Warmup = "auto"
    load: Literal["startup", "on_demand"] = "startup"
    required: bool = True
    max_execution: float = 60.0
    evidence: bool = False
    canary: CanarySettings | None = None
    shadow: ShadowSettings | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            source: str,
            policy: str | None = None,
            lock: str | None = None,
            device: str | None = None,
            trust: bool = False,
            versions: str | Sequence[int] = "latest",
            batching: BatchSettings | Mapping[str, Any] = ...,
            slo: SloSettings | Mapping[str, Any] | None = None,
            instances: int = 1,
            warmup: Warmup = "auto",
            load: Literal["startup", "on_demand"] = "startup",
            required: bool = True,
            max_execution: float | str = 60.0,
            evidence: bool = False,
            canary: CanarySettings | Mapping[str, Any] | None = None,
            shadow: ShadowSettings | Mapping[str, Any] | None = None,
        ) -> None: ...

    def check_together(self) -> None:
        """Refuse fields that contradict each other."""
        if self.warmup == "lock" and self.lock is None:
            raise Refused("'lock' needs the key 'lock'; state probe, or a lock", "warmup")
        if self.batching.max_queue_delay_us and not self.batching.max_batch_size:
            raise Refused(
                "nothing is put together without max_batch_size, so no request waits for others; state that too",
                "batching",
                "max_queue_delay_us",
            )
        if self.slo is not None and self.batching.max_queue_delay_us:
            raise Refused("chooses the delay itself; leave out batching.max_queue_delay_us", "slo")
        if self.slo is not None and self.batching.preferred_batch_size:
            raise Refused("chooses the batch size itself; leave out batching.preferred_batch_size", "slo")
        if self.slo is not None and self.slo.curve == "lock" and self.lock is None:
            raise Refused("'lock' needs the key 'lock'; state load, or a lock", "slo", "curve")
        if self.slo is not None and self.slo.curve != "lock" and self.warmup == "none":
            raise Refused("measures batches at warm-up; leave out warmup: none, or state curve: lock", "slo")
