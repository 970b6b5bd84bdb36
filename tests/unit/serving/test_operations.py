# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory of models under a budget, and what is counted, logged and shown of requests."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from serving_clients import Client
from serving_models import WAIT, ask, rows_of

import xpuruntime as xrt
from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.runtime.cpu_and_memory import process_memory
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.models.loading import MemoryBudget
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import MemorySettings, ServeSettings
from xpuruntime.serving.monitoring.pages import status_data, status_page
from xpuruntime.serving.monitoring.records import AccessLog
from xpuruntime.serving.protocol.infer_messages import write_infer_request
from xpuruntime.serving.transport.gate import Access
from xpuruntime.serving.transport.options import TransportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
X = rows_of(1)


@pytest.fixture
def used(mlp: Path, tmp_path: Path) -> Iterator[Models]:
    """Return a service with ten answers, one wrong request, a model that does not load, and a log."""
    settings = ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "metrics": {"dialect": ["xrt", "triton"]},
            "memory": {"budget": {"cpu": "8GiB"}},
            "access_log": str(tmp_path / "access.log"),
            "models": {
                "mlp": {"source": str(mlp), "batching": {"max_batch_size": 4}, "canary": {"every": 2}},
                "none": {"source": str(tmp_path / "none.onnx"), "required": False},
            },
        }
    )
    with Models(settings) as service:
        for i in range(10):
            service.infer(ask("mlp", {"x": rows_of(i)}, id=f"<{i}>\n")).result(WAIT)
        with pytest.raises(ServingError):
            service.infer(ask("mlp", {"y": X}))
        with pytest.raises(ServingError):
            service.infer(ask("other", {"y": X}))
        yield service


