"""Neurons on demand: with an oracle greedy tokens equal those of transformers, with predictors those of a transformers
model whose activations are masked in the same way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.flash import predictors as trained
from flexengine.guests.flash.predictors import LayerPredictor, PredictionErrors, Predictor, Trained
from flexengine.guests.flash.traces import NeuronSharing
from flexengine.lossy import Lossy
from flexengine.model.prepare import prepared
from tests.e2e.test_exactness import GRID
from tests.helpers.families import FAMILIES, NEW, Family

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
ORACLE, PREDICTORS = Lossy(flash="oracle"), Lossy(flash="predictors")
SHARES = (0.0, 0.3, 0.6, 1.0)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Return a function that makes a family of sparse models: of OPT, or of LLaMA with ReLU in place of SiLU."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(FAMILIES, "reglu", ("Llama", dict(FAMILIES["llama"][1], hidden_act="relu")))
                made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def tokens(known: Family, policy: Policy, lossy: Lossy, tmp_path: Path, **options: Any) -> list[list[int]]:
    with Engine(known.directory, policy=policy, lossy=lossy, offload_dir=tmp_path, **options) as engine:
        results = engine.generate(known.rows, GREEDY)
        for tier in engine.summary.peak_bytes:
            assert engine.summary.peak_bytes[tier] <= engine.core.machine.tier(tier).ledger.peak
    assert [r.error for r in results] == [None] * len(results)
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(GRID)))
@pytest.mark.parametrize("family", ["opt", "reglu"])
def test_oracle(sparse: Any, tmp_path: Path, family: str, case: int) -> None:
    fields, overlap = GRID[case]
    policy = Policy(**fields, neurons=SHARES[case % len(SHARES)])
    known = sparse(family)
    assert tokens(known, policy, ORACLE, tmp_path, device="sim", overlap=overlap) == known.expected


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("family", ["opt", "opt-350m", "reglu"])
def test_oracle_on_a_cpu(sparse: Any, tmp_path: Path, family: str, share: float) -> None:
    known = sparse(family)
    assert tokens(known, Policy(3, 2, neurons=share), ORACLE, tmp_path) == known.expected


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_encoded_records(sparse: Any, tmp_path: Path, weights: str) -> None:
    """Fewer bits change tokens, but not more for a smaller memory or other batches."""
    known, lossy = sparse("reglu"), Lossy(weights=weights, flash="oracle")
    found = [
        tokens(known, policy, lossy, tmp_path) for policy in (Policy(8, 1, neurons=1.0), Policy(1, 2, neurons=0.7))
    ]
    assert found[0] == found[1]


def plant(known: Family, seed: int = 0) -> list[Predictor]:
    """Put random predictors of rank 8 into the cache, which name about half of the neurons. Return them."""
    torch.manual_seed(seed)
    config = known.model.config
    count, neurons = config.num_hidden_layers, getattr(config, "ffn_dim", None) or config.intermediate_size
    made = [Predictor(torch.randn(8, 64).bfloat16(), torch.randn(neurons, 8).bfloat16(), torch.randn(neurons))
            for _ in range(count)]  # fmt: skip
    files, sharing = sorted(known.directory.glob("*.safetensors")), NeuronSharing(0.5, (0.5, 0.7), (0.5, 0.6))

    def build(folder: Path) -> None:
        layers = tuple(LayerPredictor(p, PredictionErrors(9, 3, 4, 1), sharing, sharing) for p in made)
        trained.write(Trained(layers, {"seed": seed}), trained.checkpoint_key(files), folder)

    prepared(known.directory, files, build, f"random predictors {seed}", label="predictors")
    return made


@torch.no_grad()
def masked(known: Family, made: list[Predictor]) -> list[list[int]]:
    """Return greedy tokens of the transformers model, with every activation that is not predicted set to 0, for
    generated tokens."""
    inputs: dict[int, torch.Tensor] = {}
    start = [0]
    hooks = []
    for j, layer in enumerate(known.model.model.decoder.layers if known.name == "opt" else known.model.model.layers):
        first, down = (layer.fc1, layer.fc2) if known.name == "opt" else (layer.mlp.gate_proj, layer.mlp.down_proj)

        def note(_: Any, args: Any, j: int = j) -> None:
            inputs[j] = args[0].reshape(-1, 64)

        def mask(_: Any, args: Any, j: int = j) -> Any:
            named = made[j].active(inputs[j])
            named[: start[0]] = True
            return (torch.where(named.view(args[0].shape), args[0], 0.0),)

        hooks += [first.register_forward_pre_hook(note), down.register_forward_pre_hook(mask)]
    found = []
    for prompt in known.prompts:
        ids, start[0] = list(prompt), len(prompt)
        for _ in range(NEW):
            ids.append(int(known.model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", ["opt", "reglu"])
def test_predictors(sparse: Any, tmp_path: Path, family: str) -> None:
    """Only predicted neurons count for generated tokens, whatever the batch, the memory or the schedule."""
    known = sparse(family)
    expected = masked(known, plant(known))
    assert expected != known.expected
    for policy in (Policy(8, 1, neurons=1.0), Policy(1, 1, neurons=0.0), Policy(3, 2, neurons=0.6, schedule="zigzag")):
        assert tokens(known, policy, PREDICTORS, tmp_path) == expected


def logprobs(known: Family, policy: Policy, lossy: Lossy) -> list[list[float]]:
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    with Engine(known.directory, policy=policy, lossy=lossy) as engine:
        return [[step["logprob"] for step in r.logprobs] for r in engine.generate(known.rows, sampling)]


@pytest.mark.parametrize("family", ["opt", "reglu"])
@pytest.mark.parametrize("lossy", [ORACLE, PREDICTORS], ids=str)
def test_bits_do_not_depend_on_memory_and_batch(sparse: Any, family: str, lossy: Lossy) -> None:
    """Also if the tokens of a batch use more neurons than there is room for."""
    known = sparse(family)
    plant(known)
    policies = (Policy(8, 1, neurons=1.0), Policy(8, 1, neurons=0.0), Policy(1, 1, neurons=0.6), Policy(3, 2))
    first, *others = [logprobs(known, policy, lossy) for policy in policies]
    assert all(other == first for other in others)


@pytest.mark.parametrize("lossy", [ORACLE, PREDICTORS], ids=str)
def test_scores_are_those_of_generated_tokens(sparse: Any, lossy: Lossy) -> None:
    known, policy = sparse("opt"), Policy(4, 1, neurons=0.5)
    plant(known)
    with Engine(known.directory, policy=policy, lossy=lossy) as engine:
        sampling = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
        made = engine.generate(known.rows, sampling)
        scored = engine.score(known.prompts, [r.token_ids for r in made])
    for one, other in zip(made, scored, strict=True):
        assert other.is_greedy
        found = [step["logprob"] for step in other.logprobs]
        assert found == pytest.approx([step["logprob"] for step in one.logprobs], abs=1e-4)


def test_damaged_predictors_leave_the_engine_as_it_was(sparse: Any) -> None:
    known = sparse("opt")
    plant(known, 2)
    found = trained.find(sorted(known.directory.glob("*.safetensors")))
    assert found is not None
    file = found / trained.TENSORS
    data = file.read_bytes()
    try:
        file.chmod(0o600)
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with Engine(known.directory, policy=Policy(4, 1)) as engine:
            with pytest.raises(BadCheckpoint, match="truncated or damaged"):
                engine.use(PREDICTORS)
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
    finally:
        file.write_bytes(data)


def test_switches_of_one_engine(families: Any) -> None:
    """Formats of weights that are taken out do not outlive their switches."""
    known = families("mixtral")
    with Engine(known.directory) as engine:
        for lossy in (Lossy(weights="int8"), ORACLE, Lossy(weights="int4"), ORACLE, Lossy()):
            engine.use(lossy)
            found = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
            assert (found == known.expected) == (lossy.weights is None)


def test_all_records_are_read_once_if_all_fit(sparse: Any, tmp_path: Path) -> None:
    """The memory keeps what it has read. Records are read in whole, so bytes are those of all records."""
    known = sparse("opt")
    with Engine(known.directory, policy=Policy(2, 2, neurons=1.0), lossy=ORACLE) as engine:
        engine.generate(known.rows, GREEDY)
        assert engine.summary.bytes["disk_read"] == 4 * 112 * 512  # layers, neurons, two vectors of 64 fp32


def test_refusals(sparse: Any, families: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no neuron of .* stays inactive: its activation function is SiLU"):
        Engine(families("llama").directory, lossy=ORACLE)
    with pytest.raises(InvalidInput, match=r"the layers of .* have no block that it knows"):
        Engine(families("gpt2").directory, lossy=ORACLE)
    with pytest.raises(InvalidInput, match="has no predictors; train them: flexengine flash train"):
        Engine(sparse("opt-350m").directory, lossy=PREDICTORS)
    with pytest.raises(InvalidInput, match="flash is 'maybe'; it must be one of oracle, predictors"):
        Lossy(flash="maybe")
    with pytest.raises(InvalidInput, match="flash is 'oracle' with weights int2"):
        Lossy(weights="int2", flash="oracle")
    with pytest.raises(InvalidInput, match="compute is 'int8' with flash"):
        Engine(sparse("opt").directory, lossy=Lossy(compute="int8", flash="oracle"))
    with pytest.raises(InvalidInput, match=r"policy neurons is 1\.5; it must be a share from 0 to 1"):
        Policy(neurons=1.5)
    with (
        Engine(sparse("opt").directory, policy=Policy(neurons=0.5)) as engine,
        pytest.raises(InvalidInput, match=r"policy neurons is 0\.5, but no neurons are read on demand"),
    ):
        engine.generate([{"prompt_token_ids": [5]}])


def test_other_predictors_do_not_continue_a_job(sparse: Any, tmp_path: Path) -> None:
    known = sparse("opt")
    plant(known, 0)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("".join(f'{{"prompt_token_ids": {p}}}\n' for p in known.prompts))
    policy = Policy(2, 1, neurons=0.5)
    with Engine(known.directory, lossy=PREDICTORS, policy=policy) as engine:
        engine.run_job(prompts, output, GREEDY)
    plant(known, 1)
    with (
        Engine(known.directory, lossy=PREDICTORS, policy=policy) as engine,
        pytest.raises(InvalidInput, match=r"flash: was predictors [0-9a-f]{16}, now predictors [0-9a-f]{16}"),
    ):
        engine.run_job(prompts, output, GREEDY)
