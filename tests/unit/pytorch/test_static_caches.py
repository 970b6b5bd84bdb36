# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``cache_update`` under a policy: what static caches of transformers write, by kernels of other packages."""

from __future__ import annotations

import sys

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.ops import plugins  # noqa: E402 - it needs both
from xpuruntime.ops.torch_kernels import forget_torch_kernels  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache")]

STRICT = xrt.Policy(mode="strict", kernels={"cache_update": "package.cache_update"})


class Slices(plugins.TorchKernel):
    """Writes row by row, at positions that it reads."""

    id, op = "package.cache_update", "cache_update"

    def supports(self, call):
        return True, ""

    def forward(self, call, keys, values, new_keys, new_values, positions):
        for at, position in enumerate(positions.unbind()):
            row = torch.arange(keys.shape[2]) == position
            keys.copy_(torch.where(row[:, None], new_keys[:, :, at : at + 1], keys))
            values.copy_(torch.where(row[:, None], new_values[:, :, at : at + 1], values))
        return (), ()


class Late(Slices):
    """Leaves the last position of a prompt out."""

    def forward(self, call, keys, values, new_keys, new_values, positions):
        rest = slice(None, max(1, len(positions) - 1))
        return super().forward(call, keys, values, new_keys, new_values, positions[rest])


@pytest.fixture
def package():
    def place(kernel=Slices):
        plugins.register(plugins.KernelBackend("package", "cpu", "1"), kernel())

    yield place
    forget_torch_kernels("package")
    plugins._sources.pop("package", None)


@pytest.fixture
def hf(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    found = pytest.importorskip("transformers")
    if not hasattr(found.cache_utils, "StaticLayer"):
        pytest.skip("this transformers has no layers of static caches")
    return found


def model_of(hf, **more):
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    family = "Gemma2" if "sliding_window" in more else "Llama"
    return getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes)).eval()


def rows_of(found):
    return {(row.phase, row.resolved, row.status): row.count for row in found.rows if row.op == "cache_update"}


def test_generation_writes_a_static_cache_by_a_kernel(hf, package):
    package()
    model, own = model_of(hf), hf.cache_utils.StaticLayer.__dict__["update"]
    ids = torch.randint(1, 64, (2, 6))

    def generate():
        return model.generate(
            ids, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
        )

    plain = generate()
    with xt.kernel_policy(STRICT), xt.explain(root=model) as found:
        assert torch.equal(generate(), plain)
    found.require()
    kernel = ("package.cache_update", "honoured")
    assert set(rows_of(found)) == {("prefill", *kernel), ("decode", *kernel)}
    assert hf.cache_utils.StaticLayer.__dict__["update"] is own
    rule = {"match": {"op": "cache_update", "phase": "decode"}, "use": "package.cache_update"}
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rules": [rule]})), xt.explain(root=model) as found:
        assert torch.equal(generate(), plain)
    assert {key for key in rows_of(found) if key[1] == kernel[0]} == {("decode", *kernel)}
    with xt.kernel_policy(xrt.KernelPolicy(cache_update=["package.other", "torch"])):
        assert torch.equal(generate(), plain)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_compiled_code_writes_what_eager_code_does(hf, package):
    package()
    model, ids = model_of(hf), torch.randint(1, 64, (2, 5))

    def caches(run):
        cache = hf.StaticCache(model.config, max_cache_len=12)
        cache.early_initialization(2, 1, 16, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            logits = [run(ids, cache), run(ids[:, :1], cache)]
        return [*logits, *[x for layer in cache.layers for x in (layer.keys, layer.values, layer.cumulative_length)]]

    def step(ids, cache):
        return model(ids, past_key_values=cache, use_cache=True).logits

    plain = caches(step)
    torch._dynamo.reset()
    with xt.kernel_policy(STRICT), xt.explain(root=model) as found:
        torch.testing.assert_close(caches(torch.compile(step, fullgraph=True, backend="aot_eager")), plain)
    found.require()
    assert {key[1:] for key in rows_of(found)} == {("package.cache_update", "honoured")}


def test_a_window_is_written_while_it_has_room(hf, package):
    package()
    layer = hf.cache_utils.StaticSlidingWindowLayer
    chunks = [(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4)) for count in (3, 1, 2)]

    def written(under, last=2):
        made = layer(max_cache_len=9, sliding_window=4)
        with torch.no_grad(), xt.kernel_policy(under):
            results = [tuple(x.clone() for x in made.update(*chunk)) for chunk in chunks[:last]]
        return [*results, (made.keys, made.values, made.cumulative_length, torch.tensor(made.cumulative_length_int))]

    torch.testing.assert_close(written(STRICT), written(xrt.Policy()))
    with pytest.raises(UnsupportedOperationError, match="its window is full"):
        written(STRICT, 3)
    with pytest.warns(XpuRuntimeWarning, match="its window is full"):
        under = written(xrt.Policy(kernels={"cache_update": "package.cache_update"}), 3)
    torch.testing.assert_close(under, written(xrt.Policy(), 3))


