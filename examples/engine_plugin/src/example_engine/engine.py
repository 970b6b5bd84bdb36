# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ReferenceEngine`: what planning asks. Nothing here runs a model, and importing it imports no vendor's package."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.control_builder import ControlBuilder, Option, check_options, own_options
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.runtime.machine import EngineFacts, Machine

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Control

__all__ = ["OPTIONS", "ReferenceEngine"]

NAMES = ("onnx-reference", "onnxref")

#: What ``execution.provider_options.onnx-reference`` may hold.
OPTIONS: dict[str, Option] = {
    "floating_point_errors": Option(
        meaning="what an overflow, an invalid value or a division by zero does", values=("ignore", "raise")
    ),
}

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
#: Types that NumPy has.
_DTYPES = (
    *("float16", "float32", "float64", "bool", "string"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)


class ReferenceEngine(PackagedEngine[dict[str, Any]]):
    """Runs a model by the reference implementation of each operator that the package `onnx` has, in NumPy."""

    name: ClassVar[str] = NAMES[0]
    aliases: ClassVar[tuple[str, ...]] = NAMES[1:]
    # It is right and slow, so it never comes into an "auto" by itself: a policy has to name it.
    automatic: ClassVar[bool] = False
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu",)
    title: ClassVar[str] = "the reference evaluator"
    runs_on: ClassVar[str] = "cpu, in NumPy"
    absent: ClassVar[str] = "the package onnx is not installed"
    install: ClassVar[str | None] = "pip install onnx"

    def probe(self) -> EngineFacts:
        """Say which version is installed. Never raises; imports nothing."""
        try:
            version = metadata.version("onnx")
        except metadata.PackageNotFoundError:
            return self.not_installed()
        return EngineFacts(name=self.name, version=version, loadable=True, providers=("numpy",))

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CPU, where it is installed."""
        facts = machine.engines.get(self.name)
        return ("cpu",) if facts is not None and facts.loadable else ()

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Return why it cannot run the model, or ``None``; `judge` has looked for the device and the package."""
        del machine
        precision = request.policy.execution.precision
        if precision not in ("model", "fp32"):
            reason = f"it computes in the types of the model and converts nothing to {precision}"
            return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, "use precision model")
        foreign = {domain: ops for domain, ops in request.model.custom_domains.items() if domain not in _DOMAINS}
        if foreign:
            named = "; ".join(f"{domain}: {', '.join(ops)}" for domain, ops in foreign.items())
            return Refusal(
                VerdictCode.OP_UNSUPPORTED,
                f"it has no operators outside the standard, such as {named}",
                "use another engine",
            )
        for tensor in (*request.model.inputs, *request.model.outputs):
            if tensor.dtype not in _DTYPES:
                reason = f"{tensor.name!r} is of type {tensor.dtype}, which NumPy does not have"
                return Refusal(VerdictCode.OP_UNSUPPORTED, reason, "put a Cast at it into the model")
        return None

    def resolve(self, request: Request, machine: Machine) -> Resolved[dict[str, Any]]:
        """Return the settings, with one control for each key that the policy states."""
        settings, controls = _settle(request)
        return Resolved(settings, controls, f"the reference evaluator of onnx {machine.engines[self.name].version}")

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        """Load the model; here, and not before, the vendor's package is imported."""
        from example_engine.model import load_model

        return load_model(request, judgement.settings, machine.engines[self.name].version or "")


def _settle(request: Request) -> tuple[dict[str, Any], tuple[Control, ...]]:
    """Return the settings, and what becomes of each key.

    Raises
    ------
    PolicyError
        For an option that is unknown, or has a value that it cannot have.
    """
    execution = request.policy.execution
    where = f"execution.provider_options.{NAMES[0]}"
    options = check_options(own_options(execution.provider_options, NAMES), OPTIONS, where)
    book = ControlBuilder(request.policy.stated())
    book.common(request, NAMES[0], checked="it has no other device than the CPU")
    book.options(where, NAMES, "validated, and read back from NumPy while the model runs")
    book.shapes(request, "NumPy takes any size")
    book.add("execution.precision", "the model's own types", "enforced", "the types of all results are read back")
    book.determinism(request, "-", "enforced", "NumPy gives the same bits for the same input in one process")
    book.add("execution.allow_cpu_ops", "-", "enforced", "every node runs on the CPU here")
    book.add("execution.cuda_graph", "off", "unsupported", "the CPU has no CUDA graphs", "state cuda_graph: off")
    book.add("execution.tf32", "-", "enforced" if execution.tf32 is False else "unsupported", "NumPy has no TF32")
    settings = {"options": options, "strict": request.policy.mode == "strict"}
    return settings, book.finish("onnx's reference evaluator")
