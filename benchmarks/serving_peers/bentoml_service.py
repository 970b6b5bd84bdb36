# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind BentoML, with its batches: ``bentoml serve bentoml_service:Served``, settings in the environment."""

import os

import bentoml
import numpy as np
from common import Model

BATCH = int(os.environ["BATCH"])


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Served:
    """Runs the model."""

    def __init__(self) -> None:
        self.model = Model(os.environ["MODEL"])

    @bentoml.api(batchable=bool(BATCH), max_batch_size=BATCH or 2, max_latency_ms=1000)
    def infer(self, x: np.ndarray) -> np.ndarray:
        return self.model(x.astype(np.float32, copy=False))
