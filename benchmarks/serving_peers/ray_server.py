# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind Ray Serve, on raw bytes, with its batches."""

import signal
import sys
import threading

import numpy as np
import ray
from common import WIDTH, Model
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

PATH, PORT, BATCH, WAIT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


@serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 1})
class Served:
    """Runs the model."""

    def __init__(self) -> None:
        self.model = Model(PATH)

    @serve.batch(max_batch_size=BATCH or 1, batch_wait_timeout_s=WAIT / 1000 if BATCH else 0)
    async def together(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        y = self.model(np.concatenate(rows))
        return [y[at : at + 1] for at in range(len(y))]

    async def __call__(self, request: Request) -> Response:
        x = np.frombuffer(await request.body(), np.float32).reshape(-1, WIDTH)
        y = await self.together(x) if BATCH else self.model(x)
        return Response(y.tobytes(), media_type="application/octet-stream")


stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": PORT}, logging_config={"enable_access_log": False})
serve.run(Served.bind(), route_prefix="/")
stop.wait()
serve.shutdown()
ray.shutdown()