def samples(text: str) -> dict[tuple[str, frozenset[str]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_in_both_dialects(used: Models) -> None:
    pytest.importorskip("prometheus_client")
    from xpuruntime.serving.monitoring.pages import exposition

    data, content_type = exposition(used)
    assert content_type.startswith("text/plain")
    found = samples(data.decode())

    def value(name: str, *labels: str) -> float:
        return found[name, frozenset(labels)]

    assert value("xrt_requests_total", "mlp", "1", "success") == 10
    assert value("xrt_requests_total", "mlp", "1", "other") == 1
    assert value("xrt_request_seconds_count", "mlp", "1") == 10
    assert value("xrt_request_seconds_bucket", "mlp", "1", "+Inf") == 10
    assert value("xrt_inferences_total", "mlp", "1") == 10
    assert value("xrt_dispatches_total", "mlp", "1", "idle") == 10
    assert value("xrt_model_ready", "mlp") == 1
    assert value("xrt_model_ready", "none") == 0
    assert value("xrt_memory_budget_bytes", "cpu") == 8 << 30
    assert value("xrt_memory_used_bytes", "cpu") > 0
    assert value("xrt_queue_requests", "mlp", "1") == 0
    assert value("xrt_canary_runs_total", "mlp", "1", "outside") == 0
    assert value("xrt_access_log_lost_total") == 0
    assert value("nv_inference_request_success", "mlp", "1") == 10
    assert value("nv_inference_request_failure", "mlp", "1", "OTHER") == 1
    assert value("nv_inference_exec_count", "mlp", "1") == 10
    assert value("nv_inference_compute_infer_duration_us", "mlp", "1") > 0
    data, content_type = exposition(used, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert data.endswith(b"# EOF\n")


def test_each_query_of_the_board_is_of_metrics_and_labels_that_there_are(used: Models) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from xpuruntime.serving.monitoring.pages import exposition

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition(used)[0].decode()):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    # Families without a sample, of a service whose models have no shadow.
    found |= {"xrt_shadow_runs_total": {"model", "result"}} if "xrt_shadow_runs" in found else {}
    board = json.loads((ROOT / "examples" / "serving" / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    queries = [target["expr"] for target in targets]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\bxrt_\w+", query)
        assert names, query
        assert set(names) <= found.keys(), query
        for name, selector in re.findall(r"\b(xrt_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)=", selector))
            assert not found[name] or labels <= found[name], query
    shown = {name for query in queries for name in re.findall(r"\bxrt_\w+", query)}
    ignored = ("_created", "_sum", "_count", "_bucket")
    exported = {name for name, labels in found.items() if labels and name.startswith("xrt_")}
    assert not {name for name in exported - shown if not name.endswith(ignored)}


def test_the_access_log_has_one_line_for_each_request(used: Models, tmp_path: Path) -> None:
    used.close()
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert len(lines) == 12
    assert [one["status"] for one in lines].count("OK") == 10
    assert {one["id"] for one in lines if one["status"] == "OK"} == {f"<{i}>\n" for i in range(10)}
    first = lines[0]
    assert first["rows"] == first["batch"] == 1
    assert 0 <= first["queue_ms"] <= first["ms"]
    assert first["compute_ms"] > 0
    assert [one["error"] for one in lines if one["status"] == "NOT_FOUND"] == [
        "no model 'other'. Valid models: mlp, none. Fix: write one of the models"
    ]
    assert (tmp_path / "access.log").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("close", [{"Connection": "close"}, {}], ids=["parsed", "direct"])
def test_what_a_transport_refuses_is_counted_and_logged(used: Models, tmp_path: Path, close: dict[str, str]) -> None:
    grpc = pytest.importorskip("grpc", reason="needs grpc, of the extra serve")
    version = used.slots["mlp"].version()
    before = version.statistics.snapshot().failures["OTHER"]
    options = TransportOptions(access=Access(token="user"))
    with xrt.serving.Server(used, http="127.0.0.1:0", grpc="127.0.0.1:0", options=options) as server:
        client = Client(server.http_address)
        token = {"Authorization": "Bearer user", **close}
        assert client.post("/v2/models/mlp/infer", b"{", **token).status == 400
        assert client.post("/v2/models/mlp/versions/1/infer", b"", **token).status == 400
        assert client.post("/v2/models/mlp/infer", b"{}", **close).status == 401
        assert client.post("/v2/models/gone/infer", b"{}", **token).status == 400
        more = write_infer_request(ask("mlp", {"x": X}, id="g")) + b"\x3a\x00"  # contents of no input
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for message, metadata in ((more, True), (b"\xff", True), (more, False)):
                with pytest.raises(grpc.RpcError):
                    call(message, metadata=[("authorization", "Bearer user")] if metadata else (), timeout=WAIT)
            with pytest.raises(grpc.RpcError):
                next(channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([more]), WAIT))
    assert version.statistics.snapshot().failures["OTHER"] == before + 3  # none for a client without a token
    used.close()
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()][12:]
    assert [(one["model"], one["version"], one["status"]) for one in lines] == [
        ("mlp", "", "INVALID_ARGUMENT"),
        ("mlp", "1", "INVALID_ARGUMENT"),
        ("mlp", "", "UNAUTHENTICATED"),
        ("gone", "", "INVALID_ARGUMENT"),
        ("mlp", "", "INVALID_ARGUMENT"),
        ("", "", "INVALID_ARGUMENT"),
        ("", "", "UNAUTHENTICATED"),  # its message, which names the model, is not read
        ("", "", "UNAUTHENTICATED"),
    ]
    assert [one["id"] for one in lines].count("g") == 1
    assert all("error" in one for one in lines)


@pytest.mark.parametrize("name", ["m.onnx", "linked.onnx", "p.yaml", "serve.yaml"])
def test_a_log_that_would_be_appended_to_a_file_of_the_server_is_refused(mlp: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "m.onnx").write_bytes(mlp.read_bytes())
    (tmp_path / "linked.onnx").symlink_to("m.onnx")
    (tmp_path / "p.yaml").write_text("execution: {device: cpu}\n")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"schema: xpuruntime.serve/1\naccess_log: {name}\nmodels: {{m: {{source: m.onnx, policy: p.yaml}}}}\n"
    )
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"access_log .* which this reads\. Fix: name another file"):
        Models(ServeSettings.load(file))
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_log_that_cannot_be_opened_or_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"access_log: .* cannot be written"):
        AccessLog(str(tmp_path / "no" / "folder"))
    if not os.path.exists("/dev/full"):  # noqa: PTH110 - a device
        pytest.skip("this system has no /dev/full")
    log = AccessLog("/dev/full")
    with pytest.warns(XpuRuntimeWarning, match="requests are served on"):
        log(ask("m", {"x": X}), None, 0.1)
    log(ask("m", {"x": X}, id="\ud800"), None, 0.1)
    assert log.lost == 2
    log.close()
    log.close()


