"""bench: the cases, the made checkpoints, the statistics, the bound, the memory limit, and both sides' protocol."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import harness, limit
from bench.cases import GPU, MIXED, OFFLOAD_LONG, OFFLOAD_SHORT, RESIDENT, SMOKE, Case, fixed
from bench.compare import bound
from bench.compare.__main__ import limit_bytes, ratios
from bench.compare.bound import Question, Way, bounds, question, read_rate, read_rates
from bench.compare.matrices import Layer, cache_bytes, layers_of, used, weight_bytes
from bench.gpu import kernels as gpu_kernels
from bench.harness import Job, Limits
from bench.models import SHAPES, OptShape, make, shard_files
from tests.helpers.patience import PATIENCE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPES["opt-tiny"], tmp_path_factory.mktemp("bench") / "opt-tiny")


def test_uniform_cases_have_the_sizes_of_the_issue() -> None:
    sizes = ((RESIDENT, 64, 128, 32), (OFFLOAD_SHORT, 16, 128, 8), (OFFLOAD_LONG, 32, 32, 32))
    for case, rows, prompt, output in sizes:
        assert case.lengths() == [(prompt, output)] * rows
        assert (case.prompt_tokens, case.output_tokens) == (rows * prompt, rows * output)


def test_mixed_case_is_ragged_and_within_its_bounds() -> None:
    prompts, outputs = zip(*MIXED.lengths(), strict=True)
    assert len(prompts) == 96
    assert min(prompts) >= 16
    assert max(prompts) == 512
    assert (min(outputs), max(outputs)) >= (8, 8)
    assert max(outputs) <= 64
    assert len(set(prompts)) > 48
    assert sorted(prompts)[48] == pytest.approx(100, rel=0.3)  # the median it was drawn around


def test_requests_are_a_function_of_the_record_alone() -> None:
    requests = MIXED.requests(1000)
    assert requests == MIXED.requests(1000)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in requests] == MIXED.lengths()
    assert all(10 <= token < 1000 for r in requests for token in r.prompt_token_ids)


def test_job_survives_its_json() -> None:
    job = Job("somewhere", tuple(SMOKE.requests(50)), batch=3, policy={"slots": 2})
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_made_checkpoint_is_what_transformers_calls_opt(tmp_path: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    shape = OptShape(layers=2, hidden=32, ffn=64, heads=4, vocab=100, positions=16, dtype=dtype, shard_bytes=20_000)
    model, info = AutoModelForCausalLM.from_pretrained(make(shape, tmp_path), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert len(shard_files(tmp_path)) > 1
    assert model.dtype == getattr(torch, dtype)
    tied = shape.vocab * shape.hidden
    assert sum(p.numel() for p in model.parameters()) == sum(shape.nbytes(s) for s in shape.groups()) // (
        2 if dtype == "float16" else 4
    )
    assert model.lm_head.weight.data_ptr() == model.model.decoder.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight.numel() == tied
    assert model.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.1)


def test_real_shapes_have_the_real_number_of_parameters() -> None:
    for name, billions in (("opt-1.3b", 1.3158), ("opt-13b", 12.8533)):
        shape = SHAPES[name]
        assert sum(map(shape.nbytes, shape.groups())) / 2 == pytest.approx(billions * 1e9, rel=1e-4)
        assert sum(map(len, shape.shards())) == sum(map(len, shape.groups()))


def test_checkpoint_is_reused_and_does_not_depend_on_workers(tiny: Path, tmp_path: Path) -> None:
    before = [f.stat().st_mtime_ns for f in shard_files(tiny)]
    make(SHAPES["opt-tiny"], tiny)
    assert [f.stat().st_mtime_ns for f in shard_files(tiny)] == before
    again = make(SHAPES["opt-tiny"], tmp_path, workers=1)
    assert [f.read_bytes() for f in shard_files(again)] == [f.read_bytes() for f in shard_files(tiny)]


def test_statistics() -> None:
    assert harness.stats([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}
    assert harness.stats([]) is None
    assert harness.rows_equal({"token_ids": [[1], [2, 3]]}, {"token_ids": [[1], [2, 4]]}) == [1, 2]
    assert harness.rounded({"a": [1.23456, 7], "b": None}) == {"a": [1.235, 7], "b": None}
    assert harness.last_json('noise\n{"a": 1}\nmore') == {"a": 1}


def test_a_part_of_a_case_stands_for_the_whole() -> None:
    case, ran = Case("part", 20, fixed(5), fixed(9)), {"tok_s": 3.0, "steps": [4.0, 1.0, 3.0], "token_ids": [[1, 2]]}
    found = harness.whole_case(ran, case, 8)
    # three batches, of 4 s until the first token and 8 further steps of 2 s
    assert found == {**ran, "measured_tok_s": 3.0, "tok_s": 20 * 9 / 60}
    assert harness.rows_equal({"token_ids": [[1, 2, 3], [4, 5, 6]]}, found) == [1, 1]
    assert "how long each step" in harness.whole_case({"tok_s": 3.0}, case, 8)["error"]
    assert harness.whole_case({"error": "killed"}, case, 8) == {"error": "killed"}


def test_ratios_by_round_use_the_peers_median_where_it_did_not_run() -> None:
    ours = [{"tok_s": 8.0}, {"tok_s": 6.0}, {"error": "x"}]
    assert ratios(ours, [{"tok_s": 2.0}]) == [4.0, 3.0]
    assert ratios(ours, [{"error": "stopped", "seconds_at_least": 1.0}]) == []


def test_bound_of_two_phases() -> None:
    found = bounds({"disk": [2.0, 2.0, 2.0], "compute": [5.0, 1.0, 1.0]})
    assert found == {"disk": 6.0, "compute": 7.0, "per_sweep": 9.0, "overall": 7.0}
    asked = question("m", [(1500, 3), (1000, 1)])
    assert asked == Question("m", ((2048, 452), (1,), (1,)), (2, 1, 1), cached=(0, 1501, 1502))


def test_memory_holds_weights_and_caches_once_a_sweep() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
              "vocab_size": 100, "dtype": "float16"}  # fmt: skip
    assert cache_bytes(config, {}) == 2 * 2 * 2 * 8 * 4
    assert cache_bytes(config, {"cache": "int8"}) == 2 * 2 * 2 * 8
    assert cache_bytes(config, {}, layers=1) == 2 * 2 * 8 * 4
    shapes = [Layer(((32, 32),), ((64, 32),))] * 2
    assert weight_bytes(shapes, config, {}) == 2 * (2 * 96 * 32 + 100 * 32)
    assert weight_bytes(shapes, config | {"dtype": "float32"}, {}) == 4 * (2 * 96 * 32 + 100 * 32)
    assert weight_bytes(shapes, config | {"dtype": "float32"}, {"compute": "bf16"}) == 2 * (2 * 96 * 32 + 100 * 32)
    square = [Layer(others=((64, 64),))] * 2
    assert weight_bytes(square, config, {"weights": "int8"}) == 2 * 64 * (64 + 4) + 112 * (64 + 4)
    experts = [Layer(expert=((8, 32), (32, 8)), experts=4)]
    config["num_experts_per_tok"] = 2
    for tokens, touched in ((1, 2), (2, 3), (100, 4)):
        assert weight_bytes(experts, config, {}, tokens) == pytest.approx(2 * (touched * 2 * 8 * 32 + 100 * 32))


@pytest.mark.parametrize(("names", "cached"), [
    (("self_attn.k_proj.weight",), True), (("self_attn.kv_a_proj_with_mqa.weight",), True),
    (("attn.c_attn.weight",), True), (("self_attn.k_proj.weight", "mamba.A_log"), True),  # Falcon-H1
    (("self_attn.k_proj.weight", "self_attn.A_log", "self_attn.dt_bias"), False),  # Kimi Linear
    (("mixer.in_proj.weight", "mixer.A_log"), False), (("attention.key.weight",), False),  # Mamba, RWKV
])  # fmt: skip
def test_layers_with_states_only_have_no_keys(names: tuple[str, ...], cached: bool, tmp_path: Path) -> None:
    text = json.dumps({f"model.layers.0.{name}": {"shape": [8, 8]} for name in names}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert [layer.cached for layer in layers_of([tmp_path / "a.safetensors"])] == [cached]


@pytest.mark.parametrize(("name", "kinds"), [
    ("qwen3.5-moe-2.7b", {"linear": 9, "attention": 3}), ("nemotron-h-2.7b", {"linear": 12, "attention": 3, "moe": 12}),
])  # fmt: skip
def test_layers_of_hybrids(name: str, kinds: dict[str, int], tmp_path: Path) -> None:
    """Each layer has its matrices, and of its experts those of one; many tokens use all bytes but those of vectors."""
    shape = SHAPES[name]
    headers = {n: {"shape": size} for group in shape.groups() for n, size in group.items()}
    text = json.dumps(headers).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    layers = layers_of([tmp_path / "a.safetensors"])
    assert len(layers) == shape.layers
    assert sum(layer.cached for layer in layers) == kinds["attention"]
    assert sum(bool(layer.kept) and not layer.cached for layer in layers) == kinds["linear"]
    assert sum(layer.experts == 64 for layer in layers) == kinds.get("moe", shape.layers)
    read = weight_bytes(layers, shape.config(), {}, 10**6)
    embedding = 2 * shape.vocab * shape.hidden
    assert read + embedding == pytest.approx(sum(map(shape.nbytes, shape.groups())), rel=1e-3)
    assert used(64, 8, 1) == 8


def test_read_rates_are_positive_and_read_everything(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = read_rates(shard_files(tiny))
    assert "buffered" in rates
    assert all(rate > 0 for rate in rates.values())
    read, preadv, together = dict[int, int](), os.preadv, threading.Barrier(3)

    def counted(fd: int, parts: Any, at: int) -> int:
        n = preadv(fd, parts, at)
        if (me := threading.get_ident()) not in read:
            together.wait(PATIENCE)  # three reads are under way at the same time
        read[me] = read.get(me, 0) + n
        return n

    monkeypatch.setattr(os, "preadv", counted)
    assert read_rate(shard_files(tiny), Way(4096, False, 3)) > 0
    assert len(read) == 3
    assert sum(read.values()) == sum(file.stat().st_size for file in shard_files(tiny))


def test_bound_is_measured_on_the_model(tiny: Path) -> None:
    found = harness.run_module("bench.compare.bound", question(str(tiny), [(8, 3)] * 4).to_json())
    assert "error" not in found, found
    assert len(found["compute_seconds"]) == len(found["memory_seconds"]) == 3
    assert found["rates"]["memory"] > 0
    assert found["model_bytes"] == sum(f.stat().st_size for f in shard_files(tiny))


def test_of_prompts_the_last_layer_needs_keys_and_values_of_all_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(m: int, shapes: list[tuple[int, int]], lossy: Any, head: bool = False) -> dict[str, float]:
        return {"slow": 1e9, "fast": float(m * sum(n * k for n, k in shapes))}

    monkeypatch.setattr(bound, "gemm_seconds", seconds)
    found = bound.answer(question(str(tiny), [(8, 2)] * 4))["compute_seconds"]
    config = json.loads((tiny / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    head, kv, rest = config["vocab_size"] * width, 2 * width**2, 2 * width**2 + 2 * width * config["ffn_dim"]
    assert found[0] == (layers - 1) * 32 * (kv + rest) + 32 * kv + 4 * rest + 4 * head
    assert found[1] == layers * 4 * (kv + rest) + 4 * head


def test_sizes_on_the_command_line() -> None:
    assert (limit_bytes("2.0G"), limit_bytes("800M"), limit_bytes("5")) == (2 * 10**9, 8 * 10**8, 5)


def test_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := limit.why_not():
        pytest.skip(f"no memory limit here: {reason}")
    made: list[tuple[limit.Kind, Path]] = []
    make_group = limit._make_group
    monkeypatch.setattr(limit, "_make_group", lambda size: made.append(make_group(size)) or made[-1])
    code = "import sys; x = b'x' * int(sys.stdin.read()); print(len(x))"
    rc, out, err, peak = limit.run_limited([sys.executable, "-c", code], 200 * 10**6, stdin="50000000")
    assert (rc, out.strip(), err) == (0, "50000000", "")
    assert peak is None or 50e6 < peak < 200e6
    rc, out, _, _ = limit.run_limited([sys.executable, "-c", code], 200 * 10**6, stdin="400000000")
    assert (rc, out) == (-9, "")
    with pytest.raises(subprocess.TimeoutExpired):
        limit.run_limited([sys.executable, "-c", "import time; time.sleep(60)"], 200 * 10**6, timeout=0.5)
    assert len(made) == 3
    assert not any(group.exists() for _, group in made)


def test_a_failing_side_becomes_an_error_with_its_last_words() -> None:
    failed = harness.run_module("bench.peers.no_such_side", "")
    assert failed["error"] == "exit code 1"
    assert "no_such_side" in failed["stderr"]


def test_a_side_stopped_by_its_timeout_tells_how_long_it_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from bench import harness; import time; {}; time.sleep(60)"
    run = limit.run
    for said, loaded in (("harness.report_loaded()", True), ("print()", False)):
        argv = [sys.executable, "-c", code.format(said)]
        monkeypatch.setattr(harness, "run", lambda _, *rest, argv=argv: run(argv, *rest))
        for seconds in (4.0, 16.0, 50.0) if loaded else (1.0,):  # a busy machine starts Python slowly
            stopped = harness.run_module("anything", "", Limits(seconds=seconds))
            assert stopped["error"] == f"stopped after {seconds:g} s"
            assert 0 <= stopped["seconds_at_least"] <= seconds
            if stopped["seconds_at_least"]:
                break
        assert bool(stopped["seconds_at_least"]) == loaded


def test_padded_peer_gives_each_row_what_one_row_at_a_time_gives(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    requests = tuple(SMOKE.requests(harness.vocab_size(tiny)))
    ran = harness.run_side("transformers_generate", Job(str(tiny), requests, batch=3), Limits(seconds=60))
    assert "error" not in ran, ran
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for request, tokens in zip(requests, ran["token_ids"], strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        alone = model.generate(prompt, max_new_tokens=request.max_tokens, do_sample=False, pad_token_id=0)
        assert alone[0, prompt.shape[1] :].tolist() == tokens


def test_record_names_no_path(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.jsonl"
    record: dict[str, Any] = {**harness.header("x", SMOKE, [{"versions": {"torch": "1"}}]), "model": tiny.name}
    harness.emit(record, str(out))
    line = json.loads(out.read_text())
    assert line == json.loads(capsys.readouterr().out)
    assert line["case"]["seed"] == 0
    assert line["machine"]["cores"] >= 1
    assert os.sep not in line["model"]


def test_gpu_cases_fit_their_device_memory() -> None:
    shape = SHAPES["opt-13b"]
    for case in GPU:
        longest = max(p + n for p, n in case.case.lengths())
        cache = case.gpu_batch_size * case.num_gpu_batches * longest * shape.layers * 2 * shape.hidden * 2
        slots = 2 * shape.nbytes(shape.layer_shapes(0)) + shape.nbytes(shape.groups()[0])
        assert cache + slots < 13 * 2**30


def test_gpu_kernels_are_timed(tmp_path: Path) -> None:
    """Toy sizes, computed by plain torch."""
    out = tmp_path / "kernels.jsonl"
    gpu_kernels.run(gpu_kernels.SMOKE, "cpu", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["bits"] for line in lines if "attention" in line] == [16, 4, 16, 4]
    assert [line["rows"] for line in lines if "product" in line] == [1, 20]
    assert all(rate > 0 for line in lines for rate in line.get("gb_s", line.get("tflop_s")).values())
