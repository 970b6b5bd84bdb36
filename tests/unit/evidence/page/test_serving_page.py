# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The status page of a server in a real browser."""

from __future__ import annotations

import numpy as np
from test_timings_page import Page

from xpuruntime.demo import demo_model_path
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.monitoring.pages import status_page

HOSTILE = "<b id='bad'>x</b>.onnx"


def page() -> Page:
    settings = ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "memory": {"budget": {"cpu": "4GiB"}},
            "models": {
                "digits": {"source": str(demo_model_path()), "batching": {"max_batch_size": 8}},
                "hostile": {"source": f"/nowhere/{HOSTILE}"},
            },
        }
    )
    with Models(settings) as service:
        image = np.zeros((2, 1, 8, 8), np.float32)
        for _ in range(3):
            service.infer(InferRequest("digits", [InferTensor("image", "FP32", image.shape, image)])).result(60)
        return Page(status_page(service))


def test_models_batches_memory_and_evidence_are_shown(look):
    browser = look(page())
    browser.click("#refresh")
    assert browser.evaluate("document.querySelector('#refresh').textContent") == "Paused"
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("Not ready")
    assert "nowhere" in browser.evaluate("document.querySelector('.says').innerText")
    cells = "[...document.querySelectorAll('#{} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    models = {row[0]: row for row in browser.evaluate(cells.format("models"))}
    assert models["digits"][2:4] == ["✓READY", "onnxruntime@cpu (model)"]
    assert models["digits"][4].endswith(" ms")
    assert models["digits"][6] == "3"
    assert HOSTILE in models["hostile"][3]
    assert browser.evaluate("document.querySelector('#bad')") is None
    assert browser.evaluate(cells.format("batches"))[0][2:5] == ["3", "2.0", "idle 3"]
    assert browser.evaluate(cells.format("memory"))[0][::2] == ["cpu", "4.0 GiB"]
    assert browser.evaluate(cells.format("evidence"))[0][3] == "none"
    browser.click("#refresh")
    assert "every 5 s" in browser.evaluate("document.querySelector('#refresh').textContent")
    browser.click("#refresh")