def test_status_data_and_page(used: Models) -> None:
    data = status_data(used)
    assert data["ready"]
    rows = {model["name"]: model for model in data["models"]}
    assert rows["mlp"]["requests"] == 10
    assert rows["mlp"]["p50"] > 0
    assert rows["mlp"]["engine"] == "onnxruntime@cpu (model)"
    assert "runs, 0 out of tolerance, largest drift" in rows["mlp"]["canary"]
    assert rows["none"]["state"] == "UNAVAILABLE"
    assert "none.onnx" in rows["none"]["reason"]
    page = status_page(used)
    assert page.startswith("<!DOCTYPE html>")
    assert "none.onnx" in page


@dataclass(eq=False)
class Model:
    """A model that is unloaded when it is asked to, unless it is in use."""

    name: str
    last_used: float = 0.0
    in_use: bool = False
    loaded: bool = True

    def try_evict(self) -> bool:
        self.loaded = self.loaded and self.in_use
        return not self.loaded


def budget(limit: int, *models: Model, **settings: Any) -> MemoryBudget:
    made = MemoryBudget(MemorySettings(budget={"cpu": limit}, **settings))
    for model in models:
        made.hold(model, "cpu", 40)
    return made


@pytest.mark.parametrize(("size", "settings"), [(101, {}), (61, {"keep": "one"}), (61, {"evict": "none"})])
def test_none_goes_for_a_model_that_does_not_fit_anyway(size: int, settings: dict[str, Any]) -> None:
    one, two = Model("one"), Model("two")
    made = budget(100, one, two, **settings)
    with pytest.raises(ServingError, match=r"whose budget is .* Fix: raise memory\.budget") as refused:
        made.hold(Model("large"), "cpu", size)
    assert refused.value.code is Status.RESOURCE_EXHAUSTED
    assert one.loaded
    assert two.loaded
    assert made.used() == {"cpu": 80}


def test_the_refusal_names_the_others_and_not_the_model_itself() -> None:
    one, two = Model("one"), Model("two")
    made = budget(100, one, two, keep="two")
    with pytest.raises(ServingError, match=r"'one' takes 2\.5 MiB on cpu, .* can go now: two 40 B \(kept\)\. Fix"):
        made.hold(one, "cpu", 5 << 19)
    assert made.used() == {"cpu": 80}


def test_an_engine_gives_back_what_one_large_execution_took(serve: Any, tmp_path: Path) -> None:
    tensors = [("v", TensorProto.FLOAT, [1]), ("shape", TensorProto.INT64, [2]), ("y", TensorProto.FLOAT, ["A", "B"])]
    value, shape, output = (helper.make_tensor_value_info(*tensor) for tensor in tensors)
    graph = helper.make_graph([helper.make_node("Expand", ["v", "shape"], ["y"])], "expand", [value, shape], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "expand.onnx")
    service = serve({"expand": {"source": str(tmp_path / "expand.onnx")}}, memory={"budget": {"cpu": "300MiB"}})

    def expand(*sizes: int) -> None:
        inputs = {"v": np.ones(1, np.float32), "shape": np.array(sizes, np.int64)}
        service.infer(ask("expand", inputs)).result(WAIT)

    expand(1, 1)
    before = process_memory().resident
    if before is None:
        pytest.skip("this system does not say how much memory a process has")
    expand(10_000, 8_000)  # 305 MiB
    for _ in range(16):
        expand(1, 1)
    after = process_memory().resident
    assert after is not None
    assert after - before < 150 << 20


def test_a_model_that_is_refused_more_keeps_what_it_had() -> None:
    one = Model("one")
    made = budget(100, one)
    with pytest.raises(ServingError):
        made.hold(one, "cpu", 101)
    assert made.used() == {"cpu": 40}
