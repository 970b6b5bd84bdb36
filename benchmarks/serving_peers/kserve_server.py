# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind KServe's Python server, which has no batches of its own for this protocol."""

import logging
import sys

import kserve
import numpy as np
from common import Model

kserve.logging.configure_logging()
logging.disable(logging.INFO)


class Served(kserve.Model):
    """Runs the model."""

    def __init__(self) -> None:
        super().__init__("m")
        self.model = Model(sys.argv[1])
        self.ready = True

    def predict(
        self, payload: kserve.InferRequest, headers: object = None, response_headers: object = None
    ) -> kserve.InferResponse:
        del headers, response_headers
        y = self.model(payload.inputs[0].as_numpy())
        output = kserve.InferOutput("y", list(y.shape), "FP32")
        output.set_data_from_numpy(np.ascontiguousarray(y), binary_data=True)
        return kserve.InferResponse(payload.id or "0", "m", [output], use_binary_outputs=True)


if __name__ == "__main__":
    server = kserve.ModelServer(http_port=int(sys.argv[2]), workers=1, enable_grpc=False, enable_latency_logging=False)
    server.start([Served()])
