# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write pages of ``docs/reference`` from the code: options, operators, keys, kernels of packages, and advisories.

``python tools/option_tables.py`` writes; ``--check`` only says whether the pages are up to date (``make lint``).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.known_errors import KnownError, known_errors
from xpuruntime.engines.onnxruntime.options import (
    COREML_OPTIONS,
    CPU_OPTIONS,
    CUDA_OPTIONS,
    DML_OPTIONS,
    DML_SESSION_OPTIONS,
    MIGRAPHX_OPTIONS,
    SESSION_OPTIONS,
)
from xpuruntime.engines.onnxruntime.precision_controls import OPERATORS
from xpuruntime.engines.onnxruntime_genai.controls import OPTIONS as GENAI_OPTIONS
from xpuruntime.engines.openvino.options import CPU_OPTIONS as OPENVINO_CPU_OPTIONS
from xpuruntime.engines.openvino.options import GPU_OPTIONS as OPENVINO_GPU_OPTIONS
from xpuruntime.engines.openvino.options import GRAPH_OPTIONS as OPENVINO_GRAPH_OPTIONS
from xpuruntime.engines.openvino.options import NPU_OPTIONS as OPENVINO_NPU_OPTIONS
from xpuruntime.engines.openvino_genai.engine import OPTIONS as PIPELINE_OPTIONS
from xpuruntime.engines.qnn.options import GRAPH_OPTIONS as QNN_GRAPH_OPTIONS
from xpuruntime.engines.qnn.options import OPTIONS as QNN_OPTIONS
from xpuruntime.engines.qnn.options import SOCS
from xpuruntime.engines.qnn.options import TARGET_OPTIONS as QNN_TARGET_OPTIONS
from xpuruntime.engines.tensorrt.options import BUILD_OPTIONS, RUN_OPTIONS, TEXT_OPTIONS
from xpuruntime.engines.torch.names import OPTIONS as TORCH_OPTIONS
from xpuruntime.policies.advisories import ADVISORIES
from xpuruntime.policies.compound_kinds import Nested
from xpuruntime.serving.batching.settings import BatchSettings, NamedOf
from xpuruntime.serving.models.model_settings import ModelSettings
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.tuning.spec.tune_spec import TuneSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.control_builder import Option
    from xpuruntime.policies.kinds import Kind

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
OPERATORS_INTRO = """\
# Operators on engines

<!-- Written by tools/option_tables.py from known_errors.json of each engine and precision_controls.py. Do not edit. -->

## Known silent errors

Engines compute these operators without an error, but not as ONNX defines them. A plan names such nodes under
`execution.operators`. `mode: strict` refuses the engine for the model and tries the next one; the other modes warn, and
the report is not honoured. Sessions refuse inputs with NaN or without elements that a row names, in all modes.
[OpenVINO](../engines/openvino.md#known-silent-errors) has the ways out.

Rows with the word *simulator* were seen on the engine's simulator, which `strict` refuses, and not executed on a
device, for which a plan only notes them.
"""
ARITHMETIC_INTRO = """
## Arithmetic of quantized operators on ONNX Runtime

The table covers operators that models state, and those that ONNX Runtime's optimizer makes of QuantizeLinear and
DequantizeLinear. Every other operator computes in the type of its tensors.

| multiplies in | operators |
|---|---|
"""
#: A kind of `OPERATORS` to its words.
ARITHMETIC = {
    "integer": "the integers that it reads",
    "dynamic": "int8: it quantizes float activations itself",
    "level": "int8 on the CPU where its attribute `accuracy_level` is 4, else the type of its activations",
    "dequantized": "the type of its activations: weights are dequantized",
    "unknown": "unknown, and the evidence says so",
}
INTRO = """\
# Vendor options

<!-- Written by tools/option_tables.py from the code that checks the options. Do not edit. -->

`execution.provider_options` of a policy takes these, under the name of the engine. A name or a value that is not here
is refused. What an option does in a session is on the pages of the [engines](../engines/index.md).
"""


FILE_KEYS_INTRO = """\
# Keys of serve.yaml and tune.yaml

<!-- Written by tools/option_tables.py from the classes that read the files. Do not edit. -->

An unknown key, a bad value, or two keys that contradict each other are refused with line and column. Paths are relative
to the folder of the file. [Models and serve.yaml](../serving/models.md) and [tuning](../guides/tune.md) have examples.
"""
#: Titles of the tables of keys, with the class, and the keys that have a table of their own.
FILES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("serve.yaml", ServeSettings, ("models",)),
    ("A model of serve.yaml", ModelSettings, ("batching",)),
    ("Batching", BatchSettings, ()),
    ("tune.yaml", TuneSpec, ()),
)


