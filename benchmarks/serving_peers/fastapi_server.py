# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model behind FastAPI, on raw bytes: what a careful user writes, without batches."""

import sys

import uvicorn
from common import Model
from fastapi import FastAPI, Request, Response

model = Model(sys.argv[1])
app = FastAPI()


@app.post("/infer")
async def infer(request: Request) -> Response:
    return Response(model.raw(await request.body()), media_type="application/octet-stream")


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning")
