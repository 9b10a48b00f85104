"""Lossy switches compute what their documentation says, for every placement, and encoded weights survive
interruptions."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine import lossy as lossy_module
from flexengine.codec import cache, forms
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.lossy import QUALITY, choices
from flexengine.model import encoding
from tests.helpers.families import NEW, make_checkpoint, reference
from tests.helpers.listening import Heard
from tests.helpers.rounded import rounded

D, MIX = (1, 0, 0), (0.4, 0.3, 0.3)
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SPREAD = Policy(gpu_batch_size=2, num_gpu_batches=4, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=64)
WHOLE = Policy(gpu_batch_size=8, num_gpu_batches=1, prefill_tokens=64)


def answers(directory: Path, rows: Any, lossy: Lossy, policy: Policy = WHOLE, device: str = "sim") -> list[list[int]]:
    with Engine(directory, policy=policy, device=device, lossy=lossy) as engine:
        results = engine.generate(rows, GREEDY)
        assert [r.error for r in results] == [None] * len(results)
        for tier in ("device", "host", "disk"):
            booked = engine.layout.account[tier] if engine.layout else {}
            assert engine.core.machine.tier(tier).ledger.peak == sum(booked.values())
        return [r.token_ids for r in results]


ENCODED = [*((family, "int4") for family in ("opt", "llama-tied", "qwen3", "gpt2", "mixtral", "gpt-oss")),
           *(("llama-tied", codec) for codec in ("int8", "int3", "int2"))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "codec"), ENCODED)
def test_encoded_weights(families: Any, family: str, codec: str) -> None:
    """The tokens of transformers with the same rounded weights, from any tier."""
    known = families(family)
    expected = reference(rounded(known.directory, codec), known.prompts)
    for policy in (WHOLE, SPREAD):
        assert answers(known.directory, known.rows, Lossy(weights=codec), policy) == expected


@pytest.mark.slow
def test_a_format_that_a_line_registers(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel of its own. The tokens of transformers with the same rounded weights, from any tier."""
    monkeypatch.setitem(forms.FORMS, "thirds", "tests.helpers.forms:Thirds")
    monkeypatch.setattr(lossy_module, "WEIGHTS", (*lossy_module.WEIGHTS, "thirds"))
    known = families("llama-tied")
    expected = reference(rounded(known.directory, "thirds"), known.prompts)
    for policy in (WHOLE, SPREAD):
        assert answers(known.directory, known.rows, Lossy(weights="thirds"), policy) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lossy"), [
    *((family, Lossy(weights=weights, compute=compute))
      for family in ("llama-tied", "mixtral") for weights, compute in ((None, "int8"), ("int4", "int8"))),
    *((family, Lossy(compute="bf16")) for family in ("opt", "llama-tied", "mixtral")),
    *((family, Lossy(weights="int4", compute="bf16")) for family in ("llama-tied", "gpt2", "gpt-oss")),
])  # fmt: skip
def test_rounded_products(families: Any, family: str, lossy: Lossy) -> None:
    """Placement and batches change nothing, and the logits stay near those of the rounded weights."""
    known = families(family)
    found = answers(known.directory, known.rows, lossy)
    for policy in (SPREAD, Policy(gpu_batch_size=3, num_gpu_batches=2, weights=(0, 0, 1), prefill_tokens=64)):
        assert answers(known.directory, known.rows, lossy, policy) == found
    exact = scores(known, Lossy(weights=lossy.coded))
    assert abs(scores(known, lossy) - exact) < 0.02 * abs(exact)


def test_weights_multiplied_in_bf16_are_kept_in_it(families: Any, tmp_path: Path) -> None:
    """Weights take half the bytes of fp32, except vectors; the switch is refused if another dtype computes."""
    known = families("llama-tied")
    sizes = []
    for lossy in (Lossy(), Lossy(compute="bf16")):
        with Engine(known.directory, policy=WHOLE, device="sim", lossy=lossy) as engine:
            sizes.append(sum(t.held_bytes for layer in engine.facts.layers for t in layer if t.matrix))
    assert sizes[1] * 2 == sizes[0]
    for lossy in (Lossy(compute="bf16"), Lossy(cache="bf16")):
        with pytest.raises(InvalidInput, match="CPUs that compute in fp32"):
            Engine(known.directory, device="sim", dtype="bfloat16", lossy=lossy)
    heard, allow = Heard(), ["bf16-compute", "int8-weights"]
    with Engine(known.directory, device="sim", dtype="bfloat16", allow=allow, progress=heard) as engine:
        engine.generate(known.rows[:2], GREEDY)
        assert engine.lossy.compute is None
        assert any("not considered: compute is 'bf16'" in line for line in heard.messages)


