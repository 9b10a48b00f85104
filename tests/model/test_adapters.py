"""Which models are refused for their positions or masks, and adapters for modules that compute attention themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from flexengine import Engine, SamplingParams
from flexengine.errors import UnsupportedModel
from flexengine.model import build as building
from flexengine.model.adapters import recurrent
from flexengine.model.adapters.alibi import biased, biases
from flexengine.model.forward import Inputs, Layer, Pass
from flexengine.model.layer_range import use_range
from flexengine.model.mixers import StateView
from flexengine.model.skeleton import TRIAL_TOKENS
from flexengine.model.watch import Watch
from tests.helpers.architectures import GAP, config_classes, continuation, engine_answers, judged, prompts_of
from tests.helpers.listening import listening
from tests.helpers.native_layers import arguments, opened, ran
from tests.helpers.tiny_models import SEEDS, VOCABULARY, blank_model, make_model, tiny_config

TOKENS = 13


def built(kind: str, directory: Path, **given: Any) -> Any:
    """Return the skeleton of a tiny model without weights."""
    config = tiny_config(config_classes()[kind], **given)
    with torch.device("meta"):
        model = blank_model(config)
    model.config.save_pretrained(directory)
    return building.build(directory, torch.float32)


@pytest.mark.parametrize("kind", ["bart", "pegasus", "mvp", "marian"])
def test_decoders_that_count_positions_are_refused_without_their_adapter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(kind, tmp_path)
    monkeypatch.delitem(building.ADAPTERS, kind)
    with pytest.raises(UnsupportedModel, match="counts positions itself"):
        built(kind, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "mixtral", "gemma3_text"])
def test_models_that_use_the_given_positions_make_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_watched", lambda model: True)
    assert built(kind, tmp_path).total == 4


def test_positions_are_followed_through_functions_and_linear_layers() -> None:
    linear, table = nn.Linear(4, 4), torch.randn(50, 4)
    given, watch = torch.arange(TOKENS), Watch(TOKENS)
    with torch.no_grad(), watch.over(linear):
        fine = linear(table[given]) + torch.arange(4)
        own = torch.arange(3, 3 + TOKENS)
        through = linear(table[own])
        summed = torch.ones(1, TOKENS, dtype=torch.int64).cumsum(1)
        changed = torch.zeros(TOKENS, 4)
        changed[:, 0] = own
        added = torch.zeros(TOKENS).add_(own)
        experts = torch.ones(TOKENS, 5).cumsum(1)
    assert not any(watch.made(x) for x in (fine, experts))
    assert all(watch.made(x) for x in (own, through, summed, changed, added))


def test_a_mask_of_blocks_of_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 names a block for every token of an image, and -1 for others."""
    built("gemma4_unified", tmp_path)
    full = torch.full

    def numbered(shape: Any, value: Any, **options: Any) -> Any:
        return full(shape, 0 if type(value) is int and value == -1 else value, **options)

    monkeypatch.setattr(torch, "full", numbered)
    with pytest.raises(UnsupportedModel, match="mask depends on the tokens"):
        built("gemma4_unified", tmp_path)


def test_temperature_by_counted_positions_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_watched", lambda model: True)
    monkeypatch.delitem(building.ADAPTERS, "llama4_text")
    with pytest.raises(UnsupportedModel, match="counts positions itself"):
        built("llama4_text", tmp_path)


