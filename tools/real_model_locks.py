# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lock, verify and compare models of published wheels on the engines of the CPU.

``python tools/real_model_locks.py --models magika,nudenet`` takes the ONNX models that `real_models.py` fetches, and
the modules of `real_torch_models.py` on PyTorch; ``--engines qnn`` QNN's simulator, which is slow. Each is locked
twice, opened under the lock, verified against it and compared with it as by ``xrt diff``. Each model and engine has a
process of its own. It exits with 1 where one does not hold and its engine runs the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from real_model_checks import ENGINES
from real_model_table import MODELS, Model, feeds
from real_models import CACHE, fetch, place
from real_torch_models import TORCH_MODELS, export

#: Seconds that a model may take on an engine.
TIMEOUT = 600
#: Errors with which an engine, or the policy, refuses a model.
_REFUSALS = ("OpenError", "UnsupportedOperationError", "EngineFailed: QNN does not load", "AccuracyError")


def _policy(model: Model, engine: str) -> dict[str, Any]:
    if engine != "qnn":
        return {"execution": {"engine": engine, "device": "cpu", "precision": model.precision}}
    shapes = {input_.name: list(input_.shape) for input_ in model.inputs}
    execution = {"engine": "qnn", "device": "npu", "precision": "fp16", "shapes": shapes}
    return {
        "execution": {**execution, "provider_options": {"qnn": {"soc": "sm8650"}}},
        "accuracy": {"rtol": 0.05, "atol": 0.01, "cosine": 0.99},
    }


def examine(path: Path, model: Model, engine: str) -> None:
    """Print what held, and raise where something did not."""
    import numpy as np

    import xpuruntime as xrt
    from xpuruntime.locks.diff.diffing import compare_environments

    given: dict[str, Any] = next(iter(feeds(model, 1)))
    policy = _policy(model, engine)
    with tempfile.TemporaryDirectory() as folder:
        lock, again = (Path(folder) / name for name in ("m.lock", "again.lock"))
        made, other = (xrt.lock(path, policy, one, inputs=given).lock for one in (lock, again))
        assert made.digest == other.digest, "locking twice gave another lock"
        with xrt.InferenceSession(path, policy=policy) as session:
            expected = session.run(given)
        with xrt.InferenceSession(path, lock=lock) as session:
            assert session.plan.policy_source == "lock"
            for name, array in session.run(given).items():
                assert np.array_equal(array, expected[name], equal_nan=True), f"{name} has other bits under the lock"
        verified = xrt.verify(path, policy, lock=lock, inputs=given, only=["evidence", "accuracy"])
        failed = verified.of("fail")  # such as a precision that the engine does not have, with a lock or without
        assert all(one.id.startswith("evidence.execution.") for one in failed), str(verified)
        found = compare_environments(str(lock), "here", path, inputs=given)
        assert found.exit_code == 0, str(found)
    identity = made.identity
    told = "".join(f"; {one.id}: {' '.join(one.reason.split())[:120]}" for one in failed)
    print(f"holds: {len(identity.entries)} units, the kernels of {identity.unobservable} are not reported{told}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of wheels and models (default: %(default)s)")
    parser.add_argument("--models", help="names, separated by commas; default: all")
    parser.add_argument("--engines", help="default: all but qnn, as far as they take the model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = {model.name: model for model in (*MODELS, *TORCH_MODELS)}
    names = given.models.split(",") if given.models else list(known)
    if wrong := set(names) - set(known):
        parser.error(f"unknown: {', '.join(wrong)}")
    models = tuple(known[name] for name in names)
    if given.child:
        path = export(given.cache, models[0]) if models[0] in TORCH_MODELS else place(given.cache, models[0])
        examine(path, models[0], given.engines)
        return 0
    fetch(given.cache, models)
    failed = 0
    for model in models:
        possible = ("torch",) if model in TORCH_MODELS else (*ENGINES, "qnn")
        for engine in given.engines.split(",") if given.engines else possible[:2]:
            if engine not in possible:
                continue
            command = [sys.executable, __file__, "--cache", given.cache, "--child"]
            command += ["--models", model.name, "--engines", engine]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
                text, code = (done.stdout if done.returncode == 0 else done.stderr).strip(), done.returncode
            except subprocess.TimeoutExpired:
                text, code = f"still running after {TIMEOUT} s", 1
            refused = any(f"xpuruntime.errors.{refusal}" in text for refusal in _REFUSALS)
            failed += code != 0 and not refused
            line = next((splitline for splitline in reversed(text.splitlines()) if splitline), "")
            how = "" if code == 0 else "refused: " if refused else "FAILED: "
            print(f"{model.name} on {engine}: {how}{line[:300]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