@pytest.mark.parametrize("family", ["gpt2", "gpt-oss"])
def test_transposed_matrices_are_not_multiplied_in_bf16_as_they_are(families: Any, family: str) -> None:
    with pytest.raises(InvalidInput, match=r"transposed matrices, such as .*weights int8"):
        Engine(families(family).directory, device="sim", lossy=Lossy(compute="bf16"))


def scores(known: Any, lossy: Lossy) -> float:
    """Mean log probability of random continuations."""
    rows = [(row["prompt_token_ids"], [5, 9, 17, 31]) for row in known.rows]
    with Engine(known.directory, policy=WHOLE, device="sim", lossy=lossy) as engine:
        found = [entry["logprob"] for r in engine.score(*zip(*rows, strict=True)) for entry in r.logprobs or []]
    assert len(found) == 4 * len(rows)
    return sum(found) / len(found)


CACHED = [*((family, Lossy(cache="int4", sparse_attention=0.5))
            for family in ("opt", "llama", "mistral", "gemma2", "gpt-oss")),
          *(("llama", lossy) for lossy in (Lossy(cache="int8"), Lossy(cache="int4"), Lossy(sparse_attention=0.5))),
          *((family, Lossy(cache="bf16")) for family in ("opt", "llama", "gemma2")),
          ("llama", Lossy(cache="bf16", sparse_attention=0.5, compute="bf16"))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lossy"), CACHED)
def test_encoded_cache(families: Any, family: str, lossy: Lossy) -> None:
    """Tier, pages and batches of the cache do not change results; 8 bits and bf16 are close to the exact model."""
    known = families(family)
    found = answers(known.directory, known.rows, lossy)
    for policy in (SPREAD, Policy(gpu_batch_size=3, num_gpu_batches=3, cache=(0, 0.5, 0.5), prefill_tokens=64)):
        assert answers(known.directory, known.rows, lossy, policy) == found
    if lossy in (Lossy(cache="int8"), Lossy(cache="bf16")):
        exact = scores(known, Lossy())
        assert abs(scores(known, lossy) - exact) < 0.02 * abs(exact)


def test_a_cache_in_bf16_takes_half(families: Any) -> None:
    known = families("llama")
    with (
        Engine(known.directory, policy=WHOLE, device="sim") as exact,
        Engine(known.directory, policy=WHOLE, device="sim", lossy=Lossy(cache="bf16")) as half,
    ):
        for engine in (exact, half):
            engine.generate(known.rows, GREEDY)
        sizes = [engine.layout.account["device"]["KV cache"] for engine in (exact, half) if engine.layout]
        assert sizes[0] == 2 * sizes[1]


def test_scores_are_those_of_transformers(families: Any) -> None:
    known = families("llama")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(known.directory, dtype=torch.float32).eval()
    prompt, rest = known.rows[3]["prompt_token_ids"], [7, 300, 12, 12, 599]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1].double()
    expected = logits.log_softmax(-1)[range(len(rest)), rest].tolist()
    with Engine(known.directory, policy=WHOLE, device="cpu") as engine:
        (found,) = engine.score([prompt], [rest])
        assert found.token_ids == rest
        assert [e["logprob"] for e in found.logprobs or []] == pytest.approx(expected, abs=1e-4)
        best = [e["top_logprobs"][0]["token_id"] for e in found.logprobs or []]
        assert best == logits.argmax(-1).tolist()
        bad = [([], [1]), ([1], []), ([1], [601]), ([1] * 250, [1] * 20)]
        for result, (context, continuation) in zip(engine.score(*zip(*bad, strict=True)), bad, strict=True):
            assert result.token_ids == []
            long = "context and continuation have 250 + 20 tokens; the model's context is 256"
            says = {0: "the context is empty", 250: long}.get(len(context), "continuation is []")
            says = "continuation holds 601" if continuation == [601] else says
            assert str(result.error).startswith(f"prompt {result.index}: {says}")


