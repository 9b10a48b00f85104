"""Formats by layer: tokens of transformers with the same rounded weights, bytes by formula, shared files, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.errors import BudgetTooSmall, InvalidInput
from flexengine.model import encoding
from flexengine.plan.stages import StagePlan, Strategy
from flexengine.shell.commands import quality
from flexengine.shell.commands.messages import DONE, REFUSED
from flexengine.shell.commands.run import main
from tests.helpers.chained import chained
from tests.helpers.families import NEW, reference
from tests.helpers.rounded import rounded

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
MIX = (None, "int4", "int8", "int3")
SPLIT = (0.4, 0.3, 0.3)
POLICIES = {
    "device": Policy(8, 1, prefill_tokens=64),
    "host": Policy(2, 4, weights=(0, 1, 0), cache=(0, 1, 0), slots=3, prefill_tokens=64),
    "disk": Policy(3, 3, weights=(0, 0, 1), slots=1, prefill_tokens=64),
    "everywhere": Policy(2, 4, weights=SPLIT, cache=SPLIT, activations=SPLIT, prefill_tokens=64),
}
SHAPES = ((64, 64), (32, 64), (32, 64), (64, 64), (112, 64), (112, 64), (64, 112))  # of a layer of the tiny LLaMA
FP32, HIDDEN, VOCAB = 4, 64, 601
NORMS = 2 * HIDDEN * FP32


def layer_bytes(codec: str | None) -> int:
    """By formula: codes, and a scale and a minimum of 2 bytes each, per row and group of 64 columns; rows filled up to
    a multiple of 16."""
    if codec is None:
        return sum(rows * columns * FP32 for rows, columns in SHAPES) + NORMS
    group = 64 * int(codec.removeprefix("int")) // 8 + 4
    return sum(-(-rows // 16) * 16 * -(-columns // 64) * group for rows, columns in SHAPES) + NORMS


EDGE_BLOCK = 16 * (64 + 4)  # 16 rows of the embedding, in int8
EDGE = -(-VOCAB // 16) * EDGE_BLOCK  # embedding and head, which are tied


@pytest.fixture(scope="module")
def expected(families: Any) -> Any:
    """The tokens of transformers with the weights of MIX."""
    known = families("llama-tied")
    return reference(rounded(known.directory, MIX), known.prompts)


# Tokens and bytes.


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_and_bytes(families: Any, expected: Any, tmp_path: Path, name: str) -> None:
    known = families("llama-tied")
    options: dict[str, Any] = dict(policy=POLICIES[name], device="sim", offload_dir=tmp_path)
    with Engine(known.directory, lossy=Lossy(weights=MIX), **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == expected
        assert engine.layout is not None
        for tier in ("device", "host", "disk"):
            assert engine.core.machine.tier(tier).ledger.peak == sum(engine.layout.account[tier].values())
        for sizes in ([t.held_bytes for t in layer] for layer in engine.facts.layers):
            assert len(sizes) == len(SHAPES) + 2
        assert [sum(t.held_bytes for t in layer) for layer in engine.facts.layers] == [layer_bytes(c) for c in MIX]
        everything = sum(map(layer_bytes, MIX)) + EDGE + HIDDEN * FP32
        assert sum(engine.layout.stored_bytes.values()) == everything


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opt", "gpt2", "mixtral", "gpt-oss", "qwen3"])
def test_tokens_of_families(families: Any, family: str) -> None:
    """Transposed matrices, experts, biases."""
    known = families(family)
    expected = reference(rounded(known.directory, MIX), known.prompts)
    for policy in (POLICIES["device"], POLICIES["everywhere"]):
        with Engine(known.directory, lossy=Lossy(weights=MIX), policy=policy, device="sim") as engine:
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == expected


def test_stages_take_their_part_of_the_formats(families: Any, expected: Any) -> None:
    known = families("llama-tied")
    with chained(known.directory, (0, 1, 3, 4), POLICIES["host"], device="sim", lossy=Lossy(weights=MIX)) as chain:
        assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == expected


def test_each_layer_crosses_the_link_in_its_own_bytes(families: Any, expected: Any) -> None:
    """All layers and the head once per sweep, and the rows of the embedding in blocks of 16."""
    known, policy = families("llama-tied"), Policy(8, 1, weights=(0, 1, 0))
    with Engine(known.directory, lossy=Lossy(weights=MIX), policy=policy, device="sim") as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == expected
        moved = engine.summary.bytes["h2d"]
    prompts = [token for prompt in known.prompts for token in prompt]
    sweeps = [prompts, *([ids[i] for ids in expected] for i in range(NEW - 1))]
    blocks = sum(len({token // 16 for token in tokens}) for tokens in sweeps)
    assert moved == NEW * (sum(map(layer_bytes, MIX)) + EDGE) + blocks * EDGE_BLOCK


def test_one_format_for_every_layer_is_that_format(families: Any) -> None:
    known, found = families("llama-tied"), []
    for weights in ("int4", ("int4",) * 4):
        with Engine(known.directory, lossy=Lossy(weights=weights), policy=POLICIES["device"], device="sim") as engine:
            found.append([r.token_ids for r in engine.generate(known.rows, GREEDY)])
    assert found[0] == found[1]


# Encoded files.


@pytest.fixture
def prepare(families: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that encodes formats by layer, and returns the layers of which it encoded something."""
    directory, made, real = families("llama-tied").directory, list[str](), encoding._encoded

    def noting(piece: Any, *args: Any) -> Any:
        made.append(piece.name)
        return real(piece, *args)

    monkeypatch.setattr(encoding, "_encoded", noting)

    def encode(*weights: str | None) -> set[int]:
        made.clear()
        with Engine(directory, lossy=Lossy(weights=weights), device="cpu") as engine:
            engine.prepare()
        return {int(name.split(".")[2]) for name in made if ".layers." in name}

    return encode


