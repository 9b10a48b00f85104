"""Sparsified activations: greedy tokens equal those of transformers with the same thresholds in forward hooks, with and
without reading neurons on demand."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests import calibration
from flexengine.guests.flash.neurons import NeuronBlock
from flexengine.guests.flash.training import Settings, cut, predictors
from flexengine.worker.open_model import open_model
from tests.e2e.test_flash import masked
from tests.helpers.calibrated import SPREAD, TOKENS
from tests.helpers.families import FAMILIES, NEW, Family, reference
from tests.helpers.tokenizers import byte_tokenizer

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SHARE = 0.7
GELU = {"opt-gelu": ("OPT", dict(FAMILIES["opt"][1], activation_function="gelu"))}  # as Galactica has
PLAIN = (Policy(8, 1), SPREAD)
ON_DEMAND = (Policy(8, 1, neurons=1.0), Policy(1, 1, neurons=0.0), Policy(3, 2, neurons=0.3, schedule="zigzag"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", TOKENS)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Return a function that makes a family with a tokenizer."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                for other, values in GELU.items():
                    patch.setitem(FAMILIES, other, values)
                made[name] = Family(name, tmp_path_factory.mktemp(name))
            byte_tokenizer(made[name].directory)
        return made[name]

    return get


def activations(model: Any) -> list[torch.nn.Module]:
    """The activation functions of a model of transformers, by layer."""
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] in ("act_fn", "act", "activation_fn")]


@contextmanager
def hooked(model: Any, thresholds: Sequence[float]) -> Iterator[None]:
    """Have activations of a smaller magnitude than their layer's threshold count as 0."""
    hooks = []
    for act, threshold in zip(activations(model), thresholds, strict=True):

        def cut_off(_: Any, args: Any, out: torch.Tensor, threshold: float = threshold) -> torch.Tensor:
            return out * ((out >= threshold) | (out <= -threshold))

        hooks.append(act.register_forward_hook(cut_off))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(known: Family, policy: Policy, lossy: Lossy, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Return tokens and thresholds."""
    with Engine(known.directory, policy=policy, lossy=lossy, **options) as engine:
        results = engine.generate(known.rows, GREEDY)
        return [r.token_ids for r in results], engine.calibrator.thresholds


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox", "opt-gelu"])
def test_tokens(readers: Any, tmp_path: Path, family: str) -> None:
    known = readers(family)
    found, thresholds = run(known, PLAIN[0], Lossy(sparsify=SHARE))
    with hooked(known.model, thresholds):
        expected = reference(known.model, known.prompts)
    assert min(thresholds) > 0
    assert expected != known.expected
    assert found == expected
    assert run(known, PLAIN[1], Lossy(sparsify=SHARE), device="sim", offload_dir=tmp_path)[0] == expected
    for policy in ON_DEMAND:
        assert run(known, policy, Lossy(sparsify=SHARE, flash="oracle"), offload_dir=tmp_path)[0] == expected


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_an_oracle_uses_the_other_neurons(readers: Any, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Decode steps of one row use the share of the neurons that is not sparsified. Prompts are not counted."""
    known, used = readers("llama"), list[int]()
    added = NeuronBlock.added

    def counted(block: NeuronBlock, out: Any, x: Any, uses: Any, numbers: Any, *rest: Any) -> Any:
        used.append(len(numbers))  # all that a step uses, as memory has room for all
        return added(block, out, x, uses, numbers, *rest)

    monkeypatch.setattr(NeuronBlock, "added", counted)
    policy = Policy(1, 1, neurons=1.0)
    with Engine(known.directory, policy=policy, lossy=Lossy(sparsify=share, flash="oracle")) as engine:
        engine.generate(known.rows, GREEDY)
        neurons = engine.core.opened.flash.blocks[0].neurons
    assert sum(used) / len(used) / neurons == pytest.approx(1 - share, abs=0.12)


def test_predictors(readers: Any, tmp_path: Path) -> None:
    """Predictors are those of one share; activations that they name still become 0 below the threshold."""
    known, lossy = readers("llama"), Lossy(sparsify=SHARE)
    with Engine(known.directory, lossy=lossy, prefix_sharing=False) as engine:
        content = Path(__file__).read_text()
        made = predictors(engine, cut("a text", content, engine.tokenizer, 256, 40 * 128), Settings(0.3, rank=8))
        thresholds = engine.calibrator.thresholds
    assert made.errors.active_share == pytest.approx(1 - SHARE, abs=0.1)
    assert 0 < made.errors.misses < 0.6
    with hooked(known.model, thresholds):
        exact = reference(known.model, known.prompts)
        expected = masked(known, [layer.predictor for layer in made.known])
    assert expected != exact
    for policy in ON_DEMAND:
        assert run(known, policy, Lossy(sparsify=SHARE, flash="predictors"), offload_dir=tmp_path)[0] == expected
    other = r"has no predictors for sparsify 0\.8 .*flexengine flash train .*llama\S* --sparsify 0\.8, or let flash be"
    with pytest.raises(InvalidInput, match=other):
        Engine(known.directory, lossy=Lossy(sparsify=0.8, flash="predictors"))
    with pytest.raises(InvalidInput, match=r"--sparsify 0\.7 --calibration-text other\.txt"):
        Engine(known.directory, lossy=Lossy(sparsify=SHARE, flash="predictors", calibrate="other.txt"))


def test_switches_of_one_engine(readers: Any) -> None:
    """Thresholds do not outlive their switch, and a plan assumes the share that stays active."""
    known, found = readers("llama"), []
    with Engine(known.directory, policy=Policy(3, 2)) as engine:
        for lossy in (Lossy(sparsify=SHARE), Lossy(), Lossy(sparsify=0.5), Lossy(sparsify=SHARE, flash="oracle")):
            engine.use(lossy)
            found.append([r.token_ids for r in engine.generate(known.rows, GREEDY)])
        engine.use(Lossy(sparsify=0.75, flash="oracle"))
        assert {block.reuse for block in engine.facts.blocks} == {(0.25,)}
        engine.use(Lossy())
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
    assert found[1] == known.expected
    assert found[0] == found[3]
    assert found[0] not in (found[1], found[2])


def test_encoded_weights(readers: Any, tmp_path: Path) -> None:
    """Tokens of encoded weights do not depend on memory and batches; `calibrate` fits weights, too."""
    known = readers("llama")
    found = [run(known, policy, Lossy(weights="int8", sparsify=SHARE, flash="oracle"))[0] for policy in ON_DEMAND]
    assert found[1:] == found[:-1]
    plain, fitted = (run(known, PLAIN[0], Lossy(weights="int4", sparsify=SHARE, calibrate=name))
                     for name in (None, "bundled"))  # fmt: skip
    assert plain[1] == fitted[1]
    assert plain[0] != fitted[0]


def test_predictors_of_another_text_of_the_same_name(readers: Any, tmp_path: Path) -> None:
    """They are refused: other thresholds make other neurons active."""
    known, text = readers("llama"), tmp_path / "text.txt"
    lossy = Lossy(sparsify=SHARE, calibrate=str(text))
    content = Path(__file__).read_text()

    def train() -> None:
        with Engine(known.directory, lossy=lossy, prefix_sharing=False) as engine:
            predictors(engine, cut("a text", content, engine.tokenizer, 256, 40 * 128), Settings(0.3, rank=8))

    text.write_text(content)
    train()
    used = replace(lossy, flash="predictors")
    run(known, ON_DEMAND[0], used)
    text.write_text("".join(f"{number} is a number. " for number in range(4000)))
    with pytest.raises(InvalidInput, match=r"trained with thresholds of another text than .*text\.txt has now"):
        run(known, ON_DEMAND[0], used)
    train()
    run(known, ON_DEMAND[0], used)


def test_importances_are_not_measured_for_thresholds(
    readers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`calibrate` names the text of the thresholds, if no weights are fitted."""
    known, prompts, text = readers("llama"), tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n')
    text.write_text(Path(__file__).read_text())
    monkeypatch.delattr(calibration.Calibration, "measure")
    for weights in (None, "int8"):
        with Engine(known.directory, lossy=Lossy(weights, sparsify=SHARE, calibrate=str(text))) as engine:
            engine.run_job(prompts, tmp_path / f"{weights}.jsonl", GREEDY)
        assert (tmp_path / f"{weights}.jsonl").read_text().count('"error": null') == 1


def test_a_job_continues_with_the_same_thresholds_only(readers: Any, tmp_path: Path) -> None:
    known = readers("llama")
    prompts, output, text = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl", tmp_path / "text.txt"
    prompts.write_text("".join(f'{{"prompt_token_ids": {p}}}\n' for p in known.prompts))
    text.write_text(Path(__file__).read_text())

    def job(lossy: Lossy) -> None:
        with Engine(known.directory, lossy=lossy) as engine:
            engine.run_job(prompts, output, GREEDY)

    job(Lossy(sparsify=SHARE))
    with hooked(known.model, run(known, PLAIN[0], Lossy(sparsify=SHARE))[1]):
        expected = reference(known.model, known.prompts)
    assert [json.loads(line)["token_ids"] for line in output.read_text().splitlines()] == expected
    for lossy, now in ((Lossy(), "not given"), (Lossy(sparsify=0.8), r"0\.8 with thresholds of \w+"),
                       (Lossy(sparsify=SHARE, calibrate=str(text)), r"0\.7 with thresholds of \w+")):  # fmt: skip
        with pytest.raises(InvalidInput, match=rf"sparsify: was 0\.7 with thresholds of \w+, now {now}"):
            job(lossy)
    job(Lossy(sparsify=SHARE))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("opt", "activations of .* are exactly 0 already for many neurons: its activation function is ReLU; leave"),
        ("mixtral", "4 of 4 layers of .* have no feed-forward block that it knows .*mixtures of experts"),
        ("qwen3-moe", "3 of 4 layers of .* have no feed-forward block"),
        ("phi3", "4 of 4 layers of .* fused first matrix"),
        ("gpt2", "4 of 4 layers"),
    ],
)
@pytest.mark.parametrize("flash", [None, "oracle"])
def test_models_that_cannot_be_sparsified(families: Any, family: str, words: str, flash: str | None) -> None:
    with pytest.raises(InvalidInput, match=rf"sparsify is 0\.7, but {words}"):
        Engine(families(family).directory, lossy=Lossy(sparsify=SHARE, flash=flash))


def test_refusals(families: Any, readers: Any, tmp_path: Path) -> None:
    for share in (0, 1.0, -0.5, 1.5, True, "0.7", float("nan")):
        with pytest.raises(InvalidInput, match=r"sparsify is .*; it must be a share above 0 and below 1"):
            Lossy(sparsify=share)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no tokenizer"):
        Engine(families("llama").directory, lossy=Lossy(sparsify=SHARE))
    with pytest.raises(InvalidInput, match=r"nowhere.txt, to calibrate with, cannot be read"):
        Engine(readers("llama").directory, lossy=Lossy(sparsify=SHARE, calibrate=str(tmp_path / "nowhere.txt")))
    with pytest.raises(InvalidInput, match=r"set sparsify, such as 0\.7, which is lossy, use a model with ReLU"):
        Engine(readers("llama").directory, lossy=Lossy(flash="oracle"))
    with pytest.raises(InvalidInput, match=r"sparsify is 0\.7 with stages, of which none has all layers"):
        open_model(str(readers("llama").directory), None, "cpu", layers=(1, 3), lossy=Lossy(sparsify=SHARE))
    with pytest.raises(InvalidInput, match="flash is 'predictors' with weights int2"):
        Lossy(sparsify=SHARE, flash="predictors", weights="int2")


def test_thresholds_belong_to_the_files_of_a_model(readers: Any, tmp_path: Path) -> None:
    """A copy with other weights has others."""
    known = readers("llama")
    copy = tmp_path / "copy"
    shutil.copytree(known.directory, copy)
    weights = next(copy.glob("*.safetensors"))
    tensors = {name: t * 2 if "gate_proj" in name else t for name, t in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    found = []
    for directory in (known.directory, copy):
        with Engine(directory, lossy=Lossy(sparsify=SHARE)) as engine:
            found.append(engine.calibrator.thresholds[0])
    assert found[1] > 1.5 * found[0]