class TestEncoding:
    """Weights are encoded once, and survive interruptions."""

    def test_sizes(self, families: Any) -> None:
        """A quarter and a bit: 4 bits, and two numbers of 16 bits for 64 of them."""
        known = families("opt", torch.float16)
        with Engine(known.directory, policy=WHOLE, lossy=Lossy(weights="int4")) as engine:
            for t in engine.facts.layers[0]:
                if t.matrix:
                    rows, columns = engine.core.skeleton.layers[0][t.name].shape
                    assert t.held_bytes == t.stored_bytes == -(-rows // 16) * 16 * -(-columns // 64) * (32 + 4)

    def test_what_was_finished_is_not_done_again(
        self, families: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = families("opt")
        real, made = encoding._encoded, []

        def noting(piece: Any, *args: Any) -> Any:
            made.append(piece.name)
            return real(piece, *args)

        def failing(piece: Any, *args: Any) -> Any:
            if len(made) == 5:
                raise KeyboardInterrupt
            return noting(piece, *args)

        monkeypatch.setattr(encoding, "_encoded", failing)
        lossy = Lossy(weights="int4")
        with Engine(known.directory, policy=WHOLE, lossy=lossy) as engine, pytest.raises(KeyboardInterrupt):
            engine.prepare()
        first = list(made)
        made.clear()
        monkeypatch.setattr(encoding, "_encoded", noting)
        with Engine(known.directory, policy=WHOLE, lossy=Lossy(weights="int4")) as engine:
            engine.prepare()
            assert set(first) | set(made) == set(engine.core.opened.forms)
        assert not set(first) & set(made)
        made.clear()
        with Engine(known.directory, policy=WHOLE, lossy=Lossy(weights="int4")) as engine:
            engine.prepare()
        assert not made

    def test_weights_that_are_not_finite(self, tmp_path: Path) -> None:
        model = make_checkpoint("opt", tmp_path / "model")
        with torch.no_grad():
            model.model.decoder.layers[1].fc1.weight[3, 4] = float("nan")
        model.save_pretrained(tmp_path / "model")
        lossy, wrong = Lossy(weights="int4"), pytest.raises(BadCheckpoint, match=r"layers\.1\.fc1\.weight")
        with Engine(tmp_path / "model", policy=WHOLE, lossy=lossy) as engine, wrong:
            engine.prepare()


class TestPlanner:
    """The planner chooses allowed switches if they save time, and a resumed job keeps its choice."""

    def machine(self) -> Any:
        """A device whose links are a thousand times slower than its products."""
        from flexengine.plan.rates import assumed
        from flexengine.tier.machine import Machine, make_machine

        machine: Machine = make_machine("sim", None, None, [Path("/tmp")], None)
        with contextlib.closing(machine):
            hardware = assumed("sim", machine.capacity)
        slow = dict.fromkeys(hardware.links, ((4096.0, 1000000.0),))
        return replace(hardware, links=slow, checkpoint_read=((4096.0, 1e6),), crosstalk={})

    def test_combinations(self) -> None:
        found = choices(["int4-weights", "int8-cache", "int8-weights"])
        assert found[0] == Lossy()
        assert set(found) == {Lossy(weights=w, cache=c) for w in (None, "int8", "int4") for c in (None, "int8")}
        assert set(choices(QUALITY["near"])) < set(choices(QUALITY["small"]))
        with pytest.raises(InvalidInput, match="'int5-weights' cannot be allowed; choose from int8-weights,"):
            choices(["int5-weights"])

    def test_it_chooses_what_has_to_cross_slow_links_in_few_bytes(self, families: Any) -> None:
        known = families("opt")
        options: dict[str, Any] = {"hardware": self.machine(), "allow": ["int8-weights", "int4-weights"]}
        with Engine(known.directory, device="sim", device_mem="1M", **options) as engine:
            found = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
            assert engine.lossy == Lossy(weights="int4")
            assert engine.summary.lossy == Lossy(weights="int4")
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == found
        assert answers(known.directory, known.rows, Lossy(weights="int4")) == found

    def test_it_stays_exact_where_nothing_is_gained(self, families: Any) -> None:
        known = families("opt")
        hardware = replace(self.machine(), checkpoint_read=((4096.0, 1e15),))
        with Engine(known.directory, device="sim", hardware=hardware, allow=["int8-weights", "int4-weights"]) as engine:
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
            assert engine.lossy == Lossy()

    def test_what_it_chose_is_kept_by_the_job(self, families: Any, tmp_path: Path, capsys: Any) -> None:
        from flexengine.shell.commands.messages import DONE, REFUSED
        from flexengine.shell.commands.run import main

        known = families("opt")
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text('{"prompt_token_ids": [5, 6, 7]}\n' * 3)
        base = [str(source), "--model", str(known.directory), "--max-tokens", "2", "--output", str(out)]
        assert main([*base, "--limit", "1", "--quality", "small"]) == DONE
        assert "chosen: " in capsys.readouterr().err
        assert main([*base, "--quality", "small"]) == DONE
        assert "1 of 3 rows were done before" in capsys.readouterr().err
        assert main([*base, "--quality", "near"]) == REFUSED
        assert main([*base, "--quality", "near", "--weights", "int4"]) == REFUSED
        assert "leave out one of them" in capsys.readouterr().err


class TestSwitches:
    @pytest.mark.parametrize("fields", [
        dict(weights="int5"), dict(compute="int4"), dict(cache="int3"), dict(sparse_attention=0),
        dict(sparse_attention=1.0), dict(sparse_attention=True), dict(sparse_attention=float("nan")),
    ])  # fmt: skip
    def test_what_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="it must be"):
            Lossy(**fields)

    def test_a_job_goes_on_with_its_own_switches_only(self, families: Any, tmp_path: Path, capsys: Any) -> None:
        from flexengine.shell.commands.messages import DONE, REFUSED
        from flexengine.shell.commands.run import main

        known = families("opt")
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
        base = [str(source), "--model", str(known.directory), "--max-tokens", "2"]
        assert main([*base, "--output", str(out), "--weights", "int4", "--cache", "int8"]) == DONE
        assert "flexengine quality shows" in capsys.readouterr().err
        assert main([*base, "--output", str(out), "--weights", "int4"]) == REFUSED
        said = capsys.readouterr().err
        assert "cache: was int8, now not given" in said
        assert said.count("cache: was") == 1
        assert main([*base, "--output", str(out), "--weights", "int4", "--cache", "int8"]) == DONE

    def test_a_job_does_not_go_on_in_other_groups(
        self, families: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flexengine.shell.commands.messages import DONE, REFUSED
        from flexengine.shell.commands.run import main

        base = job_of_two(families("opt"), tmp_path, "--cache", "int4")
        assert main([*base, "--limit", "1"]) == DONE
        with monkeypatch.context() as changed:
            changed.setattr(cache, "WIDEST", {4: 8})
            capsys.readouterr()
            assert main(base) == REFUSED
            assert 'cache: was "4 bits in groups of 16", now "4 bits in groups of 8"' in capsys.readouterr().err
        assert main(base) == DONE

    def test_groups_matter_in_the_form_that_the_planner_chose_alone(
        self, families: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flexengine.engine.planner import Planner
        from flexengine.shell.commands.messages import DONE, REFUSED
        from flexengine.shell.commands.run import main

        def least(planner: Planner, *_: Any) -> Lossy:
            planner.use(lossy := Lossy(cache="int4"))
            return lossy

        monkeypatch.setattr(Planner, "least_lossy", least)
        base = job_of_two(families("opt"), tmp_path, "--allow", "int8-cache,int4-cache,int2-cache")
        assert main([*base, "--limit", "1"]) == DONE
        widest = cache.WIDEST
        with monkeypatch.context() as changed:
            changed.setattr(cache, "WIDEST", widest | {4: 8})
            capsys.readouterr()
            assert main(base) == REFUSED
            said = capsys.readouterr().err
            assert "chose a cache of 4 bits in groups of 16, which is 4 bits in groups of 8 now; give --restart" in said
        monkeypatch.setattr(cache, "WIDEST", widest | {8: 8, 2: 8})
        assert main(base) == DONE
        assert "1 of 2 rows were done before" in capsys.readouterr().err


def job_of_two(known: Any, tmp_path: Path, *switches: str) -> list[str]:
    """The command line of a job of two rows."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n' * 2)
    options = ["--model", str(known.directory), "--max-tokens", "2", "--output", str(tmp_path / "out.jsonl")]
    return [str(source), *options, *switches]