def test_mixes_share_the_files_of_layers_that_they_have_in_common(prepare: Any, own_cache: Path) -> None:
    assert prepare("int4", "int4", None, "int8") == {0, 1, 3}
    assert prepare("int4", "int8", "int8", "int8") == {1, 2}
    assert prepare("int4", "int8", None, "int8") == set()
    files = [file.stat() for file in (own_cache / "prepared").glob("*/*.safetensors")]
    assert len(files) == (3 + 4 + 3) * len(SHAPES) + 3
    assert len({file.st_ino for file in files}) == (3 + 2) * len(SHAPES) + 1


def test_damaged_files_are_not_shared(prepare: Any, own_cache: Path) -> None:
    prepare("int4", None, None, None)
    for file in (own_cache / "prepared").glob("*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert prepare("int4", "int4", None, None) == {0, 1}


# Resuming.


@pytest.fixture
def job(families: Any, tmp_path: Path) -> Any:
    """Returns a function that runs a job with the formats in a file."""
    source, bits = tmp_path / "in.jsonl", tmp_path / "bits.json"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n' * 3)
    model = families("llama-tied").directory

    def run(bits_of_layers: Any, *words: str, **fields: Any) -> int:
        values = {"model": model.name, "layers": 4, "weights": bits_of_layers} | fields
        bits.write_text(json.dumps(values))
        return main([str(source), "--model", str(model), "--max-tokens", "2", "--device", "sim", "--output",
                     str(tmp_path / "out.jsonl"), "--layer-bits", str(bits), *words])  # fmt: skip

    return run


def test_formats_of_a_strategy(families: Any, tmp_path: Path) -> None:
    model = families("llama-tied").directory
    stages = tuple(StagePlan(f"gpu{i}", cut, MIX[slice(*cut)]) for i, cut in enumerate(((0, 1), (1, 4))))
    file = tmp_path / "strategy.json"
    file.write_text(Strategy("a shape", 4, stages, prefill_batch=1, decode_batch=2, cohorts=3).text())
    with Engine(model, device="sim", lossy=Lossy(weights=str(file))) as engine:
        assert engine.lossy.weights == MIX
    file.write_text(file.read_text().replace('"num_layers": 4', '"num_layers": 5').replace("[1, 4]", "[1, 5]"))
    with pytest.raises(InvalidInput, match="strategy"):
        Engine(model, device="sim", lossy=Lossy(weights=str(file)))


def test_a_job_goes_on_with_the_same_bits_only(job: Any, capsys: Any) -> None:
    assert job(MIX, "--limit", "1") == DONE
    assert "lossy: weights " in capsys.readouterr().err
    assert job((None, "int4", "int4", "int4")) == REFUSED
    assert "weights: layer 2 was int8, now int4, and 1 more layers differ" in capsys.readouterr().err
    assert job(MIX) == DONE
    assert "1 of 3 rows were done before" in capsys.readouterr().err


# Bad input.


@pytest.mark.parametrize(("fields", "says"), [
    ({"model": "other"}, 'is of the model "other", but this model is "llama-tied'),
    ({"model": 7}, "is of the model 7"),
    ({"layers": 5}, "has 5 layers, but llama-tied"),
    ({"weights": ["int4"] * 3}, "has 3 layers, but llama-tied"),
    ({"weights": ["int4", "int5", None, None]}, "weights is 'int5' for layer 1; it must be one of int8, int4"),
    ({"weights": "int4"}, "must have model, layers, and weights with a format per layer"),
    ({"more": 1}, "must have model, layers, and weights with a format per layer; flexengine quality"),
])  # fmt: skip
def test_files_of_bits_that_are_refused(job: Any, capsys: Any, fields: dict[str, Any], says: str) -> None:
    assert job(MIX, **fields) == REFUSED
    assert says.replace('"', "'") in capsys.readouterr().err.replace('"', "'")


def test_formats_for_another_number_of_layers(families: Any) -> None:
    with pytest.raises(InvalidInput, match="formats for 3 layers, but the model has 4; give one format per layer"):
        Engine(families("llama-tied").directory, device="sim", lossy=Lossy(weights=("int4",) * 3))


@pytest.mark.parametrize(("switches", "says"), [
    ({"budget": "6G"}, "budget is '6G', but it is for mixed weights, and weights is exact; set weights to mixed"),
    ({"weights": "int4", "budget": "6G"}, "and weights is int4; set weights to mixed, or leave the budget out"),
    ({"weights": "mixed"}, "there is no budget; set the budget to the bytes"),
    ({"weights": "mixed", "budget": "many"}, "budget is 'many'; it must be a number of bytes"),
    ({"weights": "bits.txt"}, "weights is 'bits.txt'; it must be one of int8, int4, int3, int2, mixed"),
    ({"weights": ["int4", 4]}, "weights is 4 for layer 1"),
    ({"weights": ("int8", None), "calibrate": "bundled"}, "1 x exact + 1 x int8 weights are not fitted"),
])  # fmt: skip
def test_switches_that_are_refused(switches: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as error:
        Lossy(**switches)
    assert says in str(error.value)


def test_missing_files_and_options_that_exclude_each_other(job: Any, tmp_path: Path, capsys: Any) -> None:
    assert job(MIX, "--weights", "int4") == REFUSED
    assert "--weights int4 and --layer-bits" in capsys.readouterr().err
    assert job(MIX, "--budget", "1M") == REFUSED
    assert "but it is for mixed weights" in capsys.readouterr().err
    assert job(MIX, "--layer-bits", str(tmp_path / "none.json")) == REFUSED
    assert "none.json cannot be read: No such file" in capsys.readouterr().err


def test_a_budget_that_is_too_small_ends_the_command_first() -> None:
    """No engine but that of the mixed weights is opened."""

    def make(lossy: Lossy) -> Any:
        assert lossy == Lossy(weights="mixed", budget="1M")
        raise BudgetTooSmall("the budget is too small")

    text = quality.read(None, 4, 64)
    with pytest.raises(BudgetTooSmall, match="the budget is too small"):
        next(quality.measure(make, text, [Lossy(weights="int8"), Lossy(weights="mixed", budget="1M")]))
