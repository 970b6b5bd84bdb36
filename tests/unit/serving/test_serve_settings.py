# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``serve.yaml``: what is read, and how each mistake is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies.compound_kinds import Nested
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.models.model_settings import ModelSettings
from xpuruntime.serving.models.settings import ServeSettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving" / "models.md"
KEYS = PAGE.parent.parent / "reference" / "file-keys.md"

HEAD = "schema: xpuruntime.serve/1\n"
WHOLE = """\
schema: xpuruntime.serve/1
http: {listen: "127.0.0.1:8000", max_body: 64MiB, body_threads: 1}
grpc: {listen: false}
metrics: {path: /metrics, dialect: [xrt, triton]}
admin: {repository: true, shared_memory: false}
memory: {budget: {"cuda:0": 20GiB, cpu: 8GiB}, evict: lru, keep: [resnet]}
models:
  resnet:
    source: resnet.xrt
    policy: resnet.yaml
    lock: /elsewhere/resnet.lock
    batching:
      {max_batch_size: 32, max_queue_delay_us: 500, shapes: bucket, pad: {ids: {value: 0, to: [128, 64]}}}
    instances: 2
    warmup: lock
    canary: {every: 1000, against: reference}
    shadow: {policy: next.yaml, share: 1%}
"""


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(WHOLE)
    read = ServeSettings.load(path)
    assert read.grpc.listen is None
    assert read.memory.budget == {"cuda:0": 20 << 30, "cpu": 8 << 30}
    model = read.models["resnet"]
    assert model.source == str(tmp_path / "resnet.xrt"), "paths start at the folder of the file"
    assert model.lock == "/elsewhere/resnet.lock"
    assert model.shadow is not None
    assert model.shadow.policy == str(tmp_path / "next.yaml")
    assert model.batching.pad["ids"].to == (64, 128)


def test_what_is_written_reads_back() -> None:
    read = ServeSettings.loads(WHOLE)
    assert ServeSettings.coerce({"schema": "xpuruntime.serve/1", **read.to_plain()}) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http: {lisen: x}", r":2:8: unknown key 'lisen' in http; did you mean 'listen'\?"),
        ("http: {listen: nowhere}", "http.listen: 'nowhere' is not an address"),
        ("http: {listen: 'a:99999'}", "is not an address"),
        ("models: {r: {}}", "models.r: needs 'source'"),
        ("models: {r: {source: a, batching: {max_batch: 3}}}", "unknown key 'max_batch' in models.r.batching"),
        ("models: {'a/b': {source: a}}", "models: 'a/b' cannot name a model"),
        ("models: {'..': {source: a}}", "models: '..' cannot name a model"),
        ("modells: {}", r"unknown key 'modells' in the file; did you mean 'models'\?"),
        ("models: {r: {source: a, versions: [x]}}", "got a list. Fix: state 'latest', 'all'"),
        ("models: {r: {source: a}}\nmemory: {keep: [q]}", "'q' is no model of this file"),
        ("models: {r: {source: a, warmup: lock}}", "'lock' needs the key 'lock'"),
        ("models: {r: {source: a, slo: {p99: 20}}}", "has no unit. Fix: write '20s'"),
        (
            "models: {r: {source: a, slo: {p99: 20ms}, batching: {max_batch_size: 4, max_queue_delay_us: 5}}}",
            "chooses the delay itself",
        ),
        ("models: {r: {source: a, batching: {max_queue_delay_us: 5}}}", "without max_batch_size"),
        ("models: {r: {source: a, shadow: {share: 1%}}}", "models.r.shadow: needs 'policy'"),
        ("models: [a]", "models: got a list. Fix: state a mapping of name to model"),
        ("memory: {budget: {cuda: 8GiB}}", "memory.budget: 'cuda' names no single device. Fix: write 'cuda:0'"),
        ("memory: {budget: {cpuu: 8GiB}}", "memory.budget: 'cpuu' is not a device"),
        ("admin: {shared_memory: true}", "admin.shared_memory: true, but memory shared with clients is not served"),
        ("metrics: {path: /v2/metrics}", "'/v2/metrics' is a path of the server itself"),
        ("metrics: {path: metrics}", "is not a path of a URL"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        ServeSettings.loads(HEAD + text)


def test_the_schema_must_be_stated() -> None:
    with pytest.raises(PolicyError, match=r"needs schema: xpuruntime.serve/1 in the first line"):
        ServeSettings.loads("models: {}")
    with pytest.raises(PolicyError, match="upgrade xpuruntime to read it"):
        ServeSettings.loads("schema: xpuruntime.serve/9")


@pytest.mark.parametrize(
    ("batching", "said"),
    [
        ({"preferred_batch_size": [4]}, "4 is more than max_batch_size 0"),
        ({"preserve_ordering": True, "priority_levels": 3}, "contradicts priority_levels"),
        ({"shapes": "bucket", "max_batch_size": 4}, "needs a rule for each input that is padded"),
        ({"shapes": "fixed"}, "'fixed' needs a max_batch_size of at least 1"),
        ({"pad": {"x": {"to": [4]}}}, "shapes is 'exact', which pads nothing"),
        ({"shapes": "bucket", "pad": {"x": {}}}, "'bucket' needs the sizes"),
        ({"shapes": "bucket", "pad": {"x": {"to": [4, 4]}}}, "4 is listed twice"),
        ({"default_priority_level": 2}, "2 is no level of priority_levels: 0"),
        ({"max_batch_size": -1}, "out of range"),
    ],
)
def test_contradictions(batching: dict, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        BatchSettings(**batching)
    with pytest.raises(PolicyError, match=said):
        ModelSettings(source="a.onnx", batching=batching)


def keys(kinds: dict, prefix: str = "") -> list[str]:
    """Return the dotted keys of a section, without those of the models."""
    texts = []
    for name, kind in kinds.items():
        if isinstance(kind, Nested) and name != "batching":
            texts += keys(kind.kinds, f"{prefix}{name}.")
        else:
            texts.append(f"{prefix}{name}")
    return texts


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        ("serve.yaml", ServeSettings.KINDS),
        ("A model of serve.yaml", ModelSettings.KINDS),
        ("Batching", BatchSettings.KINDS),
    ],
)
def test_the_reference_has_every_key_and_no_other(title: str, kinds: dict) -> None:
    text = KEYS.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)^## ", text, re.M | re.S)
    assert section is not None
    rows = re.findall(r"^\| `([^`]+)` \|", section[1], re.M)
    assert {row.partition(".NAME")[0] for row in rows} == set(keys(kinds))


def test_the_file_of_the_reference_is_read() -> None:
    block = re.search(r"```yaml\n(schema:.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert block is not None
    assert ServeSettings.loads(block[1]).models["resnet"].batching.max_batch_size == 32
