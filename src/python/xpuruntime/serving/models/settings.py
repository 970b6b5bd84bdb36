# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Settings of a server, as ``serve.yaml`` or arguments state them, read as strictly as a policy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from xpuruntime.errors import InputError
from xpuruntime.policies import files
from xpuruntime.policies.compound_kinds import FrozenDict, Nested, OneOrMore
from xpuruntime.policies.device_spec import ByteSize, check_device
from xpuruntime.policies.document import Node, Refused, ScalarNode, from_python, quote
from xpuruntime.policies.kinds import Choice, FilePath, Flag, Integer, Text
from xpuruntime.policies.value import PolicyValue, field, home_in_file, read_fields
from xpuruntime.serving.batching.settings import NamedOf
from xpuruntime.serving.models.model_settings import ModelSettings, check_model_name

if TYPE_CHECKING:
    import os

#: The version of the file format that this release reads.
SCHEMA = "xpuruntime.serve/1"

Dialect = Literal["xrt", "triton"]

_LISTEN = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.*_-]+):[0-9]{1,5}")


def _check_schema(text: str) -> str:
    if text != SCHEMA:
        near = "; upgrade xpuruntime to read it" if text.startswith("xpuruntime.serve/") else ""
        raise Refused(f"{quote(text)} is not a version that this release reads; it reads {SCHEMA}{near}")
    return text


def _check_listen(text: str) -> str:
    if _LISTEN.fullmatch(text) is None or int(text.rpartition(":")[2]) > 65535:
        raise Refused(f"{quote(text)} is not an address. Fix: write HOST:PORT, such as 127.0.0.1:8000 or [::1]:0")
    return text


def _check_budget_device(text: str) -> str:
    device = check_device(text)
    if device in ("auto", "cuda"):
        raise Refused(f"{quote(text)} names no single device. Fix: write '{'cuda:0' if device == 'cuda' else 'cpu'}'")
    if device != text:
        raise Refused(f"{quote(text)} is another way to write {quote(device)}. Fix: write that")
    return device


def _check_path(text: str) -> str:
    if not text.startswith("/") or text != text.strip() or "?" in text or "#" in text:
        raise Refused(f"{quote(text)} is not a path of a URL, such as '/metrics'")
    if text in ("/", "/status") or text == "/v2" or text.startswith("/v2/"):
        raise Refused(f"{quote(text)} is a path of the server itself. Fix: state another, such as '/metrics'")
    return text