@pytest.mark.parametrize("heads", [4, 6, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_of_mpt_are_those_of_transformers_in_every_dtype(heads: int, dtype: torch.dtype) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    tokens, scale, unit = 2000, 128**-0.5, 8.0
    positions = torch.arange(tokens)[None]
    current = Pass(lambda: biases(heads, torch.device("cpu")) / (scale * unit))
    current.inputs = Inputs(positions, positions, positions[0])
    rest, columns = current.switch(), []
    for _ in range(1 if dtype == torch.float32 else 3):
        columns.append(rest.to(dtype))
        rest = rest - columns[-1].float()
    zeros = torch.zeros(1, heads, tokens, 8, dtype=dtype)
    q, k = biased(zeros, zeros, columns, unit)
    found = scale * (q[0, :, -1:].float() @ k[0].float().transpose(1, 2))[:, 0]
    wanted = build_mpt_alibi_tensor(heads, tokens)[:, 0]
    assert (found - found[:, -1:] - wanted).abs().max() < 2e-4 * slopes_least(wanted)


@pytest.mark.parametrize("heads", [4, 6])
def test_keys_of_mpt_are_the_same_by_modules_and_by_native_layers(heads: int, tmp_path: Path) -> None:
    """Some passes need modules, so keys of one sequence may be of both. 1 / the scale of heads of 32 is no power of 2,
    other than that of the small layers of trials."""
    config = tiny_config(config_classes()["mpt"], d_model=32 * heads, n_heads=heads)
    with torch.no_grad():
        make_model(config, 0).save_pretrained(tmp_path)
    skeleton, layers = opened(tmp_path)
    hidden, positions = arguments(skeleton)
    assert layers[0].native.usable(hidden, positions)
    (q, k, *_), (other_q, other_k, *_) = (ran(layers[0], hidden, positions, native=native) for native in (True, False))
    for one, other in ((q, other_q), (k, other_k)):
        torch.testing.assert_close(one[..., -1], other[..., -1], rtol=1e-6, atol=1e-6)


def slopes_least(wanted: torch.Tensor) -> float:
    """The largest bias, in hundreds: rounding of fp32 grows with it."""
    return max(1.0, float(wanted.abs().max()) / 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False}),
        ("mpt", {"d_model": 48, "n_heads": 6}),
        ("stablelm", {"use_parallel_residual": True}),
        ("trocr", {"use_learned_position_embeddings": True}),
        ("roformer", {"rotary_value": True}),
        ("xmod", {"ln_before_adapter": False, "languages": ["de_DE", "en_XX"]}),
        ("llama4_text", {"interleave_moe_layer_step": 2, "use_qk_norm": False}),
    ],
)
def test_other_forms_of_adapted_families_are_exact(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    assert judged(config_classes()[kind], tmp_path / "model", **given)[0] == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_falcon_with_alibi_is_exact(shared: bool, tmp_path: Path) -> None:
    """The reference is the default attention: transformers' eager attention of Falcon adds the biases twice."""
    config = tiny_config(config_classes()["falcon"], alibi=True, multi_query=shared, num_kv_heads=4)
    prompts = prompts_of(VOCABULARY)
    for seed in range(SEEDS):
        with torch.no_grad():
            make_model(config, seed).save_pretrained(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
        expected = [continuation(model, prompt) for prompt in prompts]
        if min(gap for _, gap in expected) >= GAP:
            break
    else:
        pytest.fail("no seed is decisive")
    engine = Engine(tmp_path, device="cpu", offload_dir=tmp_path / "offload")
    assert engine_answers(engine, prompts) == [answer for answer, _ in expected]


def test_positions_that_skip_padding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="counts positions itself"):
        built("trocr", tmp_path, use_learned_position_embeddings=False)


def test_rows_longer_than_a_chunk_are_refused(tmp_path: Path) -> None:
    config = tiny_config(config_classes()["llama4_text"], attention_chunk_size=16)
    with torch.no_grad():
        make_model(config, 0).save_pretrained(tmp_path)
    with Engine(tmp_path, device="cpu", offload_dir=tmp_path / "offload") as engine:
        rows = [{"prompt_token_ids": [5] * n} for n in (12, 13)]
        fits, longer = engine.generate(rows, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(fits.token_ids) == 4
    assert "more than the model's context of 16" in longer.error


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, "factor": 4.0}
LONGROPE |= {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
BY_LAYERS = {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}
BY_LAYERS |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("phi3", LONGROPE),
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        ("gemma3_text", BY_LAYERS),
    ],
)
def test_first_frequencies_are_exact_for_rows_that_use_them(kind: str, rope: Any, tmp_path: Path) -> None:
    assert judged(config_classes()[kind], tmp_path / "model", rope_parameters=rope)[0] == "exact"


def test_rows_beyond_the_first_frequencies_are_refused(tmp_path: Path) -> None:
    config = tiny_config(config_classes()["phi3"], rope_parameters=LONGROPE, original_max_position_embeddings=40)
    with torch.no_grad():
        make_model(config, 0).save_pretrained(tmp_path)
    with Engine(tmp_path, device="cpu", offload_dir=tmp_path / "offload") as engine:
        longer = engine.generate({"prompt_token_ids": [5] * 37}, SamplingParams(max_tokens=4, ignore_eos=True))
    assert "more than the model's context of 40" in longer.error


def test_adapters_leave_other_models_of_the_process_alone(tmp_path: Path) -> None:
    """transformers computes the same before and after a model of the same class was adapted."""
    config = tiny_config(config_classes()["mpt"])
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        model = make_model(config, 0)
        before = model(ids).logits
        built("mpt", tmp_path)
        assert torch.equal(model(ids).logits, before)
    assert type(model.transformer) is transformers.MptModel


@pytest.mark.parametrize("kind", ["openai-gpt", "falcon", "mpt", "bart", "gpt_neox_japanese", "dbrx", "llama4_text"])
def test_ranges_of_layers_keep_the_shape_of_hidden_states(kind: str, tmp_path: Path) -> None:
    skeleton = built(kind, tmp_path)
    use_range(skeleton, (1, 3))
    shapes = [event.hidden.shape for event in skeleton.trial() if isinstance(event, Layer)]
    assert shapes == [(1, TRIAL_TOKENS, 64)] * 3


def test_pieces_do_not_round_the_states_of_xlstm() -> None:
    """In 16 bits, transformers rounds states where a call ends."""
    config = tiny_config(config_classes()["xlstm"])
    torch.manual_seed(0)
    with torch.no_grad():
        layer = xLSTMLayer(config)
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
        recurrent.adapt(config, layer.bfloat16())
        x, ends, outs = torch.randn(1, 256, config.hidden_size).bfloat16(), list[Any](), list[Any]()
        for cuts in ((256,), (64, 192), (128, 128)):
            view = StateView({})
            outs.append(torch.cat([layer(part, cache=view)[0] for part in x.split(cuts, 1)], 1))
            ends.append([view.states["recurrent", number] for number in range(3)])
    for out, end in zip(outs[1:], ends[1:], strict=True):
        assert outs[0].dtype == torch.bfloat16
        torch.testing.assert_close(out, outs[0], rtol=2**-7, atol=2**-7 * float(outs[0].abs().max()))
        for found, wanted in zip(end, ends[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("kind", "text"), [
    ("minimax_m3_vl_text", "64 tokens are the most of a row"), ("doge", "64 tokens are the most of a row"),
    ("hrm_text", "prompts are read causally, as by transformers without token_type_ids"),
])  # fmt: skip
def test_limits_of_adapted_models_are_told(kind: str, text: str, tmp_path: Path) -> None:
    with listening() as heard:
        skeleton = built(kind, tmp_path)
    assert [text in message for message in heard.messages] == [True]
    if kind == "doge":
        assert set(skeleton.as_modules.values()) == {"its keys have a bias"}