def test_a_write_whose_gradient_is_recorded_is_left_to_transformers(hf, package):
    package()
    new = torch.randn(1, 1, 2, 4, requires_grad=True)
    with xt.kernel_policy(STRICT), pytest.raises(UnsupportedOperationError, match="the gradient of what it writes"):
        hf.cache_utils.StaticLayer(4).update(new, new)


def test_a_layer_that_writes_in_its_own_way_is_refused(hf, package, monkeypatch):
    package()
    own = hf.cache_utils.StaticLayer.update

    def update(self, key_states, value_states, *args, **kwargs):
        return own(self, key_states * 2, value_states)

    monkeypatch.setattr(hf.cache_utils.StaticLayer, "update", update)
    new = torch.randn(1, 1, 2, 4)
    with xt.kernel_policy(STRICT), pytest.raises(UnsupportedOperationError, match="in none of the ways"):
        hf.cache_utils.StaticLayer(4).update(new, new)


def test_measuring_leaves_a_cache_as_the_model_writes_it(hf, package):
    package()
    chunks = [(torch.randn(2, 2, count, 4), torch.randn(2, 2, count, 4)) for count in (3, 1)]
    policy = xrt.KernelPolicy(cache_update="auto", auto_strategy="best_performance")

    def written():
        layer = hf.cache_utils.StaticLayer(8)
        for chunk in chunks:
            layer.update(*chunk)
        return layer.keys, layer.values, layer.cumulative_length

    plain = written()
    with xt.kernel_policy(policy), xt.explain() as found:
        assert all(map(torch.equal, written(), plain))
    assert {status for _, _, status in rows_of(found)} == {"honoured"}


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 8, 4, dtype=dtype), torch.randn(2, 3, 8, 5, dtype=dtype)
    new = torch.randn(2, 3, 2, 4, dtype=dtype), torch.randn(2, 3, 2, 5, dtype=dtype)
    names = ("keys", "values", "new_keys", "new_values", "positions")
    return dict(zip(names, (keys, values, *new, torch.tensor([3, 6])), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_says_what_it_writes(package, dtype):
    package()
    stated = operands(dtype)
    before = stated["keys"]._version
    assert perform("cache_update", stated, {}, kernel="package.cache_update") == ()
    assert stated["keys"]._version > before
    assert torch.equal(stated["keys"][:, :, [3, 6]], stated["new_keys"])
    assert torch.equal(stated["values"][:, :, [3, 6]], stated["new_values"])
    schema = torch.ops.xpuruntime.cache_update.served._schema
    assert [bool(x.alias_info and x.alias_info.is_write) for x in schema.arguments[:2]] == [True, False]
    keys, values, *rest = operands(dtype).values()
    torch.library.opcheck(
        torch.ops.xpuruntime.cache_update.served,
        ([keys, values], rest, ",".join(stated), "", "package.cache_update", "infer"),
    )


def test_a_kernel_that_leaves_a_position_out_cannot_serve(package):
    package(Late)
    with pytest.raises(UnsupportedOperationError, match="the output differs"):
        perform("cache_update", operands(), {}, kernel="package.cache_update")
