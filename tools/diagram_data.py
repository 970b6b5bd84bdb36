# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Diagrams of the design pages as data: boxes on a grid, and arrows between them; `tools/diagrams.py` draws them."""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A box at a place of the grid: a heading, and lines below it."""

    column: int
    row: int
    head: str
    lines: tuple[str, ...] = ()
    kind: str = "step"


class Arrow(NamedTuple):
    """An arrow between two boxes."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


class Diagram(NamedTuple):
    """A drawing, and the sentence that a screen reader reads in its place."""

    title: str
    width: int
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...]


DESIGN = {
    "architecture": Diagram(
        "policy, model and machine give a plan; an engine loads it; runs give results, instrumented runs give a report",
        236,
        {
            "policy": Box(0, 0, "Policy", ("a file or a value",), "data"),
            "model": Box(0, 1, "model file", ("names, shapes, nodes",), "data"),
            "machine": Box(0, 2, "Machine", ("what can be loaded",), "data"),
            "plan": Box(1, 1, "resolve → Plan", ("pure; each engine gives", "verdict and controls")),
            "refused": Box(1, 2, "error", ("every candidate,", "with reason and fix"), "stop"),
            "load": Box(2, 1, "Engine.load", ("convert, load, read back,", "probe against fp32")),
            "run": Box(2, 0, "session.run", ("the engine's own call",)),
            "report": Box(2, 2, "explain → Report", ("a second, instrumented", "session"), "data"),
        },
        (
            Arrow("policy", "plan"), Arrow("model", "plan"), Arrow("machine", "plan"),
            Arrow("plan", "refused"), Arrow("plan", "load"), Arrow("load", "run"), Arrow("load", "report"),
        ),
    ),
    "kernels": Diagram(
        "arrays are described; a known description launches its kernel, another is decided once",
        236,
        {
            "arrays": Box(0, 0, "arrays", ("any library, by DLPack",), "data"),
            "desc": Box(1, 0, "OpDesc", ("dtypes, shapes, strides,", "no addresses")),
            "site": Box(2, 0, "CallSite", ("known description?",)),
            "launch": Box(2, 1, "launch", ("addresses, workspace,", "the caller's stream")),
            "rules": Box(1, 1, "rules", ("which kernels, in which", "order")),
            "supports": Box(0, 1, "supports", ("yes, or no with", "one sentence")),
            "prepare": Box(0, 2, "prepare", ("slow; may ask the library",)),
            "tuner": Box(1, 2, "measure", ("if the policy states", "best_performance")),
            "decision": Box(2, 2, "decision", ("winner, and why not", "the others"), "data"),
        },
        (
            Arrow("arrays", "desc"), Arrow("desc", "site"),
            Arrow("site", "launch", "yes"), Arrow("site", "rules", "no"),
            Arrow("rules", "supports"), Arrow("supports", "prepare"), Arrow("prepare", "tuner"),
            Arrow("tuner", "decision"), Arrow("decision", "launch"),
        ),
    ),
    "evidence": Diagram(
        "three sources of an instrumented session are joined by output tensor names into units and a report",
        236,
        {
            "model": Box(0, 1, "model", ("every node gets", "a unique name"), "data"),
            "assignment": Box(1, 0, "assignment", ("provider of each node,", "before fusion"), "data"),
            "optimised": Box(1, 1, "optimised model", ("what each executed node", "reads and writes"), "data"),
            "profile": Box(1, 2, "profile", ("what ran, in which", "dtype, how long"), "data"),
            "join": Box(2, 1, "join", ("by the names of", "output tensors")),
            "units": Box(2, 0, "units", ("exact, fused, inserted,", "folded, opaque"), "data"),
            "report": Box(2, 2, "observations", ("one for each policy key,", "with a status"), "data"),
        },
        (
            Arrow("model", "assignment"), Arrow("model", "optimised"), Arrow("model", "profile"),
            Arrow("assignment", "join"), Arrow("optimised", "join"), Arrow("profile", "join"),
            Arrow("join", "units"), Arrow("join", "report"),
        ),
    ),
    "artifacts": Diagram(
        "an artifact is compiled in a staging folder, probed, renamed; a plan compares its target before loading",
        236,
        {
            "request": Box(0, 0, "model + policy", ("and calibration",), "data"),
            "compile": Box(1, 0, "Engine.compile", ("into a staging folder",)),
            "probe": Box(2, 0, "probe", ("loaded, compared with", "fp32, then renamed")),
            "artifact": Box(2, 1, "artifact", ("manifest, target,", "SHA-256 of every file"), "data"),
            "plan": Box(1, 1, "plan", ("target, model, policy", "unchanged?")),
            "load": Box(0, 1, "Engine.load", ("starts without", "compiling")),
            "refused": Box(1, 2, "refused", ("stale, foreign or", "damaged"), "stop"),
        },
        (
            Arrow("request", "compile"), Arrow("compile", "probe"),
            Arrow("probe", "artifact"), Arrow("artifact", "plan"),
            Arrow("plan", "load", "yes"), Arrow("plan", "refused", "no"),
        ),
    ),
    "precision": Diagram(
        "a graph is converted node by node, then compared with fp32 before the session opens",
        236,
        {
            "graph": Box(0, 0, "model in fp32", (), "data"),
            "three": Box(1, 0, "convertible?", ("signature, list, and a", "kernel of the engine")),
            "convert": Box(2, 0, "converted", ("weights rounded,", "kept finite")),
            "keep": Box(1, 1, "kept in fp32", ("counted by operator", "and reason"), "data"),
            "probe": Box(2, 1, "probe", ("compared with fp32", "on the CPU")),
            "session": Box(2, 2, "session", (), "data"),
            "refused": Box(1, 2, "refused", ("out of tolerance",), "stop"),
        },
        (
            Arrow("graph", "three"), Arrow("three", "convert", "yes"), Arrow("three", "keep", "no"),
            Arrow("keep", "probe"), Arrow("convert", "probe"), Arrow("probe", "session"), Arrow("probe", "refused"),
        ),
    ),
    "memory-pool": Diagram(
        "an allocation takes a free block of its size, joins neighbors, allocates on the device, or retries",
        236,
        {
            "allocate": Box(0, 0, "allocate", ("size, stream",), "data"),
            "bin": Box(1, 0, "bin of that size", ("freed blocks of the size",)),
            "join": Box(2, 0, "join and cut", ("free neighbors, best fit",)),
            "device": Box(2, 1, "new segment", ("from the device, below", "the limit")),
            "retry": Box(1, 1, "retry", ("blocks of other streams,", "unused segments, waiting")),
            "error": Box(0, 1, "OutOfMemoryError", ("requested, in use, cached,", "limit, free"), "stop"),
        },
        (
            Arrow("allocate", "bin"), Arrow("bin", "join", "empty"), Arrow("join", "device", "none"),
            Arrow("device", "retry", "fails"), Arrow("retry", "error"),
        ),
    ),
    "custom-ops": Diagram(
        "a node that the policy names becomes an xpuruntime operator, whose kernel runs on the engine's stream",
        236,
        {
            "model": Box(0, 0, "node", ("MatMul, Attention, Conv, …",), "data"),
            "rewrite": Box(1, 0, "rewritten", ("to domain xpuruntime,", "result checked")),
            "kernel": Box(2, 0, "OpKernel", ("one node in one session",)),
            "site": Box(2, 1, "CallSite", ("the same dispatcher as", "xrt.ops and PyTorch")),
            "launch": Box(1, 1, "launch", ("on the engine's stream,", "in its CUDA graph")),
            "log": Box(0, 1, "decisions", ("by the node's name,", "for the report"), "data"),
        },
        (
            Arrow("model", "rewrite"), Arrow("rewrite", "kernel"), Arrow("kernel", "site"), Arrow("site", "launch"),
            Arrow("launch", "log"),
        ),
    ),
    "engines": Diagram(
        "an engine is probed, then judges without touching a device; after that it loads, runs and observes",
        236,
        {
            "probe": Box(0, 0, "probe", ("is it installed, and", "which version?")),
            "devices": Box(1, 0, "devices", ("from facts alone",)),
            "judge": Box(2, 0, "judge", ("verdict, controls,", "settings: pure")),
            "load": Box(2, 1, "load", ("slow; leaves nothing", "behind on an error")),
            "run": Box(1, 1, "run, bind", ("hot; from many threads",)),
            "observe": Box(0, 1, "observe", ("instrumented, slow:", "units for the report")),
            "compile": Box(1, 2, "compile", ("files of an artifact,", "if the engine compiles")),
        },
        (
            Arrow("probe", "devices"), Arrow("devices", "judge"), Arrow("judge", "load"), Arrow("load", "run"),
            Arrow("run", "observe"), Arrow("judge", "compile", dashed=True),
        ),
    ),
    "pytorch": Diagram(
        "a call of PyTorch goes by its known route to a kernel, or once through Python to find the route",
        236,
        {
            "call": Box(0, 0, "PyTorch call", ("mm, layer_norm, sdpa, …",), "data"),
            "guard": Box(1, 0, "fast path", ("C++: route known?",)),
            "native": Box(2, 0, "native kernel", ("PyTorch's own",), "data"),
            "key": Box(0, 1, "key", ("shapes, strides, dtypes,", "phase, module")),
            "routes": Box(1, 1, "routes", ("of CompiledPolicy:", "resolved before?")),
            "kernel": Box(2, 1, "xpuruntime kernel", ("or a library's, a plugin's",), "data"),
            "rules": Box(1, 2, "rules of the policy", ("each name is tried; a", "refusal is remembered")),
            "refused": Box(2, 2, "strict: error", ("with every reason",), "stop"),
        },
        (
            Arrow("call", "guard"), Arrow("guard", "native", "yes"), Arrow("guard", "kernel"),
            Arrow("guard", "routes", "no"), Arrow("key", "routes"), Arrow("routes", "kernel"),
            Arrow("routes", "rules", "no"), Arrow("rules", "refused"),
        ),
    ),
    "pytorch-fast-path": Diagram(
        "the first of three mechanisms that is available serves; a call that is not known goes to Python once",
        236,
        {
            "call": Box(0, 0, "operator", ("below autograd",), "data"),
            "plain": Box(1, 0, "addon", ("PyTorch's headers;", "no GIL if native")),
            "c": Box(1, 1, "stable", ("torch_library_impl,", "mm and bmm")),
            "python": Box(1, 2, "python", ("over the native handle",)),
            "kernel": Box(2, 0, "kernel", ("native or xpuruntime",), "data"),
            "slow": Box(2, 1, "slow path", ("key, route, reasons;", "once for each kind")),
            "why": Box(0, 1, "xrt doctor", ("the mechanism, and what", "gives a faster one"), "data"),
        },
        (
            Arrow("call", "plain"), Arrow("plain", "kernel", "known"), Arrow("plain", "c", "not built"),
            Arrow("c", "python", "missing"), Arrow("plain", "slow"), Arrow("slow", "kernel"),
            Arrow("python", "slow"), Arrow("plain", "why", dashed=True),
        ),
    ),
    "pytorch-attention": Diagram(
        "calls that want the same backend run together; a call that wants another waits, then sets the switches",
        236,
        {
            "a": Box(0, 0, "calls for flash", ("any number of threads",), "data"),
            "b": Box(0, 1, "a call for cuDNN", ("another thread",), "data"),
            "lock": Box(1, 0, "SharedModeLock", ("one group at a time,", "first come, first served")),
            "wait": Box(1, 1, "waits", ("without the GIL",)),
            "switch": Box(2, 0, "SDPA switches", ("of the process, set", "for the group")),
            "back": Box(2, 1, "last one out", ("restores the switches", "of the program")),
        },
        (
            Arrow("a", "lock"), Arrow("b", "wait"), Arrow("wait", "lock"), Arrow("lock", "switch"),
            Arrow("switch", "back"),
        ),
    ),
    "pytorch-phase": Diagram(
        "gradients recorded is train, inside a backward pass is backward, all else is infer",
        236,
        {
            "call": Box(0, 0, "call", (), "data"),
            "grad": Box(1, 0, "gradients?", ("recorded by autograd",)),
            "train": Box(2, 0, "train", (), "data"),
            "back": Box(1, 1, "backward?", ("inside a backward pass",)),
            "backward": Box(2, 1, "backward", (), "data"),
            "infer": Box(1, 2, "infer", (), "data"),
        },
        (
            Arrow("call", "grad"), Arrow("grad", "train", "yes"), Arrow("grad", "back", "no"),
            Arrow("back", "backward", "yes"), Arrow("back", "infer", "no"),
        ),
    ),
    "locks": Diagram(
        "a report, the machine and the plan make a lock; a lock is planned again, compared and opened as a session",
        236,
        {
            "report": Box(0, 0, "report", ("what ran: entries",), "data"),
            "machine": Box(0, 1, "machine", ("libraries, device:", "validators"), "data"),
            "plan": Box(0, 2, "plan", ("with policy and", "outputs"), "data"),
            "lock": Box(1, 1, "lock", ("identity and digest", "over all of them"), "data"),
            "check": Box(2, 1, "validators", ("compared with this", "machine, per entry")),
            "replan": Box(2, 0, "plan again", ("from the lock's policy;", "settings must be equal")),
            "session": Box(1, 0, "session", ("its outputs are", "compared, too")),
            "differs": Box(2, 2, "difference", ("names the entries, and", "the command that fixes it"), "stop"),
        },
        (
            Arrow("report", "lock"), Arrow("machine", "lock"), Arrow("plan", "lock"), Arrow("lock", "check"),
            Arrow("check", "replan"), Arrow("check", "differs"), Arrow("replan", "session"),
        ),
    ),
    "rules": Diagram(
        "facts of a call go through the index to the rules that may match; the core gets the rules of a place",
        236,
        {
            "sources": Box(0, 0, "call", ("PyTorch, ONNX node,", "decision, program"), "data"),
            "facts": Box(1, 0, "CallFacts", ("value, None or", "UNKNOWN"), "data"),
            "index": Box(2, 0, "index", ("every rule that", "may match")),
            "policy": Box(0, 1, "KernelPolicy", ("compiled_rules",), "data"),
            "compare": Box(2, 1, "certainty", ("yes, no or unknown,", "for each rule")),
            "result": Box(2, 2, "MatchResult", ("preferences in the", "policy's order"), "data"),
            "matching": Box(1, 1, "matching", ("names of a place",)),
            "core": Box(1, 2, "core", ("sizes, types, devices,", "phases at each new call")),
        },
        (
            Arrow("sources", "facts"), Arrow("facts", "index"), Arrow("index", "compare"), Arrow("compare", "result"),
            Arrow("policy", "matching"), Arrow("matching", "core"),
        ),
    ),
    "tuning": Diagram(
        "the space is planned into candidates, which are tried, raced and dueled; a journal has every measurement",
        236,
        {
            "space": Box(0, 0, "space", ("declared by engines,", "limited by the file"), "data"),
            "planner": Box(1, 0, "plan", ("refused or equal", "settings drop out")),
            "trial": Box(2, 0, "trial", ("open, compare with fp32,", "check constraints")),
            "race": Box(2, 1, "race", ("turns beside the", "incumbent; no winner")),
            "duel": Box(1, 1, "duel", ("finalist and control in", "fresh processes")),
            "result": Box(0, 1, "result", ("winner, tied or", "undecided"), "data"),
            "journal": Box(1, 2, "journal", ("every measurement;", "a search resumes from it"), "data"),
        },
        (
            Arrow("space", "planner"), Arrow("planner", "trial"), Arrow("trial", "race"), Arrow("race", "duel"),
            Arrow("duel", "result"), Arrow("race", "journal", dashed=True), Arrow("duel", "journal", dashed=True),
        ),
    ),
    "measuring": Diagram(
        "variants run in workers, in interleaved rounds; ratios to the control decide by interval and sign test",
        236,
        {
            "workers": Box(0, 0, "workers", ("a process for each", "variant and the control")),
            "round": Box(1, 0, "round", ("each variant once, the", "control twice; ABBA")),
            "ratio": Box(2, 0, "log-ratios", ("to the mean of the", "control's two blocks"), "data"),
            "decide": Box(2, 1, "decision", ("interval and sign test,", "both beyond the margin")),
            "more": Box(1, 1, "more rounds", ("until the rounds or", "the budget end")),
            "verdict": Box(2, 2, "verdict", ("slower, tied, faster", "or inconclusive"), "data"),
        },
        (
            Arrow("workers", "round"), Arrow("round", "ratio"), Arrow("ratio", "decide"), Arrow("decide", "more", "no"),
            Arrow("more", "round"), Arrow("decide", "verdict", "yes"),
        ),
    ),
    "kernel-tuning": Diagram(
        "rounds measure each candidate beside the control; one that is faster by more than the margin replaces it",
        236,
        {
            "call": Box(0, 0, "a new kind of call", ("candidates that can", "serve it"), "data"),
            "round": Box(1, 0, "round", ("one turn of each, two", "of the control; ABBA")),
            "decide": Box(2, 0, "decision", ("interval and sign test,", "both beyond the margin")),
            "runs": Box(2, 1, "what runs", ("lowest ratio beyond the", "margin; else the control")),
            "cache": Box(1, 1, "tuning cache", ("winner, times, and what", "they hold for"), "data"),
            "again": Box(0, 1, "the same again", ("also in a later process", "on this machine"), "data"),
        },
        (
            Arrow("call", "round"), Arrow("round", "decide"), Arrow("decide", "runs"), Arrow("runs", "cache"),
            Arrow("again", "cache", dashed=True),
        ),
    ),
    "pytorch-compile": Diagram(
        "some choices are built into compiled code, others are looked up when it runs; gaps are found as it compiles",
        236,
        {
            "policy": Box(0, 0, "policy", ("active while the code", "is compiled"), "data"),
            "trace": Box(1, 0, "torch.compile", ("traces the model", "under the overrides")),
            "gaps": Box(2, 0, "coverage gap", ("warned of once, or", "refused under strict"), "stop"),
            "key": Box(0, 1, "cache_key_tag", ("what is built in: SDP", "backends, norms"), "data"),
            "code": Box(1, 1, "compiled code", ("products by .out,", "xpuruntime's operators")),
            "run": Box(2, 1, "route", ("looked up at each call,", "by phase and module")),
        },
        (
            Arrow("policy", "trace"), Arrow("trace", "gaps"), Arrow("policy", "key"), Arrow("key", "code"),
            Arrow("trace", "code"), Arrow("code", "run"),
        ),
    ),
    "cuda-kernels": Diagram(
        "each kernel has a fast variant with conditions, and a general one for every other call that it serves",
        236,
        {
            "norm": Box(0, 0, "norms", ("layer norm, RMS norm",), "data"),
            "registers": Box(1, 0, "row in registers", ("read once; up to 16384", "columns, more if aligned")),
            "long": Box(2, 0, "long rows", ("a block for each row,", "read twice")),
            "skinny": Box(0, 1, "skinny matmul", ("m ≤ 64",), "data"),
            "bulk": Box(1, 1, "tensor copies", ("from 9.0; both operands", "16-byte aligned")),
            "gather": Box(2, 1, "reads by threads", ("from 8.0, any alignment;", "not favoured")),
            "forward": Box(0, 2, "attention", ("forward",), "data"),
            "wgmma": Box(1, 2, "wgmma", ("9.0; strides that tensor", "copies support")),
            "mma": Box(2, 2, "mma.sync", ("from 8.0; other strides,", "empty keys")),
            "backward": Box(0, 3, "attention", ("backward",), "data"),
            "wgmma_backward": Box(1, 3, "wgmma", ("9.0; head_dim ≤ 128,", "no mask, no dropout")),
            "mma_backward": Box(2, 3, "mma.sync", ("from 8.0; more than twice", "the time")),
        },
        (
            Arrow("norm", "registers"), Arrow("registers", "long", "else"),
            Arrow("skinny", "bulk"), Arrow("bulk", "gather", "else"),
            Arrow("forward", "wgmma"), Arrow("wgmma", "mma", "else"),
            Arrow("backward", "wgmma_backward"), Arrow("wgmma_backward", "mma_backward", "else"),
        ),
    ),
    "library-kernels": Diagram(
        "supports refuses known faults without the library; prepare asks it, and excludes what loses digits",
        236,
        {
            "desc": Box(0, 0, "OpDesc", ("dtypes, shapes, strides,", "no addresses"), "data"),
            "supports": Box(1, 0, "supports", ("known faults and limits,", "without the library")),
            "refused": Box(2, 0, "refused", ("with one sentence",), "stop"),
            "prepare": Box(1, 1, "prepare", ("the library lists its plans", "or algorithms")),
            "filter": Box(0, 1, "filter", ("none that loses digits,", "no 16-bit partial sums")),
            "config": Box(0, 2, "kernel", ("id@config names the plan", "or algorithm"), "data"),
            "launch": Box(1, 2, "launch", ("on the caller's stream; a", "cuDNN plan one at a time")),
        },
        (
            Arrow("desc", "supports"), Arrow("supports", "refused", "no"), Arrow("supports", "prepare", "yes"),
            Arrow("prepare", "refused"), Arrow("prepare", "filter"), Arrow("filter", "config"),
            Arrow("config", "launch"),
        ),
    ),
    "error-policy": Diagram(
        "errors of checks, core and engines become one tree of classes, which decide exit codes and statuses",
        236,
        {
            "checks": Box(0, 0, "checks", ("policy, options, inputs:", "before the engine runs")),
            "core": Box(0, 1, "C++ core", ("translated by the", "bindings, same name")),
            "engine": Box(0, 2, "engine", ("its own error, translated", "by the adapter")),
            "error": Box(1, 1, "XpuRuntimeError", ("a class of the tree, with", "reason and fix"), "stop"),
            "python": Box(2, 0, "Python", ("except of the class, or of", "MemoryError, ValueError"), "data"),
            "xrt": Box(2, 1, "xrt", ("an exit code for", "each class"), "data"),
            "server": Box(2, 2, "xrt serve", ("a status of HTTP and gRPC", "for each class"), "data"),
        },
        (
            Arrow("checks", "error"), Arrow("core", "error"), Arrow("engine", "error"),
            Arrow("error", "python"), Arrow("error", "xrt"), Arrow("error", "server"),
        ),
    ),
    "evidence-packages": Diagram(
        "engines return records, report_building makes a report, and the same rows become text and page",
        236,
        {
            "engines": Box(0, 0, "engines", ("units as records; they call", "checkpoint, live_bytes"), "data"),
            "builder": Box(1, 0, "report_building", ("a status for each key,", "from plan and records")),
            "report": Box(2, 0, "Report", ("with its sections and", "kernels; saved as JSON"), "data"),
            "diff": Box(2, 1, "report_comparing", ("two reports, row by row",)),
            "text": Box(1, 1, "render_text", ("rows and texts, for", "the terminal")),
            "page": Box(0, 1, "page", ("the same rows as HTML",)),
        },
        (
            Arrow("engines", "builder"), Arrow("builder", "report"), Arrow("report", "diff"), Arrow("report", "text"),
            Arrow("diff", "text"), Arrow("text", "page"),
        ),
    ),
    "serving-packages": Diagram(
        "a request goes through a transport and the protocol to a version of a model, whose batching runs the session",
        236,
        {
            "transport": Box(0, 0, "server, options", ("addresses, TLS, tokens,", "limits, draining")),
            "http": Box(0, 1, "http, grpc", ("bytes in and out; both", "know a ModelService")),
            "protocol": Box(0, 2, "protocol", ("decodes requests,", "encodes responses")),
            "models": Box(1, 1, "models", ("the version that accepted", "a request answers it")),
            "batching": Box(2, 1, "batching", ("admission, scheduler,", "runs of the session")),
            "monitoring": Box(1, 0, "monitoring", ("counts, logs; pages", "when they are asked for")),
            "sampling": Box(1, 2, "watchers", ("a sampled request once", "more, after its answer")),
        },
        (
            Arrow("http", "transport"), Arrow("http", "protocol"), Arrow("http", "models"),
            Arrow("models", "batching"), Arrow("models", "monitoring"), Arrow("models", "sampling"),
            Arrow("sampling", "batching"),
        ),
    ),
    "pytorch-tests": Diagram(
        "cases that pass without a policy are run under four; each must pass or be a listed exception",
        236,
        {
            "file": Box(0, 0, "test file", ("of PyTorch's sources",), "data"),
            "none": Box(1, 0, "no policy", ("what passes here is", "compared")),
            "policies": Box(2, 0, "four policies", ("what passes is counted,", "and what served it")),
            "expected": Box(2, 1, "exception?", ("listed in the tool,", "with its reason")),
            "reason": Box(1, 1, "expected", ("counted by its reason",), "data"),
            "lost": Box(2, 2, "lost", ("each is named;", "exit status 1"), "stop"),
        },
        (
            Arrow("file", "none"), Arrow("none", "policies"), Arrow("policies", "expected", "fails"),
            Arrow("expected", "reason", "yes"), Arrow("expected", "lost", "no"),
        ),
    ),
}  # fmt: skip
