# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind LitServe, on JSON, the only form of numbers that it reads, with its batches."""

import sys

import litserve
import numpy as np
from common import Model

PATH, PORT, BATCH, WAIT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Served(litserve.LitAPI):
    """Runs the model."""

    def setup(self, device: str) -> None:
        del device
        self.model = Model(PATH)

    def decode_request(self, request: dict) -> np.ndarray:
        return np.array(request["x"], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model(x)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return [output[at : at + 1] for at in range(len(output))]

    def encode_response(self, output: np.ndarray) -> list[list[float]]:
        return output.tolist()


if __name__ == "__main__":
    batching = {"max_batch_size": BATCH, "batch_timeout": WAIT / 1000} if BATCH else {}
    server = litserve.LitServer(Served(**batching), accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=PORT, num_api_servers=1, generate_client_file=False, log_level="warning")
