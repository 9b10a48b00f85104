"""Jobs and quality with calibrated weights."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from flexengine import Engine, Lossy, SamplingParams, texts
from flexengine.engine.rates import RateStore
from flexengine.errors import InvalidInput
from flexengine.guests import calibration
from flexengine.guests.calibration import Calibration
from flexengine.lossy import BUNDLED
from flexengine.model.encoding import ImportanceRecorder
from flexengine.shell.commands import quality
from flexengine.shell.commands.messages import DONE, REFUSED
from flexengine.shell.commands.quality_choices import LossyCost
from flexengine.shell.commands.run import main
from tests.helpers.families import prompts_of
from tests.helpers.tokenizers import byte_tokenizer

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
    words = [*job.words, "--output", str(job.out), "--calibration-text"]
    assert main([*words, str(one), "--limit", "1"]) == DONE
    encoded = len(list((own_cache / "prepared").glob("*/prepared.json")))
    assert main([*words, str(same)]) == DONE
    assert len(list((own_cache / "prepared").glob("*/prepared.json"))) == encoded == 2
    assert main([*words, str(other)]) == REFUSED
    assert main([*job.words, "--output", str(job.tmp / "other.jsonl"), "--calibration-text", str(other)]) == DONE
    assert len(list((own_cache / "prepared").glob("*/prepared.json"))) == 4
    assert main([*job.words, "--calibration-text", str(one), "--output", str(one)]) == REFUSED
    assert "--calibration-text and --output are one file" in capsys.readouterr().err


def test_a_lost_calibration_that_comes_out_otherwise(
    job: Any, own_cache: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*job.words, "--output", str(job.out), "--calibrate"]
    assert main([*words, "--limit", "1"]) == DONE
    shutil.rmtree(own_cache / "prepared")
    assert main([*words, "--limit", "2"]) == DONE
    shutil.rmtree(own_cache / "prepared")
    real = ImportanceRecorder.means
    monkeypatch.setattr(ImportanceRecorder, "means", lambda self: {n: m * 2 for n, m in real(self).items()})
    assert main(words) == REFUSED
    assert "give --restart (restart=True in Python) to run the job again" in capsys.readouterr().err


def test_refusals_of_the_command(job: Any, capsys: Any) -> None:
    words = job.words[:-2]
    assert main([*words, "--calibrate"]) == REFUSED
    assert "no weights are encoded" in capsys.readouterr().err
    assert main([*words, "--quality", "small", "--calibrate"]) == REFUSED
    assert main([*job.words, "--calibration-text", str(job.tmp / "none")]) == REFUSED
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err
    little = job.tmp / "little.txt"
    little.write_text("x" * 100)
    assert main([*job.words, "--output", str(job.out), "--calibration-text", str(little)]) == REFUSED
    assert "has 100 tokens" in capsys.readouterr().err


def test_the_text_is_read_when_it_is_needed(
    job: Any, own_cache: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with known rates does not read the text, but a missing text is still refused."""
    for path in (job.tmp / "none", job.tmp):
        assert main([*job.words, "--dry-run", "--calibration-text", str(path)]) == REFUSED
        assert "to calibrate with, cannot be read as UTF-8 text" in capsys.readouterr().err
    text = job.tmp / "text.txt"
    text.write_text(texts.text("alice"))
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "read", lambda name: pytest.fail(f"{name} was read"))
        patch.setattr(RateStore, "measure_quickly", lambda *_: False)
        assert main([*job.words, "--dry-run", "--calibration-text", str(text)]) == DONE
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


def test_it_streams_as_any_job(reader: Any, own_cache: Path, capsys: Any) -> None:
    """The exact model has room for a third of its weights; the encoded one is run with the layout it is given."""
    directory = reader("llama")
    lossy = Lossy(weights="int4", calibrate=BUNDLED)
    rows, few = [{"prompt_token_ids": p} for p in prompts_of(601)], SamplingParams(max_tokens=8)
    with Engine(directory, device="sim", device_mem="600K", host_mem="5M", lossy=lossy) as engine:
        tight = [r.token_ids for r in engine.generate(rows, few)]
        assert engine.calibrator.importances is not None
        digest = engine.calibrator.importances.digest
    with Engine(directory, device="sim", lossy=lossy) as engine:
        assert engine.calibrator.importances is not None
        assert engine.calibrator.importances.digest == digest
        assert [r.token_ids for r in engine.generate(rows, few)] == tight


# Quality.


def test_quality_measures_both() -> None:
    found = quality.asked({"weights": ["int8", "int4"], "cache": ["int4"]}, calibrate="a.txt")
    assert found == [Lossy(weights="int8"), Lossy(weights="int4"), Lossy(weights="int4", calibrate="a.txt"),
                     Lossy(cache="int4")]  # fmt: skip
    with pytest.raises(InvalidInput, match="no choice has any; give --weights with one of int4, int3, int2, or"):
        quality.asked({"cache": ["int4"]}, calibrate=BUNDLED)
    costs = [LossyCost(x, more=m) for x, m in ((Lossy(), 0), (Lossy(weights="int4", calibrate=BUNDLED), 1))]
    assert quality.hint(costs, None).endswith("INPUT --weights int4 --calibrate")
    costs[1] = LossyCost(Lossy(weights="int4", calibrate="a b.txt"), more=1)
    assert quality.hint(costs, None).endswith("INPUT --weights int4 --calibration-text 'a b.txt'")


def test_quality_is_judged_on_another_text(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text(texts.text("alice"))
    assert quality.main(["--weights", "int4", "--text", str(text), "--calibration-text", str(text)]) == 2
    assert "looks better than it is" in capsys.readouterr().err
    assert quality.main(["--weights", "int4", "--calibration-text", str(tmp_path)]) == 2
    assert quality.main(["--weights", "int4", "--calibration-text", str(text), "--save", str(text)]) == 2


def test_calibrated_weights_cost_less(tmp_path: Path) -> None:
    """A model with a few large input columns, as real models have, on text that it generated."""
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