class _Address(Text):
    """An address to listen on; false for none."""

    def __init__(self, doc: str) -> None:
        super().__init__(doc, what="an address such as '127.0.0.1:8000', or false", parse=_check_listen, optional=True)

    def _read(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and (node.value is False or (node.plain and node.text in ("off", "no"))):
            return None
        return super()._read(node)

    def check(self, value: Any) -> Any:
        return None if value is False else super().check(value)


class HttpSettings(PolicyValue, frozen=True, kw_only=True):
    """The HTTP listener: its address, ``None`` for none, the largest body and JSON, and threads that receive bodies."""

    listen: str | None = field(_Address("Address of the HTTP listener, or false."), default="127.0.0.1:8000")
    max_body: int = field(ByteSize("Largest body of a request, such as '64MiB'."), default=64 << 20)
    max_json: int = field(
        ByteSize("Largest JSON of an inference request, without the tensors behind it, such as '4MiB'."),
        default=4 << 20,
    )
    body_threads: int | None = field(
        Integer(
            0,
            64,
            "Threads that receive bodies of more than 64 KiB without TLS; by default one for every four "
            "processors, at most four. With 0, the event loop does.",
        ),
        default=None,
    )


class GrpcSettings(PolicyValue, frozen=True, kw_only=True):
    """The gRPC listener: its address, ``None`` for no listener, and the largest message in bytes."""

    listen: str | None = field(_Address("Address of the gRPC listener, or false."), default="127.0.0.1:8001")
    max_message: int = field(ByteSize("Largest message, such as '64MiB'."), default=64 << 20)


class MetricsSettings(PolicyValue, frozen=True, kw_only=True):
    """Where Prometheus reads metrics, and in whose names: ``xrt``, ``triton``, or both."""

    path: str = field(
        Text("Path of the metrics, for Prometheus.", what="a path", parse=_check_path), default="/metrics"
    )
    dialect: tuple[Dialect, ...] = field(
        OneOrMore(Choice(get_args(Dialect), what="dialects"), "Names of the metrics."), default=("xrt",)
    )


class AdminSettings(PolicyValue, frozen=True, kw_only=True):
    """What clients may change: loading and unloading of models. Shared memory is not served, and true is refused."""

    repository: bool = field(Flag("Let clients load and unload models."), default=False)
    shared_memory: bool = field(Flag("true is refused: memory shared with clients is not supported."), default=False)
    key_file: str | None = field(FilePath("File with the key that admin routes require.", what="a path"), default=None)

    def _check_together(self) -> None:
        if self.shared_memory:
            raise Refused("true, but memory shared with clients is not served. Fix: leave it out", "shared_memory")


class MemorySettings(PolicyValue, frozen=True, kw_only=True):
    """How much memory all models of a device may take together, and which go when it is not enough."""

    budget: dict[str, int] = field(
        NamedOf(
            ByteSize(),
            "device to size, such as {cpu: 8GiB}",
            "Most bytes of all models of a device; other devices have no limit.",
            name=Text(what="a device", parse=_check_budget_device),
        ),
        default=FrozenDict(),
    )
    evict: Literal["lru", "none"] = field(
        Choice(
            ("lru", "none"), "Which model makes room for another: the least recently used one, or none.", what="orders"
        ),
        default="lru",
    )
    keep: tuple[str, ...] = field(
        OneOrMore(Text(what="a model", parse=check_model_name), "Models that are never evicted.", empty=True),
        default=(),
    )


class ServeSettings(PolicyValue, frozen=True, kw_only=True):
    """What ``serve.yaml`` says.

    Attributes
    ----------
    http : HttpSettings
    grpc : GrpcSettings
    metrics : MetricsSettings
    admin : AdminSettings
    memory : MemorySettings
    access_log : str or None
        File that each request is written to as a line of JSON; ``"-"`` for the standard output. ``None``: no log.
    models : dict of str to ModelSettings
        Paths are relative to the folder of the file.

    Raises
    ------
    PolicyError
        For an unknown key or a bad value; names the nearest valid one.
    """

    schema: str = field(
        Text("Version of the file format.", what=f"'{SCHEMA}'", parse=_check_schema, pattern=f"^{SCHEMA}$"),
        default=SCHEMA,
    )
    http: HttpSettings = field(Nested(HttpSettings, "The HTTP listener."), default=HttpSettings())
    grpc: GrpcSettings = field(Nested(GrpcSettings, "The gRPC listener."), default=GrpcSettings())
    metrics: MetricsSettings = field(Nested(MetricsSettings, "Metrics."), default=MetricsSettings())
    admin: AdminSettings = field(Nested(AdminSettings, "What clients may change."), default=AdminSettings())
    memory: MemorySettings = field(Nested(MemorySettings, "Memory of all models."), default=MemorySettings())
    access_log: str | None = field(
        FilePath(
            "File with a JSON line for each inference request, '-' for standard output. Rotate it by copying and "
            "truncating.",
            words=("-",),
            what="a path",
        ),
        default=None,
    )
    models: dict[str, ModelSettings] = field(
        NamedOf(
            Nested(ModelSettings), "name to model", "The models.", name=Text(what="a name", parse=check_model_name)
        ),
        default=FrozenDict(),
    )

    def _check_together(self) -> None:
        for name in self.memory.keep:
            if self.models and name not in self.models:
                raise Refused(f"{quote(name)} is no model of this file", "memory", "keep")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file, ``.yaml``, ``.yml`` or ``.json``.

        Paths in it are relative to its folder, and absolute in the settings.

        Raises
        ------
        PolicyError
            ``file:line:column: message``, when the file cannot be read or is not valid.
        """
        from pathlib import Path

        settings = cls._of(files.load(path)).in_folder(Path(path).absolute().parent)
        settings.check_log(path)
        return settings

    @classmethod
    def loads(cls, text: str, format: Literal["yaml", "json"] = "yaml", *, name: str = "serve.yaml") -> Self:
        """Read the text of a file; `name` stands for the file in messages. Raises `PolicyError`."""
        return cls._of(files.loads(text, format, name))

    @classmethod
    def coerce(cls, document: Mapping[str, Any]) -> Self:
        """Make settings of a mapping with the keys of a file. Raises `PolicyError`."""
        try:
            return cls._of(files.Document(from_python(dict(document)), "serve.yaml"))
        except Refused as refused:
            raise files.policy_error(refused, "serve.yaml") from None

    @classmethod
    def _of(cls, document: files.Document) -> Self:
        try:
            fields = read_fields(document.root, cls.KINDS)
            if "schema" not in fields:
                raise Refused(f"needs schema: {SCHEMA} in the first line").at(document.root)
            settings = cls.read(document.root)
        except Refused as refused:
            if refused.unknown_key is not None:
                refused.reason = home_in_file(refused.unknown_key, cls.KINDS) or refused.reason
                refused.path = refused.path or ("the file",)
            raise files.policy_error(refused, document.name) from None
        return settings

    def check_log(self, *other_paths: str | os.PathLike[str]) -> None:
        """Refuse an access log that is a file which the server reads: a model, policy, lock or key, or one of `more`.

        Raises
        ------
        InputError
        """
        from xpuruntime.files.paths import kind_of, refuse_overwriting

        read: list[str | os.PathLike[str]] = [*other_paths]

        def keep(path: str) -> str:
            read.append(path)
            return path

        self.replace(access_log=None).relocated(keep)
        log = None if self.access_log == "-" else self.access_log
        refuse_overwriting({"access_log": log}, [("a file", line) for line in read if kind_of(line) == "file"])

    def in_folder(self, folder: os.PathLike[str]) -> Self:
        """Return settings whose paths start at a folder."""
        from pathlib import Path

        from xpuruntime.files.paths import with_home

        return self.relocated(lambda path: str(Path(folder) / with_home(path, "serve.yaml")))


PolicyValue.ROOTS.append(ServeSettings)


def is_settings_file(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a settings file, by its name."""
    return os.fspath(source).endswith((".yaml", ".yml", ".json"))


def settings_of_source(
    source: str | os.PathLike[str], model: Mapping[str, Any], *, name: str | None, given: Sequence[str]
) -> ServeSettings:
    """Return the settings in a file, or those of one model."""
    if is_settings_file(source):
        if given:
            raise InputError(f"{given[0]} describes one model, and {source} has its own. Fix: state it in the file")
        return ServeSettings.load(source)
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source).resolve().stem)
    keys = {key: value for key, value in model.items() if value is not None}
    return ServeSettings.coerce(
        {"schema": SCHEMA, "models": {stem if name is None else name: {"source": os.fspath(source), **keys}}}
    )
