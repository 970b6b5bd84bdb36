# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FusedDecoder`: decode steps of Llama-like models by five kernels a layer, where a probe of each layer shows it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch calls it

from xpuruntime.printable import error_line
from xpuruntime.pytorch.capture.captured_state import CapturedState, StateSnapshot
from xpuruntime.pytorch.dispatch import step_cost

if TYPE_CHECKING:
    from xpuruntime.pytorch.generation.decode_lanes import Lane
    from xpuruntime.pytorch.generation.joined_products import JoinedProducts

#: Of the largest magnitude of a layer's result; of bfloat16 five roundings, since many layers exceed four by chance.
_TOLERANCES = {torch.bfloat16: 5 * 2.0**-8, torch.float32: 2.0**-16}
#: Magnitudes of the hidden states of a probe: the small one shows epsilons, the large one residuals.
_MAGNITUDES = (1e-3, 1.0, 30.0)
_KEY_MAGNITUDE = 4.0
#: Kinds of rotary embeddings that depend on the position alone.
_ROTARY = ("default", "linear", "llama3", "yarn")
#: Products of a step, each of which has its own shape.
_PRODUCTS = ("q, k, v", "output", "gate, up", "down", "logits")
_TIMED = 7
#: How often two ways are timed in turn, and the share of the time before that another way has to stay under.
_ROUNDS, _CLEARLY = 3, 0.995
#: Beyond, the time is in the arithmetic of products.
_MOST_ROWS = 64


class NotFusedError(Exception):
    """Why a model is not fused. It never leaves the package."""


