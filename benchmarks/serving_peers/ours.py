# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model served by this package: ``python ours.py MODEL PORT BATCH WAIT_MS``; BATCH 0 puts nothing together."""

import signal
import sys
import threading
from pathlib import Path

import xpuruntime as xrt

path, port, batch, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
batching = {"max_batch_size": batch, "max_queue_delay_us": int(wait * 1000)} if batch else {}
policy = Path(path).with_suffix(".policy.yaml")
policy.write_text("execution: {device: cpu, engine: onnxruntime, threads: 1}\n")
settings = xrt.serving.ServeSettings.coerce(
    {
        "schema": "xpuruntime.serve/1",
        "http": {"listen": f"127.0.0.1:{port}"},
        "models": {
            "m": {
                "source": path,
                "policy": str(policy),
                "batching": batching,
            }
        },
    }
)
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with xrt.serving.Server.from_settings(settings, gc_freeze=True):  # as `xrt serve` does
    stop.wait()
