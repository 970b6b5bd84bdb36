# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind MLServer, with its batches; `bench_serving_peers.py` writes the settings beside it."""

import numpy as np
from common import Model
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Served(MLModel):
    """Runs the model."""

    async def load(self) -> bool:
        self.model = Model(self.settings.parameters.extra["path"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", self.model(x))])