def kernels_for(device: torch.device) -> Any:
    """Return the module of the kernels, or nothing where they cannot run."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    from xpuruntime.pytorch.generation import decode_kernels

    return decode_kernels


class _Layer:
    """The operands of the kernels of a decoder layer."""

    def __init__(self, layer: Any, joined: JoinedProducts) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.module = layer
        self.first, self.second = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.qkv = joined.operands(attention, "q_proj")
        self.gate_up = joined.operands(mlp, "gate_proj")
        self.o, self.down = _linear(attention.o_proj), _linear(mlp.down_proj)
        self.scale = float(attention.scaling)
        self.head = int(attention.head_dim)
        self.kv_heads = attention.k_proj.out_features // self.head
        #: The weight of the norm after the layer.
        self.following: Any = None
        self.norms = None
        if hasattr(attention, "q_norm"):
            (q_norm, eps), (k_norm, other) = _norm(attention.q_norm), _norm(attention.k_norm)
            if eps != other or q_norm.numel() != self.head:
                raise NotFusedError("queries and keys have norms of other kinds")
            self.norms = (q_norm, k_norm, eps)
        if self.head not in (32, 64, 128, 256) or self.qkv[0].shape[0] // self.head > 18 * self.kv_heads:
            raise NotFusedError(f"heads of size {self.head}, {attention.q_proj.out_features // self.head} of them")


class FusedDecoder:
    """A decoder of transformers whose layers are five kernels each.

    Norm and q, k, v; rotation, cache and attention; output product and residual; norm, gate, up and what they make;
    down product and residual.
    """

    def __init__(self, model: Any, joined: JoinedProducts, kernels: Any, extents: Sequence[int]) -> None:
        self._kernels = kernels
        #: Each has kernels of attention of its own; no step reads a single position.
        self._extents = [extent for extent in extents if extent > 1]
        max_length = extents[-1]
        try:
            base = model.model
            self._embedding = base.embed_tokens.weight
            self._layers = [_Layer(layer, joined) for layer in base.layers]
            self._final, self._norm, self._head = base.norm, _norm(base.norm), _linear(model.lm_head)
            for layer, following in zip(self._layers, (*self._layers[1:], None), strict=True):
                layer.following = self._norm[0] if following is None else following.first[0]
            rotary = base.rotary_emb
            if rotary.rope_type not in _ROTARY:
                raise NotFusedError(f"rotary embeddings of the kind {rotary.rope_type}")
            positions = torch.arange(max_length, device=self._embedding.device)[None]
            cos, sin = rotary(self._embedding[:1, None], position_ids=positions)
            self._turns = (cos[0].contiguous(), sin[0].contiguous())
        except (AttributeError, TypeError, ValueError) as error:
            raise NotFusedError(f"it is built otherwise than Llama: {error_line(error)}") from None
        dtype = self._embedding.dtype
        if dtype not in _TOLERANCES or {tensor.dtype for tensor in self._tensors()} != {dtype}:
            raise NotFusedError(f"weights of {str(dtype).removeprefix('torch.')} are not fused, or have several types")
        if (getattr(model.config, "sliding_window", None) or max_length) < max_length:
            raise NotFusedError("a layer has a sliding window")
        if any(map(_is_changed, model.modules())):
            raise NotFusedError("a module has hooks, or a forward of its own")
        #: By rows, the reason against the layers, or nothing.
        self.verdicts: dict[int, str] = {}
        #: By rows, how each kind of product is computed.
        self._ways: dict[int, dict[str, str]] = {}
        self._rejected: dict[int, str] = {}
        #: By rows, how many pieces of a split head or product are made; zeros between kernels.
        self._arrived: dict[int, torch.Tensor] = {}

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from (self._embedding, self._norm[0], self._head[0], *self._turns)
        for layer in self._layers:
            yield from (layer.first[0], layer.second[0], layer.qkv[0], layer.gate_up[0], layer.o[0], layer.down[0])

    def logits(self, lane: Lane) -> torch.Tensor:
        """Run the last token of each row. Returns its logits in float32; keys and values are in the cache then."""
        token = lane.token[:, 0]
        # PyTorch has a slow kernel for few rows, but not for one.
        hidden = F.embedding(token, self._embedding) if len(token) == 1 else self._embedding[token]
        scaled = None
        for layer, cached in zip(self._layers, lane.cache.layers, strict=True):
            scaled = self._run(layer, hidden, lane, cached, scaled)
        return self._scores(hidden, scaled)

    def _scores(self, hidden: torch.Tensor, scaled: Any = None) -> torch.Tensor:
        out = hidden.new_empty(hidden.shape[0], self._head[0].shape[0], dtype=torch.float32)
        self._product("logits", hidden, self._head, out, norm=self._norm, scaled=scaled)
        return out

    def _product(self, kind: str, x: Any, operands: Any, out: Any, **kwargs: Any) -> Any:
        way = self._ways[x.shape[0]][kind]
        arrived = self._arrived[x.shape[0]]
        return self._kernels.product(x, operands[0], out, bias=operands[1], way=way, arrived=arrived, **kwargs)

    def _run(self, layer: _Layer, hidden: torch.Tensor, lane: Lane, cached: Any, scaled: Any = None) -> Any:
        """Have `hidden` be what the layer makes of it. Takes and returns what the norms at its ends begin with."""
        rows = hidden.shape[0]
        qkv = hidden.new_empty(rows, layer.qkv[0].shape[0])
        self._product("q, k, v", hidden, layer.qkv, qkv, norm=layer.first, scaled=scaled)
        heads = hidden.new_empty(rows, layer.o[0].shape[1])
        self._kernels.attend(
            qkv, cached.keys, cached.values, self._turns, lane.mask, lane.length, lane.position, heads,
            self._arrived[rows], scale=layer.scale, norms=layer.norms, extent=cached.extent,
        )  # fmt: skip
        scaled = self._product("output", heads, layer.o, hidden, residual=hidden, scales=layer.second[0])
        active = hidden.new_empty(rows, layer.down[0].shape[1])
        self._product("gate, up", hidden, layer.gate_up, active, norm=layer.second, scaled=scaled, gated=True)
        return self._product("down", active, layer.down, hidden, residual=hidden, scales=layer.following)

    def prove(self, lane: Lane, tolerance: float | None) -> str:
        """Probe each layer in a lane that it may write to. Returns the reason against the layers, or nothing.

        The model runs a token over a random cache once; then each layer and its kernels run the same hidden states of
        several magnitudes, with what the model has given the layer. Results, keys and values are compared.
        """
        rows = lane.token.shape[0]
        if rows > _MOST_ROWS:
            self.verdicts[rows] = f"it is more than {_MOST_ROWS} rows"
            return self.verdicts[rows]
        limit = _TOLERANCES[self._embedding.dtype] if tolerance is None else tolerance
        heads = rows * max(layer.kv_heads for layer in self._layers)
        most = max(heads, *(tensor.shape[0] for tensor in self._tensors()))
        self._arrived[rows] = torch.zeros(most, dtype=torch.int32, device=self._embedding.device)
        ways = self._kernels.ways(rows, self._embedding)
        for number, first in enumerate(ways):
            self._ways[rows] = dict.fromkeys(_PRODUCTS, first)
            self.verdicts[rows] = why = self._why_wrong(lane, limit)
            if not why:
                self._choose(lane, limit, ways[number:])
                break
            self._reject(rows, f"by {first}", why)
        return self.verdicts[rows]

    def products(self, rows: int) -> str:
        """Return how the products of so many rows are computed."""
        ways = self._ways[rows]
        parts = (
            f"{', '.join(kind for kind in ways if ways[kind] == way)} by {way}" for way in dict.fromkeys(ways.values())
        )
        return f"products of {rows} rows: {'; '.join(parts)}{self._rejected.get(rows, '')}"

    def _reject(self, rows: int, what: str, why: str) -> None:
        self._rejected[rows] = f"{self._rejected.get(rows, '')}; not {what}, since {why}"

    def _why_wrong(self, lane: Lane, limit: float) -> str:
        try:
            for extent in self._extents:
                lane.read_up_to(extent)
                if why := self._probe(lane, limit):
                    return why
        except Exception as error:
            return f"the probe failed: {error_line(error)}"
        return ""

    def _choose(self, lane: Lane, limit: float, ways: Sequence[str]) -> None:
        if len(ways) == 1:
            return
        rows = lane.token.shape[0]
        used = self._ways[rows]
        for kind, way in itertools.product(_PRODUCTS, ways[1:]):
            before = used[kind]
            try:
                faster = self._is_faster(lane, kind, way)
            except Exception as error:  # such as of memory that a library takes for itself
                faster = False
                self._reject(rows, f"{kind} by {way}", error_line(error))
            used[kind] = way if faster else before
        if why := self._why_wrong(lane, limit):
            ways_used = ", ".join(dict.fromkeys(used.values()))
            self._reject(rows, f"by {ways_used} together", why)
            used.update(dict.fromkeys(_PRODUCTS, ways[0]))

    def _is_faster(self, lane: Lane, kind: str, way: str) -> bool:
        """Time steps in turn, as what else runs on the device passes."""
        used = self._ways[lane.token.shape[0]]
        seconds: dict[str, list[float]] = {used[kind]: [], way: []}
        used[kind] = way
        self.logits(lane)  # kernels are compiled here
        for _, used[kind] in itertools.product(range(_ROUNDS), tuple(seconds)):
            seconds[used[kind]].append(self._seconds(lane))
        before, after = map(min, seconds.values())
        return after < before * _CLEARLY

    def _seconds(self, lane: Lane) -> float:
        return step_cost.time_on_cuda(lambda: self.logits(lane), self._embedding.device, _TIMED, cold=False)[1]

    def _probe(self, lane: Lane, limit: float) -> str:
        device = self._embedding.device
        random = torch.Generator(device).manual_seed(lane.token.shape[0])
        lane.begin_probe(random, _KEY_MAGNITUDE)
        snapshot = StateSnapshot(CapturedState(buffers=lane.state()), device)
        calls: dict[Any, Any] = {}
        watched = [*(layer.module for layer in self._layers), self._final]
        hooks = [
            module.register_forward_pre_hook(lambda *call: calls.__setitem__(call[0], call[1:]), with_kwargs=True)
            for module in watched
        ]
        try:
            logits = lane.plain_logits()
        finally:
            for hook in hooks:
                hook.remove()
        snapshot.restore()
        if not torch.equal(_hidden(calls[watched[0]])[:, 0], F.embedding(lane.token[:, 0], self._embedding)):
            return "hidden states do not begin as the rows of the embedding"
        off = _difference(self._scores(_hidden(calls[self._final])[:, 0].contiguous()), logits)
        if not off <= limit:
            return f"logits differ by {off:.2g} of the largest, over {limit:.2g}"
        shape = (lane.token.shape[0], 1, self._embedding.shape[1])
        for number, (layer, cached) in enumerate(zip(self._layers, lane.cache.layers, strict=True)):
            args, kwargs = calls[layer.module]
            kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            for magnitude in _MAGNITUDES:
                hidden = torch.randn(shape, generator=random, device=device) * magnitude
                hidden = hidden.to(self._embedding.dtype)
                outputs = layer.module(hidden, *args[1:], **kwargs)
                snapshot.restore()
                theirs = (outputs if isinstance(outputs, torch.Tensor) else outputs[0])[:, 0], *lane.written(cached)
                ours = hidden[:, 0].clone()
                scaled = self._run(layer, ours, lane, cached)
                pairs = [*zip(("result", "keys", "values"), (ours, *lane.written(cached)), theirs, strict=True)]
                if scaled is not None:
                    ready = scaled.rows.float() * scaled.squares.sum(0)[: len(ours), None].rsqrt()
                    pairs += [("norm", ready, F.normalize(ours.float(), eps=0.0) * layer.following)]
                for name, left, right in pairs:
                    off = _difference(left, right)
                    if not off <= limit:
                        return f"the {name} of layer {number} differ by {off:.2g} of the largest, over {limit:.2g}"
        return ""


def _hidden(call: Any) -> torch.Tensor:
    args, kwargs = call
    hidden: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return hidden


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = left.double(), right.double()
    return float((left - right).abs().max() / right.abs().max())


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    eps = getattr(module, "variance_epsilon", None)
    return module.weight, float(module.eps if eps is None else eps)


def _linear(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if type(module) is not torch.nn.Linear or not module.weight.is_contiguous():
        raise NotFusedError(f"a product is a {type(module).__name__}")
    return module.weight, module.bias


def _is_changed(module: Any) -> bool:
    return "forward" in vars(module) or any(vars(module)[hooks] for hooks in ("_forward_hooks", "_forward_pre_hooks"))
