# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelSettings`: one model of ``serve.yaml``, with its canary, its shadow, and the latency asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from xpuruntime.policies.compound_kinds import Nested
from xpuruntime.policies.device_spec import DEVICE_PATTERN, DeviceText, check_device
from xpuruntime.policies.document import Node, Refused, describe, describe_value, quote, to_python
from xpuruntime.policies.kinds import Choice, Duration, FilePath, Flag, Integer, Kind, Percentage, ShortDuration
from xpuruntime.policies.value import Accepts, PolicyValue, field
from xpuruntime.serving.batching.settings import BatchSettings

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

    every: int = field(Integer(1, 10**9, "One request of so many."), default=1000)
    against: Against = field(
        Choice(get_args(Against), "What sampled requests are compared with.", what="references"), default="reference"
    )
    rtol: float | None = field(Percentage("Relative tolerance.", most=10.0), default=None)
    atol: float | None = field(Percentage("Absolute tolerance.", most=10.0), default=None)


class ShadowSettings(PolicyValue, frozen=True, kw_only=True):
    """A share of requests that a second policy runs as well, for a comparison of outputs and times."""

    policy: str = field(FilePath("Policy file of the other session.", what="a path"))
    share: float = field(Percentage("Percentage of requests.", most=1.0), default=0.01)
    margin: float = field(Percentage("Smallest difference in time that counts.", most=10.0), default=0.05)
    rtol: float | None = field(Percentage("Relative tolerance.", most=10.0), default=None)
    atol: float | None = field(Percentage("Absolute tolerance.", most=10.0), default=None)


class SloSettings(PolicyValue, frozen=True, kw_only=True):
    """The latency that batch size and delay are chosen for."""

    p99: float = field(ShortDuration("Latency that 99 % of requests stay within."))
    curve: Curve = field(
        Choice(
            get_args(Curve),
            "Execution times to choose by: of the lock, measured while the model is loaded, or of the lock if it "
            "has them.",
            what="sources",
        ),
        default="auto",
    )


class _Devices(Kind):
    def expects(self) -> str:
        return "a list of devices such as ['cuda:0', 'cuda:1']"

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and all(isinstance(device, str) for device in value):
            return tuple(check_device(device) for device in value)
        raise self.wrong_type(describe_value(value))

    def _read(self, node: Node) -> Any:
        value = to_python(node)
        if isinstance(value, dict):
            raise self.wrong_type(describe(node))
        return self._check(value)

    def plain(self, value: Any) -> Any:
        return list(value)

    def _schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string", "pattern": DEVICE_PATTERN}}


class _Versions(Kind):
    def expects(self) -> str:
        return "'latest', 'all', or a list of version numbers such as [1, 3]"

    def _check(self, value: Any) -> Any:
        if value in ("latest", "all"):
            return value
        if isinstance(value, (list, tuple)) and value and all(type(number) is int and number > 0 for number in value):
            return tuple(sorted(set(value)))
        raise self.wrong_type(describe_value(value))

    def _read(self, node: Node) -> Any:
        value = to_python(node)
        return self._check(value) if not isinstance(value, dict) else self._refuse(node)

    def _refuse(self, node: Node) -> Any:
        raise self.wrong_type(describe(node))

    def plain(self, value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    def _schema(self) -> dict[str, Any]:
        numbers = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
        return {"anyOf": [{"enum": ["latest", "all"]}, numbers]}


class ModelSettings(PolicyValue, frozen=True, kw_only=True):
    """One model of ``serve.yaml``."""

    source: str = field(FilePath("Model file, compiled artifact, or folder of versions.", what="a path"))
    policy: str | None = field(
        FilePath("Policy file; by default the policy in the model.", what="a path"), default=None
    )
    lock: str | None = field(
        FilePath("Lock file; if it does not hold, the model is not served.", what="a path"), default=None
    )
    device: str | None = field(DeviceText("Device to run on, over that of the policy."), default=None)
    devices: Accepts[tuple[str, ...], Sequence[str]] = field(
        _Devices("Devices with a session and weights each, over device; a batch runs on one that is idle."), default=()
    )
    trust: bool = field(Flag("Load a .pt2 file even if that can run code of the file."), default=False)
    versions: Accepts[str | tuple[int, ...], str | Sequence[int]] = field(
        _Versions("Which versions of a folder are served."), default="latest"
    )
    batching: Accepts[BatchSettings, BatchSettings | Mapping[str, Any]] = field(
        Nested(BatchSettings, "How requests are batched."), default=BatchSettings()
    )
    slo: Accepts[SloSettings | None, SloSettings | Mapping[str, Any] | None] = field(
        Nested(SloSettings, "Latency that batch size and delay are chosen for."), default=None
    )
    instances: int = field(
        Integer(1, 256, "Batches that run concurrently on a device, on one session and its weights."), default=1
    )
    warmup: Warmup = field(
        Choice(
            get_args(Warmup),
            "What runs before the model is ready: every shape of the lock, or probe inputs of 1 and "
            "max_batch_size rows in each padded size; auto takes the lock if there is one.",
        ),
        default="auto",
    )
    load: Literal["startup", "on_demand"] = field(
        Choice(("startup", "on_demand"), "When the model is loaded; on_demand is at the first request."),
        default="startup",
    )
    required: bool = field(Flag("Whether the server is ready only while this model is."), default=True)
    max_execution: Accepts[float, float | str] = field(
        Duration("A batch that runs longer makes the model not ready."), default=60.0
    )
    evidence: bool = field(
        Flag("Run an instrumented copy and store its report before the model is ready."), default=False
    )
    canary: Accepts[CanarySettings | None, CanarySettings | Mapping[str, Any] | None] = field(
        Nested(CanarySettings, "Sampled requests that run once more."), default=None
    )
    shadow: Accepts[ShadowSettings | None, ShadowSettings | Mapping[str, Any] | None] = field(
        Nested(ShadowSettings, "A second policy on a share of the requests."), default=None
    )

    def _check_together(self) -> None:
        if self.devices and self.device is not None:
            raise Refused("is stated beside 'device'. Fix: leave one of them out", "devices")
        if self.warmup == "lock" and self.lock is None:
            raise Refused("'lock' needs the key 'lock'. Fix: state probe, or a lock", "warmup")
        if self.batching.max_queue_delay_us and not self.batching.max_batch_size:
            raise Refused(
                "nothing is put together without max_batch_size, so no request waits for others. Fix: state that too",
                "batching",
                "max_queue_delay_us",
            )
        if self.slo is not None and self.batching.max_queue_delay_us:
            raise Refused("chooses the delay itself. Fix: leave out batching.max_queue_delay_us", "slo")
        if self.slo is not None and self.batching.preferred_batch_size:
            raise Refused("chooses the batch size itself. Fix: leave out batching.preferred_batch_size", "slo")
        if self.slo is not None and self.slo.curve == "lock" and self.lock is None:
            raise Refused("'lock' needs the key 'lock'. Fix: state load, or a lock", "slo", "curve")
        if self.slo is not None and self.slo.curve != "lock" and self.warmup == "none":
            raise Refused("measures batches at warm-up. Fix: leave out warmup: none, or state curve: lock", "slo")
