"""Records of layers, read from runs of small ones: what they say, and the tokens of layers that follow them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.beam.configuration_beam import BeamConfig
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.ministral3 import Ministral3Config
from transformers.models.olmo.configuration_olmo import OlmoConfig

from flexengine import Engine, SamplingParams
from flexengine.model.build import build
from flexengine.model.forward import pausing_layers
from flexengine.model.native.describe import RotaryRecord, norm_of, part, rotated
from flexengine.model.native.layer import NativeLayer
from tests.helpers.families import NEW
from tests.helpers.layer_words import record_text
from tests.helpers.native_layers import arguments, changed, opened, ran
from tests.helpers.tiny_models import make_model, tiny_config

# By family, the text of the record of its first layer.
RECORDS = {
    "llama": "rotary halves, silu gated",
    "qwen3": "rotary halves, silu gated, head norms",
    "opt": "relu",
    "opt-350m": "relu, norms of sums",
    "gemma2": "rotary halves, gelu_tanh gated, post norms",
    "gemma3": "rotary halves, gelu_tanh gated, head norms, post norms",
    "granite": "rotary halves, silu gated, factors",
    "gpt2": "joined projections, gelu_tanh",
    "bloom": "projections joined by head, ALiBi, gelu_tanh",
    "phi3": "joined projections, rotary halves, silu gated",
    "cohere": "rotary pairs, silu gated, parallel",
    "gpt-neox": "projections joined by head, rotary halves, gelu, parallel",
    "starcoder2": "rotary halves, gelu_tanh",
    "glm4": "rotary pairs, silu gated, post norms",
    "olmo2": "rotary halves, silu gated, head norms, post norms",
    "mixtral": "rotary halves, block as a module",
    "qwen3-moe": "rotary halves, block as a module, head norms",
    "gpt-oss": "rotary halves, block as a module, sinks",
    "deepseek-v3": "latent attention, rotary pairs, silu gated",
    "deepseek-v2": "latent attention, rotary pairs, silu gated",
    "minicpm3": "latent attention, rotary halves, silu gated, factors",
    "olmo": "rotary halves, silu gated, limits",
    "olmoe": "rotary halves, block as a module, head norms, limits",
    "gptj": "rotary pairs, gelu_tanh, parallel",
    "codegen": "projections joined by groups of heads, rotary pairs, gelu_tanh, parallel",
    "gpt-neo": "gelu_tanh",
    "granitemoeshared": "rotary halves, block as a module, block in two modules, factors",
    "mimo": "rotary halves, silu gated, sinks, factors",
    "afmoe": "rotary halves, silu gated, head norms, gated attention, post norms",
    "bitnet": "rotary halves, relu_squared gated, inner norms",
    "laguna": "rotary halves, silu gated, head norms, gated attention",
    "nanochat": "rotary halves, relu_squared, head norms",
}


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("family", RECORDS)
def test_what_a_layer_computes_is_read_from_a_small_one(families: Any, family: str) -> None:
    skeleton = build(families(family).directory, torch.float32)
    layers = pausing_layers(skeleton.model)
    assert skeleton.as_modules == {}
    assert record_text(layers[0].native.record) == RECORDS[family]
    assert all(layer.native.kind.proven() for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECORDS)
def test_tokens_of_native_layers(families: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """They are those of transformers, and no layer's modules are called."""
    made, calls, call = families(family), list[int](), NativeLayer.__call__

    def counted(self: NativeLayer, *args: Any) -> Any:
        count, out = call(self, *args)
        calls.append(count)
        return count, out

    monkeypatch.setattr(NativeLayer, "__call__", counted)
    with Engine(made.directory, device="cpu", device_mem="256M") as engine:
        modules = [layer.layer for layer in pausing_layers(engine.core.skeleton.model)]
        for module in modules:
            monkeypatch.setattr(module, "forward", None, raising=False)
        results = engine.generate(made.rows, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [result.error for result in results] == [None] * len(results)
    assert [list(result.token_ids) for result in results] == made.expected
    assert sum(calls) >= len(modules)


def test_queries_that_grow_with_positions(tmp_path: Path) -> None:
    """Ministral 3 multiplies queries beyond the original context; records have no such factor."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 3.0}
    config = Ministral3Config(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rope_parameters=rope, initializer_range=0.4,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 61, (1, 60))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 60:].tolist()
    with Engine(tmp_path, device="cpu", device_mem="256M") as engine:
        found = engine.generate([{"prompt_token_ids": ids[0].tolist()}], SamplingParams(max_tokens=12, ignore_eos=True))
        assert "queries" in str(engine.core.skeleton.as_modules)
    assert list(found[0].token_ids) == expected


@pytest.mark.parametrize("family", ["bloom", "granite", "olmo2", "gpt-neox", "glm4"])
def test_products_in_bf16(families: Any, family: str) -> None:
    """Norms of modules may differ in their last bits, which rounding to bf16 makes larger."""
    skeleton, layers = opened(families(family).directory)
    for slot in (slot for layer in skeleton.layers for slot in layer.values() if slot.linear):
        slot.bind(nn.Parameter(slot.holder[slot.name].bfloat16(), requires_grad=False))
    hidden, positions = arguments(skeleton)
    exact = ran(layers[0], hidden, positions)
    skeleton.product.compute = "bf16"
    assert layers[0].native.usable(hidden, positions)
    ours, theirs = ran(layers[0], hidden, positions), ran(layers[0], hidden, positions, native=False)
    for one, other, plain in zip(ours, theirs, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-2
        assert not torch.equal(one, plain)


@pytest.mark.parametrize(
    ("module", "shift", "centred"),
    [(LlamaRMSNorm(24), 0.0, False), (Gemma2RMSNorm(24), 1.0, False), (nn.LayerNorm(24), 0.0, True),
     (CohereLayerNorm((3, 24)), 0.0, True), (nn.LayerNorm(16, elementwise_affine=False), 0.0, True)],
)  # fmt: skip
def test_norms_are_known_by_their_numbers(module: Any, shift: float, centred: bool) -> None:
    for parameter in module.parameters():
        parameter.data.normal_()
    record = norm_of(module.requires_grad_(False), "path")
    assert record is not None
    assert (record.path, record.shift, record.centred) == ("path", shift, centred)
    assert record.eps == (module.eps if hasattr(module, "eps") else module.variance_epsilon)


def test_other_modules_are_no_norms() -> None:
    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * (x.abs().pow(3).mean(-1, keepdim=True) + self.eps).pow(-1 / 3)

    for module in (Cubed(), nn.SiLU(), nn.Linear(8, 8), nn.Dropout(), BertIntermediate(BertConfig())):
        assert norm_of(module.requires_grad_(False)) is None


def test_rotary_positions_by_their_formula() -> None:
    """As products of complex numbers: pairs are neighbours, or elements of the two halves."""
    x, angles = torch.randn(3, 2, 10), torch.rand(3, 4) * 6
    turned = torch.polar(torch.ones(3, 1, 4), angles[:, None])
    near = torch.view_as_real(torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous()) * turned).flatten(-2)
    halves = torch.complex(x[..., :4], x[..., 4:8]) * turned
    far = torch.cat((halves.real, halves.imag), -1)
    for pairs, expected in ((True, near), (False, far)):
        given = {
            "pair": torch.cat((angles, angles), 1),
            "half": angles,
            "two": angles,
            "each": angles.repeat_interleave(2, 1),
        }
        given["each"] = given["each"] if pairs else torch.cat((angles, angles), 1)
        for name, angle in given.items():
            if (name in ("pair", "two")) != pairs and name != "each":
                continue
            kind = RotaryRecord("pairs" if pairs else "halves", name)
            y = rotated(kind, x, angle.cos(), angle.sin())
            assert y is not None
            torch.testing.assert_close(y, torch.cat((expected, x[..., 8:]), -1))
            for order, first, second in (
                ("sin, cos", angle.sin(), angle.cos()),
                ("cos, -sin", angle.cos(), -angle.sin()),
            ):
                assert torch.equal(rotated(kind._replace(given=order), x, first, second), y)
            at_end = rotated(kind._replace(end=True), x.roll(2, -1), angle.cos(), angle.sin())
            assert torch.equal(at_end, y.roll(2, -1))
    moved = rotated(RotaryRecord("pairs to halves", "half"), x, angles.cos(), angles.sin())
    torch.testing.assert_close(moved, torch.cat((near[..., ::2], near[..., 1::2], x[..., 8:]), -1))


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_factors_are_those_of_the_layer_not_of_the_small_one(families: Any, tmp_path: Path, heads: int) -> None:
    """OPT multiplies queries by a number that depends on the size of heads."""
    model = changed(families("opt").directory, tmp_path / "m", "OPT", num_attention_heads=heads)
    skeleton, layers = opened(model)
    assert {layer.native.record.factor for layer in layers} == {(64 / heads) ** -0.5}
    hidden, positions = arguments(skeleton)
    assert layers[0].native.usable(hidden, positions)
    outputs = []
    for native in (layers[0].native, None):
        layers[0].native = native
        outputs.append(ran(layers[0], hidden, positions))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_parts_of_joined_projections() -> None:
    y = torch.arange(2 * 24).view(2, 24)
    assert part(y, "blocks", "k", (4, 2, 3)).tolist() == [[[12, 13, 14], [15, 16, 17]], [[36, 37, 38], [39, 40, 41]]]
    assert part(y, "heads", "v", (2, 2, 4)).tolist() == [
        [[8, 9, 10, 11], [20, 21, 22, 23]],
        [[32, 33, 34, 35], [44, 45, 46, 47]],
    ]
    assert part(y, "", "q", (3, 1, 8)).shape == (2, 3, 8)


@torch.no_grad()
def test_layers_that_records_cannot_say_run_their_modules_and_tell_why(tmp_path: Path) -> None:
    """Some layers of Beam multiply queries by a number that depends on the position, others have gates with biases."""
    model = make_model(tiny_config(BeamConfig), 0)
    model.save_pretrained(tmp_path)
    skeleton = build(tmp_path, torch.float32)
    assert {layer.native for layer in pausing_layers(skeleton.model)} == {None}
    assert sorted(skeleton.as_modules) == [*range(4)]
    assert all("not its output projection" in why or "attention_scaling" in why for why in skeleton.as_modules.values())


@torch.no_grad()
def test_a_limit_that_only_large_numbers_exceed_is_found(tmp_path: Path) -> None:
    """As clip_qkv of OLMo, whose small layers with usual weights stay below it."""
    config = tiny_config(OlmoConfig, clip_qkv=60.0)
    make_model(config, 0).save_pretrained(tmp_path)
    skeleton, layers = opened(tmp_path)
    hidden, positions = arguments(skeleton)
    assert {layer.native.usable(hidden, positions) for layer in layers} == {True}
    assert {layer.native.record.k.clip for layer in layers} == {60.0}
    assert float(ran(layers[0], hidden, positions)[2].abs().max()) < 60
    (slot,) = (slot for name, slot in skeleton.layers[0].items() if "v_proj.weight" in name)
    slot.bind(nn.Parameter(slot.holder[slot.name] * 100, requires_grad=False))
    ours, theirs = ran(layers[0], hidden, positions), ran(layers[0], hidden, positions, native=False)
    assert float(ours[2].abs().max()) == 60
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-3)
