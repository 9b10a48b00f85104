"""Calibration: what is recorded is what hooks on transformers' own model see, and weights are encoded by it."""

import errno
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from flexengine import Engine, Lossy, Policy, texts
from flexengine.codec.named import WEIGHTS
from flexengine.codec.packed import Packed
from flexengine.commands import quality
from flexengine.commands.exit_codes import DONE, REFUSED
from flexengine.commands.run import main
from flexengine.engine import calibration
from flexengine.engine.calibration import ROWS, Calibration
from flexengine.engine.planner import Planner
from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED, FITTED
from flexengine.model import encoding
from flexengine.model.importance import FINE, PRIOR, Importances, Recorder, exact_parts
from tests.commands.test_quality import byte_tokenizer
from tests.helpers.families import prompts_of

TOKENS = 48
SPREAD = Policy(gpu_batch_size=2, num_gpu_batches=3, weights=(0.4, 0.3, 0.3), cache=(0.4, 0.3, 0.3), prefill_tokens=64)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", TOKENS)


@pytest.fixture(scope="module")
def reader(families: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copies of families that have a tokenizer."""

    def made(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name) / name
        shutil.copytree(families(name).directory, directory)
        byte_tokenizer(directory)
        return directory

    return made


# What is recorded.


def squares(model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """By hooks: sums of squares of each linear layer's input columns, by parameter, and how many tokens there were."""
    found: dict[str, Any] = {}

    def note(name: str, x: torch.Tensor) -> None:
        x = x.double().reshape(-1, x.shape[-1])
        sums, tokens = found.get(name, (0, 0))
        found[name] = (sums + (x**2).sum(0), tokens + len(x))

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=f"{name}.weight": note(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return found


def recorded(directory: Path, rows: list[list[int]], policy: Policy | None = None) -> dict[str, torch.Tensor]:
    with Engine(directory, policy=policy, device="sim") as engine:
        read = Calibration(tuple((*row, 5) for row in rows))  # the last token is only predicted
        return read.measure(engine.core.skeleton, engine.score)


@pytest.mark.parametrize("family", ["opt", "llama-tied", "gpt2", "phi3"])
def test_importances_are_mean_squares_of_inputs(families: Any, family: str) -> None:
    known, rows = families(family), prompts_of(601)
    with Engine(known.directory, device="sim") as engine:
        skeleton = engine.core.skeleton
        wanted = {n for n in encoding.forms(skeleton, "int4") if any(n in s for s in skeleton.layers)}
    expected = squares(known.model, rows)
    for policy in (None, SPREAD):
        found = recorded(known.directory, rows, policy)
        assert set(found) >= wanted
        for name, columns in found.items():
            sums, tokens = expected[name]
            assert tokens == sum(map(len, rows))
            means = (sums + PRIOR * sums.mean() / tokens) / (tokens + PRIOR)
            assert torch.allclose(columns.double(), means, rtol=1e-4, atol=0), name


def test_sums_do_not_depend_on_the_order_of_tokens() -> None:
    """Added up in any order, in batches of any size, they are the exact sum, whatever the magnitudes."""
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-5, 4, (64,), generator=generator)
    x = torch.randn(8192, 64, generator=generator) * scales
    found = []
    for size in (1000, 1000, 256, 7):
        order = torch.randperm(len(x), generator=generator)
        sums = torch.zeros(2, 64, dtype=torch.float64)
        for rows in torch.split(x[order], size):
            sums += torch.stack([part.sum(0) for part in exact_parts(rows.double().square())])
        found.append(sums.sum(0))
    assert all(torch.equal(found[0], other) for other in found)
    for column, total in zip(x.T.double().tolist(), found[0].tolist(), strict=True):
        exact = math.fsum(value * value for value in column)  # squares of fp32 numbers are exact in fp64
        assert abs(total - exact) <= 8192 * FINE / 2 + 2**-52 * exact


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_importances_of_experts(families: Any, family: str) -> None:
    """Each expert's are those of the tokens that the router sends it; one that gets none has none."""
    known, rows = families(family), prompts_of(601, (1,))
    seen: dict[str, torch.Tensor] = {}
    layers = known.model.model.layers
    for j, layer in enumerate(layers):

        def note(_: Any, args: Any, kwargs: Any, j: int = j) -> None:
            hidden, chosen = args[0].double().reshape(-1, 64), args[1]
            for expert in range(4):
                picked = hidden[(chosen == expert).any(-1)]
                seen[f"{j} {expert}"] = torch.cat([seen.get(f"{j} {expert}", picked[:0]), picked])

        layer.mlp.experts.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for row in rows:
            known.model(torch.tensor([row]))
    for layer in layers:
        layer.mlp.experts._forward_pre_hooks.clear()
    found = recorded(known.directory, rows)
    empty = 0
    for j in range(len(layers)):
        gates = found[f"model.layers.{j}.mlp.experts.gate_up_proj"]
        for expert, columns in enumerate(gates):
            x = seen[f"{j} {expert}"]
            sums = (x**2).sum(0)
            means = (sums + PRIOR * sums.mean() / max(1, len(x))) / (len(x) + PRIOR)
            assert torch.allclose(columns.double(), means, rtol=1e-4, atol=0)
            empty += not len(x)
            assert bool(columns.any()) == bool(len(x))
    assert empty


def test_nothing_is_left_behind(families: Any) -> None:
    with Engine(families("mixtral").directory, device="sim") as engine:
        before = {id(m): dict(m.__dict__) for m in engine.core.skeleton.model.modules()}
        with pytest.raises(KeyboardInterrupt), Recorder(engine.core.skeleton).watching():
            raise KeyboardInterrupt
        for module in engine.core.skeleton.model.modules():
            assert module.__dict__ == before[id(module)]
            assert not module._forward_pre_hooks


# What is made of it.


def test_an_expert_without_tokens_is_encoded_as_without_calibration() -> None:
    columns = {"experts": torch.stack([torch.zeros(64), torch.rand(64)]), "one": torch.rand(64)}
    kept = Importances(columns, "")
    assert kept.of("experts", 0) is None
    assert torch.equal(kept.of("experts", 1), columns["experts"][1])  # type: ignore[arg-type]
    assert torch.equal(kept.of("one", 0), columns["one"])  # type: ignore[arg-type]
    assert kept.of("other", 0) is None


def decoded(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoded matrices of the layers, as products see them."""
    for name, form in engine.core.opened.forms.items():
        if not any(name in layer for layer in engine.core.skeleton.layers):
            continue
        data = encoding._read(engine.core.opened.origins[name], 0, form.nbytes).view(max(1, form.count), -1)
        yield name, torch.stack([form.packed.decode(one) for one in data])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("codec", FITTED)
def test_weighted_errors_are_less(reader: Any, families: Any, family: str, codec: str) -> None:
    """Summed over all matrices, though a random model gives its columns inputs that hardly differ."""
    directory, made = reader(family), {}
    for calibrate in (None, BUNDLED):
        with Engine(directory, device="sim", lossy=Lossy(weights=codec, calibrate=calibrate)) as engine:
            engine.prepare()
            made[calibrate] = dict(decoded(engine))
            importances = engine.calibrator.importances
            forms = engine.core.opened.forms
    assert importances is not None
    exact = dict(families(family).model.named_parameters())
    errors = dict.fromkeys(made, 0.0)
    for calibrate, matrices in made.items():
        for name, matrix in matrices.items():
            own = exact[name].detach().reshape(len(matrix), *exact[name].shape[-2:])
            weights = importances.columns[name].view(len(matrix), 1, -1)
            own = own.transpose(1, 2) if forms[name].transposed else own
            errors[calibrate] += float(((matrix - own) ** 2 * weights).sum() / ((own**2) * weights).sum())
    assert errors[BUNDLED] < 0.99 * errors[None]


def test_the_fit_is_by_its_own_columns(reader: Any, families: Any) -> None:
    directory = reader("opt")
    with Engine(directory, device="sim", lossy=Lossy(weights="int4", calibrate=BUNDLED)) as engine:
        found = dict(decoded(engine))
        assert engine.calibrator.importances is not None
        columns = engine.calibrator.importances.columns
    for name, parameter in families("opt").model.named_parameters():
        if name in found:
            form = Packed(WEIGHTS["int4"], *parameter.shape)
            assert torch.equal(found[name][0], form.decode(form.encode(parameter.detach(), columns[name])))


# The text.


def test_stretches() -> None:
    made = calibration.calibration(BUNDLED, byte_tokenizer(), 512)
    assert {len(row) for row in made.rows} == {TOKENS}
    assert all(row[0] == 0 and 0 not in row[1:] for row in made.rows)
    read = byte_tokenizer().decode(made.rows[ROWS // 2][1:])
    assert read in texts.calibration()
    assert read not in texts.sample()
    assert {len(row) for row in calibration.calibration(BUNDLED, byte_tokenizer(), 20).rows} == {20}


def test_texts_that_are_refused(tmp_path: Path) -> None:
    little, latin = tmp_path / "little.txt", tmp_path / "latin.txt"
    little.write_text("x" * 100)
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInput, match=r"little.txt has 100 tokens; calibrating takes 1,504; give a longer text"):
        calibration.calibration(str(little), byte_tokenizer(), None)
    for path in (latin, tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidInput, match="cannot be read as UTF-8 text"):
            calibration.calibration(str(path), byte_tokenizer(), None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="is a pipe or a device"):
        calibration.check(str(tmp_path / "pipe"), byte_tokenizer())
    with pytest.raises(InvalidInput, match="no tokenizer"):
        calibration.calibration(BUNDLED, None, None)


@pytest.mark.parametrize("lossy", [dict(), dict(cache="int4"), dict(weights="int8"), dict(compute="int8")])
def test_what_has_no_use_for_it_is_refused(lossy: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"let weights be one of int4, int3, int2, or leave it out"):
        Lossy(**lossy, calibrate=BUNDLED)
    with pytest.raises(InvalidInput, match="it must be the name of a text file"):
        Lossy(weights="int4", calibrate="")


def test_what_can_be_fitted() -> None:
    assert set(FITTED) == {name for name, codec in WEIGHTS.items() if codec.fitted}


# Jobs.


@pytest.fixture
def job(reader: Any, tmp_path: Path) -> Any:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8, 9]}\n' * 2)
    words = [str(source), "--model", str(reader("opt")), "--max-tokens", "4", "--device", "sim", "--weights", "int4"]
    return SimpleNamespace(words=words, out=tmp_path / "out.jsonl", tmp=tmp_path)


def test_a_job_goes_on_with_the_same_weights(job: Any, own_cache: Path, capsys: Any) -> None:
    assert main([*job.words, "--calibrate", "--output", str(job.tmp / "whole.jsonl")]) == DONE
    assert "calibrating, once for this model and text" in capsys.readouterr().err
    words = [*job.words, "--output", str(job.out)]
    assert main([*words, "--calibrate", "--limit", "1"]) == DONE
    assert "calibrating" not in capsys.readouterr().err
    assert main(words) == REFUSED
    assert "calibrate: was" in capsys.readouterr().err
    assert main([*words, "--calibrate"]) == DONE
    assert "1 of 4 rows were done before" in capsys.readouterr().err
    assert job.out.read_text() == (job.tmp / "whole.jsonl").read_text()


def test_the_same_text_under_another_name(job: Any, own_cache: Path, capsys: Any) -> None:
    one, same, other = (job.tmp / name for name in ("one.txt", "same.txt", "other.txt"))
    for path, text in ((one, "alice"), (same, "alice"), (other, "lincoln_1862")):
        path.write_text(texts.text(text))
    words = [*job.words, "--output", str(job.out), "--calibrate"]
    assert main([*words, str(one), "--limit", "1"]) == DONE
    encoded = len(list((own_cache / "prepared").glob("*/prepared.json")))
    assert main([*words, str(same)]) == DONE
    assert len(list((own_cache / "prepared").glob("*/prepared.json"))) == encoded == 2
    assert main([*words, str(other)]) == REFUSED
    assert main([*job.words, "--output", str(job.tmp / "other.jsonl"), "--calibrate", str(other)]) == DONE
    assert len(list((own_cache / "prepared").glob("*/prepared.json"))) == 4
    assert main([*job.words, "--calibrate", str(one), "--output", str(one)]) == REFUSED
    assert "--calibrate and --output are one file" in capsys.readouterr().err


def test_a_lost_calibration_that_comes_out_otherwise(
    job: Any, own_cache: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*job.words, "--output", str(job.out), "--calibrate"]
    assert main([*words, "--limit", "1"]) == DONE
    shutil.rmtree(own_cache / "prepared")
    assert main([*words, "--limit", "2"]) == DONE
    shutil.rmtree(own_cache / "prepared")
    real = Recorder.means
    monkeypatch.setattr(Recorder, "means", lambda self: {n: m * 2 for n, m in real(self).items()})
    assert main(words) == REFUSED
    assert "--restart to run it again" in capsys.readouterr().err


def test_refusals_of_the_command(job: Any, capsys: Any) -> None:
    words = job.words[:-2]
    assert main([*words, "--calibrate"]) == REFUSED
    assert "none are encoded" in capsys.readouterr().err
    assert main([*words, "--quality", "small", "--calibrate"]) == REFUSED
    assert main([*job.words, "--calibrate", str(job.tmp / "none")]) == REFUSED
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err
    little = job.tmp / "little.txt"
    little.write_text("x" * 100)
    assert main([*job.words, "--output", str(job.out), "--calibrate", str(little)]) == REFUSED
    assert "has 100 tokens" in capsys.readouterr().err


def test_the_text_is_read_when_it_is_needed(
    job: Any, own_cache: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with known rates needs none, but one that is not there is refused all the same."""
    for path in (job.tmp / "none", job.tmp):
        assert main([*job.words, "--dry-run", "--calibrate", str(path)]) == REFUSED
        assert "to calibrate with, cannot be read as UTF-8 text" in capsys.readouterr().err
    text = job.tmp / "text.txt"
    text.write_text(texts.text("alice"))
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "read", lambda name: pytest.fail(f"{name} was read"))
        patch.setattr(Planner, "hardware", Planner.known)
        assert main([*job.words, "--dry-run", "--calibrate", str(text)]) == DONE
    with Engine(job.words[2], device="sim", lossy=Lossy("int4", calibrate=str(text))) as engine:
        text.unlink()
        with pytest.raises(InvalidInput, match=r"text\.txt, to calibrate with, cannot be read"):
            engine.generate([{"prompt_token_ids": [5, 6]}])


def test_a_disk_that_fails_while_calibrating_is_not_the_cache(
    reader: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Engine(reader("opt"), device="sim", lossy=Lossy("int4", calibrate=BUNDLED)) as engine:
        monkeypatch.setattr(Calibration, "measure", fail)
        with pytest.raises(InvalidInput, match=r"^calibrating with .*opt failed: .*Input/output error$"):
            engine.prepare()


@pytest.mark.slow
def test_it_streams_as_any_job(reader: Any, own_cache: Path, capsys: Any) -> None:
    """The exact model has room for a third of its weights; the encoded one is run with the layout it is given."""
    directory = reader("llama")
    lossy = Lossy(weights="int4", calibrate=BUNDLED)
    rows = [{"prompt_token_ids": p} for p in prompts_of(601)]
    with Engine(directory, device="sim", device_mem="600K", host_mem="5M", lossy=lossy) as engine:
        tight = [r.token_ids for r in engine.generate(rows)]
        assert engine.calibrator.importances is not None
        digest = engine.calibrator.importances.digest
    with Engine(directory, device="sim", lossy=lossy) as engine:
        assert engine.calibrator.importances is not None
        assert engine.calibrator.importances.digest == digest
        assert [r.token_ids for r in engine.generate(rows)] == tight


# Quality.


def test_quality_measures_both() -> None:
    found = quality.asked({"weights": ["int8", "int4"], "cache": ["int4"]}, calibrate="a.txt")
    assert found == [Lossy(weights="int8"), Lossy(weights="int4"), Lossy(weights="int4", calibrate="a.txt"),
                     Lossy(cache="int4")]  # fmt: skip
    with pytest.raises(InvalidInput, match="no choice has any; give --weights with one of int4, int3, int2, too"):
        quality.asked({"cache": ["int4"]}, calibrate=BUNDLED)
    costs = [quality.Cost(x, more=m) for x, m in ((Lossy(), 0), (Lossy(weights="int4", calibrate=BUNDLED), 1))]
    assert quality.hint(costs, None).endswith("INPUT --weights int4 --calibrate")
    costs[1] = quality.Cost(Lossy(weights="int4", calibrate="a b.txt"), more=1)
    assert quality.hint(costs, None).endswith("INPUT --weights int4 --calibrate 'a b.txt'")


def test_quality_is_judged_on_another_text(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text(texts.text("alice"))
    assert quality.main(["--weights", "int4", "--text", str(text), "--calibrate", str(text)]) == 2
    assert "too good on it" in capsys.readouterr().err
    assert quality.main(["--weights", "int4", "--calibrate", str(tmp_path)]) == 2
    assert quality.main(["--weights", "int4", "--calibrate", str(text), "--json", str(text)]) == 2


def test_calibrated_weights_cost_less(tmp_path: Path) -> None:
    """A model with a few large input columns, as real ones have, says text of its own."""
    tokenizer = byte_tokenizer(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=128, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::16] *= 8
    model.save_pretrained(tmp_path)
    rows = torch.randint(3, len(tokenizer), (8, 40), generator=torch.Generator().manual_seed(1)).tolist()

    def scored(lossy: Lossy) -> quality.Scored:
        with Engine(tmp_path, device="cpu", lossy=lossy) as engine:
            return quality.score(engine, rows, 8)

    exact = scored(Lossy())

    def apart(lossy: Lossy) -> float:
        found = scored(lossy).logprobs
        return sum((a - b) ** 2 for r, s in zip(exact.logprobs, found, strict=True) for a, b in zip(r, s, strict=True))

    assert apart(Lossy(weights="int3", calibrate=BUNDLED)) < 0.8 * apart(Lossy(weights="int3"))