def values(option: Option) -> str:
    """Say which values an option takes."""
    if option.values is not None:
        return ", ".join(f"`{value}`" if value else "(empty)" for value in option.values)
    if option.text:
        return "text"
    return f"{option.low} or more" if option.high >= 2**63 - 1 else f"{option.low} to {option.high}"


def table(options: Mapping[str, Option]) -> str:
    """Return one Markdown table of the options that a policy may give, and a line on those with a key of their own."""
    rows = [f"| `{n}` | {values(o)} | {o.meaning} |\n" for n, o in sorted(options.items()) if o.owned_by is None]
    owned = [f"`{n}` ({o.owned_by})" for n, o in sorted(options.items()) if o.owned_by is not None]
    text = "| option | values | meaning |\n|---|---|---|\n" + "".join(rows)
    return text + (f"\nSet elsewhere: {', '.join(owned)}.\n" if owned else "")


#: Page of an engine to the titles of its tables, and the options in each.
PARTS: dict[str, tuple[tuple[str, Mapping[str, Option]], ...]] = {
    "onnxruntime.md": (
        ("On `cuda:N`", CUDA_OPTIONS),
        ("On `cpu`", CPU_OPTIONS),
        ("On `rocm:N`", MIGRAPHX_OPTIONS),
        ("On `metal`", COREML_OPTIONS),
        ("On `dml:N`", DML_OPTIONS),
        ("Of the session, on `dml:N`", DML_SESSION_OPTIONS),
        ("Of the session, on all", SESSION_OPTIONS),
    ),
    "openvino.md": (
        ("On `cpu`", OPENVINO_CPU_OPTIONS),
        ("On `gpu`", OPENVINO_GPU_OPTIONS),
        ("On `npu`", OPENVINO_NPU_OPTIONS),
        ("Of the graph, on all", OPENVINO_GRAPH_OPTIONS),
    ),
    "qnn.md": (
        ("Of the chip", QNN_TARGET_OPTIONS),
        ("Of the graph", QNN_GRAPH_OPTIONS),
        ("Of the provider", QNN_OPTIONS),
    ),
    "tensorrt.md": (
        ("Of the build", BUILD_OPTIONS),
        ("Of the run", RUN_OPTIONS),
        ("Targets and caches", TEXT_OPTIONS),
    ),
    "torch.md": (("Of the session", TORCH_OPTIONS),),
    "onnxruntime-genai.md": (("Of the session", GENAI_OPTIONS),),
    "openvino-genai.md": (("Of the pipeline", PIPELINE_OPTIONS),),
}


#: Page of an engine to its title.
TITLES = {
    "onnxruntime.md": "ONNX Runtime",
    "openvino.md": "OpenVINO",
    "qnn.md": "QNN",
    "tensorrt.md": "TensorRT",
    "torch.md": "PyTorch",
    "onnxruntime-genai.md": "ONNX Runtime GenAI",
    "openvino-genai.md": "OpenVINO GenAI",
}


def chips() -> str:
    """Return the table of the chips that a policy names by `soc`."""
    rows = [
        f"| `{name}` | {soc.soc_model} | {soc.htp_arch} | {soc.vtcm_mb or '?'} | {soc.product or '-'} |\n"
        for name, soc in SOCS.items()
    ]
    head = "| `soc` | `soc_model` | `htp_arch` | VTCM, MiB | product |\n|---|---|---|---|---|\n"
    return "\n### QNN: chips\n\n" + head + "".join(rows)


def options_page() -> str:
    """Return the page of vendor options."""
    sections = [INTRO]
    for name, parts in PARTS.items():
        sections.append(f"\n## {TITLES[name]}\n\nHow they are used: [{TITLES[name]}](../engines/{name}#options).\n")
        sections += [
            f"\n### {TITLES[name]}: {title[0].lower()}{title[1:]}\n\n{table(options)}" for title, options in parts
        ]
        if name == "qnn.md":
            sections.append(chips())
    return "".join(sections)


def known_error(error: KnownError) -> str:
    """Return the row of one known error."""
    operators = ", ".join(f"`{op}`" for op in error.ops) or "8-bit products on x86"
    types = f" of {', '.join(error.types)}" if error.types else ""
    opsets = f" of opsets {error.opsets[0]} to {error.opsets[1]}" if error.opsets else ""
    stated = [" ".join([f"`{name}`", *map(str, values)]) for name, values in error.attributes.items()]
    attributes = f" with {', '.join(stated)}" if stated else ""
    held = {"nan": " of NaN", "empty": " of empty tensors", "": ""}[error.values]
    inner = ", inside If, Loop or Scan" if error.where == "subgraph" else ""
    issue = error.reference.removeprefix("https://github.com/").replace("/issues/", "#")
    source = f"[{issue}]({error.reference})" if issue != error.reference else issue
    versions = error.first if error.first == error.last else f"{error.first} to {error.last}"
    seen = f"{versions}, simulator" if error.simulator else versions
    return f"| {operators}{types}{opsets}{attributes}{inner}{held} | {error.wrong} | {seen} | {source} |\n"


