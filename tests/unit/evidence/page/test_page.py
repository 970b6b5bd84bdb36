# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a report as text: whole in itself, closed against the network, escaped, small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from evidence_records import LATENCY, control, unit
from page_models import HOSTILE

from xpuruntime.demo import demo_model_path
from xpuruntime.engines.base import Observed
from xpuruntime.errors import InputError
from xpuruntime.evidence import Report, SourceNode, build_report, page
from xpuruntime.inference import InferenceSession

SOURCES = Path(page.__file__).parent


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.blocks.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.lasttag in ("script", "style") and self.blocks and self.cdata_elem:
            tag, attributes, text = self.blocks.pop()
            self.blocks.append((tag, attributes, text + data))
        else:
            self.text += data


def data_of(parsed: Page) -> dict:
    [text] = [text for tag, attributes, text in parsed.blocks if attributes.get("id") == "data"]
    return json.loads(text)


def test_the_page_loads_nothing_from_anywhere(mixed):
    text = mixed.to_html()
    parsed = Page(text)
    assert {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in parsed.tags} == set()
    for _, attributes in parsed.tags:
        assert not {"src", "srcset", "action", "data", "poster", "style"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    own = "".join(body for _, attributes, body in parsed.blocks if attributes.get("id") != "data")
    assert set(re.findall(r"https?://[^\"'\s)]+", own)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", own)


def test_its_own_policy_lets_in_exactly_its_style_and_script(mixed):
    parsed = Page(mixed.to_html())
    [policy] = [a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = {name: values for name, *values in (rule.split() for rule in policy.split(";"))}
    assert rules["default-src"] == ["'none'"]
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        texts = [t for tag, attributes, t in parsed.blocks if tag == kind and attributes.get("type") is None]
        digests = {f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts}
        assert digests == set(rules[rule])
    assert rules["require-trusted-types-for"] == ["'script'"]
    assert rules["trusted-types"] == ["'none'"]


def test_no_markup_is_made_of_strings():
    scripts = "".join(path.read_text(encoding="utf-8") for path in sorted((SOURCES / "js").iterdir()))
    assert len(scripts) > 10_000
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|DOMParser", scripts)


def test_everything_of_the_report_is_in_the_data(mixed):
    data = data_of(Page(mixed.to_html()))
    names = data["strings"]
    assert [names[i] for i in data["units"]["id"]] == [u.id for u in mixed.units]
    assert [[names[i] for i in source_node] for source_node in data["units"]["source_nodes"]] == [
        list(u.source_nodes) for u in mixed.units
    ]
    assert data["units"]["time"] == [u.time.value if u.time else None for u in mixed.units]
    assert [names[i] for i in data["graph"]["name"]] == [node.name for node in mixed.graph]
    assert data["graph"]["reads"] == [[], [0], [], [1, 2], [0, 3], [4]]
    assert [(k["unit"], k["kind"], k["runs"]) for k in data["kinds"]] == [("us", "wall", 5), ("cycles", "cycles", 3)]
    assert dict(data["memory"]) == mixed.memory
    assert data["command"] == mixed.command
    assert (data["headline"], data["partial"]) == (mixed.headline, True)
    statuses = [o["status"] for o in data["observations"]]
    assert len(statuses) == len(mixed.observations)
    assert statuses == sorted(statuses, key=["substituted", "unsupported", "unobservable", "honoured"].index)


def test_without_scripts_the_policy_can_still_be_read(mixed):
    text = mixed.to_html()
    shown = text[text.index("<noscript>") : text.index("</noscript>")]
    for observation in mixed.observations:
        assert observation.key in shown


def hostile() -> Report:
    """A report in which every text is markup."""
    node = unit(HOSTILE, op=HOSTILE, device=HOSTILE, ran=HOSTILE, kernel=HOSTILE, provider=HOSTILE, layout=HOSTILE)
    return build_report(
        {"engine": HOSTILE, "device": HOSTILE, "model": {"path": HOSTILE}, "policy": {HOSTILE: HOSTILE}},
        [control(HOSTILE, HOSTILE, HOSTILE, "unsupported", reason=HOSTILE)],
        Observed(units=(node,), notes=(HOSTILE,)),
        latency=LATENCY,
        memory={HOSTILE: 1},
        command=HOSTILE,
        environment={"python": HOSTILE, "variables": {HOSTILE: HOSTILE}},
        graph=(SourceNode(name=HOSTILE, op=HOSTILE, inputs=(), outputs=(HOSTILE,)),),
    )


def test_text_of_the_report_never_becomes_markup(mixed):
    plain, parsed = Page(mixed.to_html()), Page(hostile().to_html())
    assert {tag for tag, _ in parsed.tags} == {tag for tag, _ in plain.tags}
    assert len(parsed.blocks) == len(plain.blocks)
    assert data_of(parsed)["strings"].count(HOSTILE) == 1
    assert HOSTILE in parsed.text


def test_the_fragment_for_notebooks_is_closed_in_itself(mixed):
    text = mixed._repr_html_()
    parsed = Page(text)
    assert parsed.tags[0] == ("div", {"class": "xrt-report"})
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert not [a for _, a in parsed.tags if a.keys() - {"class", "scope"}]
    [style] = [body for tag, _, body in parsed.blocks if tag == "style"]
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
    assert selectors
    assert [selector for selector in selectors if not selector.startswith(".xrt-report")] == []
    assert mixed.headline in parsed.text
    assert "cycles" in parsed.text  # a table for each kind of time
    assert "incomplete" in parsed.text
    assert Page(hostile()._repr_html_()).tags[1:3] == [("style", {}), ("p", {"class": "xrt-headline xrt-substituted"})]


def test_saving_is_whole_or_not_at_all(mixed, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    assert mixed.save_html(path) == path
    assert path.read_text(encoding="utf-8") == mixed.to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(InputError, match=r"cannot write the page of the report to .*nowhere.*Fix: give a path"):
        mixed.save_html(tmp_path / "nowhere" / "page.html")


def test_a_report_without_a_graph_can_still_be_read_and_shown(mixed, tmp_path):
    raw = mixed.to_dict()
    del raw["graph"]
    path = tmp_path / "older.json"
    path.write_bytes(msgspec.json.encode(raw))
    assert Report.load(path) == msgspec.structs.replace(mixed, graph=())
    assert data_of(Page(Report.load(path).to_html()))["graph"] == {"name": [], "op": [], "reads": []}


def test_the_graph_of_a_session_is_the_models():
    with InferenceSession(demo_model_path(), device="cpu") as session:
        report = session.explain(runs=1)
        nodes = session.model.nodes
    assert [(n.name, n.op, n.outputs) for n in report.graph] == [(n.name, n.op, n.outputs) for n in nodes]
    outputs = {"image"} | {output for node in nodes for output in node.outputs}
    assert [n.inputs for n in report.graph] == [tuple(i for i in n.inputs if i in outputs) for n in nodes]
    assert report.graph[0].inputs == ("image",)