def operators_page() -> str:
    """Return the page of what engines make of operators."""
    sections = [OPERATORS_INTRO]
    for name, engine in (("OpenVINO", "openvino"), ("QNN", "qnn")):
        head = "| operator | the node | versions | reference |\n|---|---|---|---|\n"
        rows = "".join(known_error(error) for error in known_errors(engine))
        sections.append(f"\n### Known errors of {name}\n\n{head}{rows}")
    sections.append(ARITHMETIC_INTRO)
    for kind, words in ARITHMETIC.items():
        operators = ", ".join(f"`{op}`" for op, value in OPERATORS.items() if value == kind)
        sections.append(f"| {words} | {operators} |\n")
    return "".join(sections)


def accepted(kind: Kind) -> str:
    """Return the values that a key accepts, in Markdown."""
    words = kind.schema().get("enum")
    return ", ".join(f"`{word}`" for word in words) if words else kind.expects()


def default(value: Any) -> str:
    """Return a default as a file states it; empty if there is none."""
    if value is None or (not value and not isinstance(value, (bool, int, float))):
        return ""
    return f"`{msgspec.json.encode(value).decode().strip(chr(34))}`"


def keys(cls: Any, own: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    """Yield a row for each key of a section of a file, those of nested sections included."""
    document = cls.document_kinds() if hasattr(cls, "document_kinds") else {**cls.KINDS}
    for name, kind in document.items():
        if isinstance(kind, Nested) and name not in own:
            yield from keys(kind.cls, own, f"{prefix}{name}.")
        elif isinstance(kind, NamedOf) and isinstance(kind.item, Nested) and name not in own:
            yield from keys(kind.item.cls, own, f"{prefix}{name}.NAME.")
        else:
            value = None if (stated := cls.DEFAULTS.get(name)) is None else kind.plain(stated)
            column = "required" if name in cls.REQUIRED else default(value)
            cells = (f"`{prefix}{name}`", accepted(kind), column, kind.doc)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def file_keys_page() -> str:
    """Return the page of the keys of files other than policies."""
    sections = [FILE_KEYS_INTRO]
    for title, cls, own in FILES:
        head = "| key | values | default | meaning |\n|---|---|---|---|\n"
        sections.append(f"\n## {title}\n\n{head}{''.join(keys(cls, own))}")
    return "".join(sections)


KERNELS_INTRO = """\
# Kernels of {title}

<!-- Written by tools/option_tables.py from the adapters of the package. Do not edit. -->

{text}

    {install}

Versions that the adapters take: {versions}.

With another version, or without the package, `prefer` passes the kernels over and `strict` refuses, with this command.
A [lock](../guides/kernel-providers.md#locks) holds the versions, the file lists and the environment variables
{variables}.

| kernel name | operation | limits | in a CUDA graph | where determinism is stated |
|---|---|---|---|---|
"""
#: Page to the module of the adapters, the name of the package, and what it is good at.
PACKAGES = {
    "kernels-liger": ("liger", "Liger", """\
Liger has Triton kernels for training, forward and backward. It is best at the memory of a step: with
`liger.linear_cross_entropy` the [step of a language
model](../guides/pytorch-coverage.md#losses-without-logits) took 3.4 GiB instead of 13.1. Its kernels run on any card of
Triton's, and on the CPU in fp32 and fp16 by Triton's interpreter. Where `torch.compile` may fuse a norm, a gated unit
or RoPE, it is usually faster. Gated units, RoPE and cross entropy write over their inputs, so they get copies."""),
    "kernels-quack": ("quack", "quack", """\
quack has CuTe kernels for Hopper and Blackwell, forward and backward. It is best at norms and losses in CUDA graphs,
where a norm comes within 5 % of a copy; in eager code a call takes [about
100 µs](../results/benchmarks/kernels.md#kernels-of-other-packages). Its products of groups need no copies for either
gradient. Each kernel is compiled at its first call, untuned, so that the same call runs the same kernel."""),
    "kernels-flash-attention": ("flash", "FlashAttention 4", """\
FlashAttention 4 is best at long sequences: in eager code its forward was the fastest of [three
sizes](../results/benchmarks/kernels.md#kernels-of-other-packages) from 4,096 tokens on. For short ones it may be far
behind cuDNN, gradients above all, so let `auto` measure it. The way that PyTorch has to it expects two results and
gets five, so it is called directly."""),
    "kernels-flashinfer": ("flashinfer", "FlashInfer", """\
FlashInfer has kernels for inference, which its first call compiles with `nvcc`. It is made for decoding: attention of a
single query, and writes of keys and values into a cache, for which each sequence of a static cache is a page. It has no
gradients, and its functions are no operators of PyTorch's. On a GPU it has written a cache; **its other
kernels have served no call there yet**."""),
}  # fmt: skip
ADVISORIES_INTRO = """\
# Known errors of kernels

<!-- Written by tools/option_tables.py from policies/advisories.py. Do not edit. -->

Rows hold for the versions and devices that they name. `xrt doctor --kernels` prints those of a machine, `auto` avoids
them, a named kernel is passed over with a warning, and `strict` refuses it. [A file](#a-file-of-your-own) can add
more.

| id | kernels | what is wrong | versions and devices | instead |
|---|---|---|---|---|
"""

ADVISORIES_END = """
## A file of your own

`XPURUNTIME_ADVISORIES` names a YAML file with further rows:

```yaml
advisories:
  - id: mine-wrong-gradient
    date: 2026-10-01
    op: rms_norm                       # default: attention
    kernels: [mine.rms_norm]           # ids, as xrt kernels and explain() print them
    wrong: the gradient of the weight is off for more than 65,536 rows
    reference: https://example.org/issues/7
    packages: {my-norms: "<1.5"}       # all of these versions; torch is one of them
    archs: [sm90]                      # cpu, sm90, ...; default: all
    gradient: true                     # only where gradients are recorded or computed
    fix: pip install "my-norms>=1.5"   # what xrt doctor prints; default: state auto for the operation
```

Rows of attention may also state `mask` (`boolean`, `same` or `other`, the type of the mask), `causal: false`, `queries`
and `keys: [128, 64]`, which is 64 more than a multiple of 128.
"""


def said(fact: bool | str) -> str:
    """Return a fact of a kernel as a cell: yes, or why not."""
    return "yes" if fact is True else str(fact)


def kernels_page(name: str) -> str:
    """Return the page of the kernels of a package."""
    module, title, text = PACKAGES[name]
    kernels = import_module(f"xpuruntime.pytorch.providers.{module}").KERNELS
    versions = dict.fromkeys(f"`{stated}`" for kernel in kernels for stated in kernel.distributions)
    variables = dict.fromkeys(f"`{stated}`" for kernel in kernels for stated in kernel.environment)
    intro = KERNELS_INTRO.format(
        title=title, text=text, install=kernels[0].install, versions=", ".join(versions), variables=", ".join(variables)
    )
    named = ((", ".join(f"`{name}`" for name in (*kernel.families, kernel.id)), kernel) for kernel in kernels)
    rows = [
        f"| {names} | `{kernel.op}` | {kernel.limits} | {said(kernel.capturable)} | {said(kernel.deterministic)} |"
        for names, kernel in named
    ]
    return intro + "\n".join(rows) + "\n"


def advisories_page() -> str:
    """Return the page of known errors of kernels."""
    rows = []
    for row in ADVISORIES:
        stated = [f"{name} {versions}" for name, versions in row.packages]
        stated += [f"{name} {span(bounds)}" for name, bounds in (("torch", row.torch), ("cuDNN", row.cudnn)) if bounds]
        stated.append(", ".join(row.archs) or "all devices")
        if row.gradient:
            stated.append("gradients")
        instead = row.fix or f"`kernels: {{{row.op}: auto}}`"
        names = ", ".join(f"`{kernel}`" for kernel in row.kernels)
        what = f"{row.wrong} ([{reference(row.reference)}]({row.reference}))"
        rows.append(f"| `{row.id}` | {names} | {what} | {'; '.join(stated)} | {instead} |")
    return ADVISORIES_INTRO + "\n".join(rows) + "\n" + ADVISORIES_END


def span(bounds: Any) -> str:
    """Return a span of versions as a cell."""
    first, last = (None if one is None else ".".join(map(str, one)) for one in bounds)
    return f"from {first} on" if last is None else f"{first} to {last}"


def reference(address: str) -> str:
    """Return the short name of a thread on GitHub."""
    owner, repository, _, number = address.removeprefix("https://github.com/").split("/")
    return f"{owner}/{repository}#{number}"


def main() -> int:
    """Write or check the pages."""
    stale = 0
    pages = {"options.md": options_page(), "operators.md": operators_page(), "file-keys.md": file_keys_page()}
    pages["kernel-advisories.md"] = advisories_page()
    if find_spec("torch") is not None:
        pages |= {f"{name}.md": kernels_page(name) for name in PACKAGES}
    for name, text in pages.items():
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"error: {name} does not match the code: run python tools/option_tables.py")
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
