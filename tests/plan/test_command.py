"""The plan command: what it prints for configs, files, switches and machines, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine import activity
from flexengine.engine import rates
from flexengine.engine.options import MachineOptions
from flexengine.plan.hardware import Hardware
from flexengine.plan.search import Search, search
from flexengine.policy import Policy
from flexengine.shell.commands import measure, run
from flexengine.shell.commands import plan as command
from flexengine.shell.explain import whatif
from flexengine.shell.explain.text import hardware_text
from tests.helpers.explained import CPU, GPU

# The command line.
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 2048, "torch_dtype": "float16", "tie_word_embeddings": False}  # fmt: skip
ANSWERS: dict[str, Search] = {}  # by question: most commands here ask the same ones


def answered(*question: Any) -> Search:
    """Return a search, which is made once for all tests."""
    if (key := repr(question)) not in ANSWERS:
        ANSWERS[key] = search(*question)
    return ANSWERS[key]


class Line:
    """A config-only model and a hardware file; calls the command with them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
        small = replace(GPU, device_bytes=200 << 20)  # 194 MiB of them are workspace
        (folder / "hw.json").write_text(json.dumps(small.to_json()))

    def __call__(self, *more: str, code: int = 0) -> str:
        self.capsys.readouterr()
        hardware = [] if "--hardware" in more else ["--hardware", str(self.folder / "hw.json")]
        found = command.main([str(self.folder / "tiny"), *hardware, *more])
        captured = self.capsys.readouterr()
        assert found == code, captured.err
        return captured.out if code == 0 else captured.err


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Line:
    for asks in (command, whatif):
        monkeypatch.setattr(asks, "search", answered)
    return Line(tmp_path, capsys)


SHAPE = ("--prompt-tokens", "30", "--max-tokens", "10", "--rows", "6")


def test_the_linear_program_is_written(line: Line) -> None:
    """That of the policy's block: all kinds of data, lanes and memories have a name in it."""
    file = line.folder / "a.lp"
    line(*SHAPE, "--save-lp", str(file))
    text = file.read_text()
    names = ("all_weights_share", "weights_on_disk_share", "first_sweep_ms", "decode_1_sweep_ms", "device_memory_MB")
    assert [name for name in names if name not in text] == []


@pytest.mark.slow
def test_a_plan_from_a_config_alone(line: Line) -> None:
    text = line(*SHAPE, "--save", str(line.folder / "policy.json"))
    assert text.startswith("tiny on toy (cuda, not measured)\n6 sequences of 30 prompt tokens, at most 10")
    assert "Would help" in text
    assert len(text.splitlines()) <= 40
    values = json.loads(line(*SHAPE, "--json"))
    assert values["tokens"] == 60
    assert values["tok_s"] == pytest.approx(60 / values["seconds"])
    assert Policy(**values["policy"]) == Policy.load(line.folder / "policy.json")
    assert all(sum(m["bytes"].values()) <= m["capacity"] for m in values["memory"].values())
    again = json.loads(line(*SHAPE, "--json", "--policy", str(line.folder / "policy.json")))
    assert again["tok_s"] == values["tok_s"]
    assert [each["label"] for each in again["helps"]] == [each["label"] for each in values["helps"]]


@pytest.mark.slow
@pytest.mark.parametrize(("context", "prompt"), [(2048, 512), (100, 90)])
def test_a_short_context_bounds_the_default_prompt(line: Line, context: int, prompt: int) -> None:
    (line.folder / "tiny" / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": context}))
    assert f"6 sequences of {prompt} prompt tokens" in line("--max-tokens", "10", "--rows", "6")
    assert f"--max-tokens {context} leaves no room for a prompt" in line("--max-tokens", str(context), code=2)
    error = line("--prompt-tokens", str(context - 9), "--max-tokens", "10", code=2)
    assert f"--prompt-tokens {context - 9} and --max-tokens 10 make more than the {context} tokens" in error


@pytest.mark.slow
def test_a_nearly_full_attention_worker(line: Line) -> None:
    """Workers pay here: their links and memories are fast, and the device has little room for KV cache."""
    fast = dict(worker_attention={"worker1": 1e12}, worker_links={"worker1": 1e11})
    machine = replace(GPU, device_bytes=200 << 20, host_bytes=300 << 20, workers=(2_700_000,), **fast)
    (line.folder / "worker.json").write_text(json.dumps(machine.to_json()))
    job = ("--prompt-tokens", "100", "--max-tokens", "50", "--rows", "600", "--hardware",
           str(line.folder / "worker.json"))  # fmt: skip
    values = json.loads(line(*job, "--json"))
    used = values["memory"]["worker1"]
    assert sum(used["bytes"].values()) >= 0.8 * used["capacity"]
    assert "Workers" in line(*job)


@pytest.mark.parametrize(("cache", "longer"), [((0, 1, 0), True), ((1, 0, 0), False)])
def test_sparse_attention_that_makes_a_job_longer_is_said(line: Line, cache: Any, longer: bool) -> None:
    """The device waits for chosen values of a cache on the host."""
    policy, roomy = line.folder / "policy.json", line.folder / "roomy.json"
    policy.write_text(json.dumps(Policy(3, 2, cache=cache).to_json()))
    roomy.write_text(json.dumps(replace(GPU, device_bytes=1 << 30).to_json()))
    words = [str(line.folder / "tiny"), *SHAPE, "--prompt-tokens", "200", "--hardware", str(roomy)]
    assert command.main([*words, "--policy", str(policy), "--sparse-attention", "0.3"]) == 0
    told = "sparse attention is predicted to make this job"
    assert (told in line.capsys.readouterr().err) == longer


def test_rows_of_a_file(line: Line) -> None:
    rows = [{"prompt_token_ids": [5] * n, "max_tokens": 4} for n in (3, 9, 30)]
    (line.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "3 sequences of 3 to 30 prompt tokens, at most 4 tokens" in line("--input", str(line.folder / "in.jsonl"))
    assert "1 sequence of 3 prompt tokens" in line("--input", str(line.folder / "in.jsonl"), "--limit", "1")
    (line.folder / "in.jsonl").rename(line.folder / "rows")
    assert "3 sequences of" in line("--input", str(line.folder / "rows"), "--input-format", "jsonl")
    assert "--input-format needs the rows of a file; give --input, too" in line("--input-format", "csv", code=2)
    (line.folder / "in.jsonl").write_text("{}\n")
    assert "has no row that can be run" in line("--input", str(line.folder / "in.jsonl"), code=2)
    (line.folder / "in.jsonl").write_text("")  # as `run --dry-run` has it
    words = [str(line.folder / "tiny"), "--hardware", str(line.folder / "hw.json"), "--input"]
    assert command.main([*words, str(line.folder / "in.jsonl")]) == 0
    assert "nothing to plan: " in (said := line.capsys.readouterr()).err
    assert said.out == ""
    assert json.loads(line("--input", str(line.folder / "in.jsonl"), "--json")) == {"tokens": 0, "seconds": 0.0}


@pytest.mark.parametrize("words", [("--template", "{prompt}?"), ("--chat",)])
def test_text_needs_a_tokenizer(line: Line, words: tuple[str, ...]) -> None:
    (line.folder / "in.csv").write_text("prompt\nhello\n")
    said = line("--input", str(line.folder / "in.csv"), *words, code=2)
    assert f"{words[0]} makes text, but {line.folder / 'tiny'} has no tokenizer that counts its tokens" in said
    assert "or give --prompt-tokens and --rows in place of --input" in said


def test_compare_and_frontier(line: Line) -> None:
    files = {"small": Policy(1, 1, (0, 0, 1), prefill_tokens=32), "huge": Policy(64, 64, prefill_tokens=1 << 20)}
    for name, policy in files.items():
        (line.folder / name).write_text(json.dumps(policy.to_json()))
    paths = [str(line.folder / name) for name in files]
    both = [word for path in paths for word in ("--compare", path)]
    lines = line(*SHAPE, *both).splitlines()
    assert [row.split()[:2] for row in lines[4:6]] == [["1", "auto"], ["2", paths[0]]]
    assert lines[6].split()[1] == paths[1]
    assert "does not fit" in lines[6]
    values = json.loads(line(*SHAPE, *both, "--json"))["policies"]
    assert [("error" in v) for v in values] == [False, False, True]
    curve = json.loads(line(*SHAPE, "--frontier", "--json"))["frontier"]
    assert line(*SHAPE, "--frontier", "--verbose").count("continuous") + line(
        *SHAPE, "--frontier", "--verbose").count("diagonal") >= len(curve)  # fmt: skip
    limit = (curve[0]["latency"] + curve[-1]["latency"]) / 2 if len(curve) > 1 else curve[0]["latency"] * 2
    assert json.loads(line(*SHAPE, "--json", "--latency", str(limit)))["latency"] <= limit


def test_lossy_switches_change_the_plan(line: Line) -> None:
    """From a bare config: the bytes are those of the switches; --compare prices both policies with them."""

    def bytes_of(*more: str) -> dict[str, int]:
        values = json.loads(line(*SHAPE, "--json", "--policy", str(line.folder / "all.json"), *more))
        return values["memory"]["device"]["bytes"]

    (line.folder / "all.json").write_text(json.dumps(Policy(2, 3, prefill_tokens=32).to_json()))
    roomy = replace(GPU, device_bytes=1 << 30)
    (line.folder / "hw.json").write_text(json.dumps(roomy.to_json()))
    exact, weights, cache = bytes_of(), bytes_of("--weights", "int4"), bytes_of("--cache", "int8")
    matrices = 6 * 2 * (256 * 256 * 3 + 3 * 256 * 512)  # bytes: q, o and half as many for k and v; gate, up, down
    matrices += 2 * 1000 * 256  # the head
    saved = (exact["weights"] - weights["weights"]) / matrices
    assert 1 - 5 / 16 < saved < 1 - 4 / 16  # 4 bits, and less than one more for scales
    assert cache["weights"] == exact["weights"]
    assert 0.5 * exact["KV cache"] < cache["KV cache"] < 0.65 * exact["KV cache"]
    text = line(*SHAPE, "--weights", "int4", "--compare", str(line.folder / "all.json"))
    assert text.startswith("tiny (weights int4) on toy")


def test_what_run_may_choose_plan_chooses(line: Line) -> None:
    chosen = json.loads(line(*SHAPE, "--quality", "small", "--json"))
    exact = json.loads(line(*SHAPE, "--json"))
    assert exact["lossy"] == {}
    assert chosen["lossy"]
    assert chosen["seconds"] + chosen["load_seconds"] < exact["seconds"] + exact["load_seconds"]
    alone = [json.loads(line(*SHAPE, "--allow", name, "--json"))["lossy"] for name in ("int8-cache", "int4-weights")]
    assert all(set(lossy) <= {kind} for lossy, kind in zip(alone, ("cache", "weights"), strict=True))
    assert "6 sequences of" in line(*SHAPE, "--n", "1")
    assert "12 sequences of" in line(*SHAPE, "--n", "2")


def test_every_option_of_run_that_changes_a_plan_is_there() -> None:
    """The other options of run affect reading, sampling, writing and running."""

    def names(parser: Any) -> set[str]:
        return {option for action in parser._actions for option in action.option_strings if option[:2] == "--"}

    elsewhere = {"--output", "--restart", "--retry-errors", "--trace", "--report", "--temperature",
                 "--seed", "--top-k", "--min-tokens", "--logit-bias", "--bad-word", "--no-thinking",
                 "--chat-template-kwargs", "--continue-final-message",
                 "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty",
                 "--logprobs", "--stop", "--stop-token-id", "--ignore-eos", "--verify", "--dry-run", "--secret-file",
                 "--strategy", "--interface", "--ray", "--actors", "--shard-rows",
                 "--attention-workers", "--worker-mem", "--engines"}  # fmt: skip
    assert names(run.parser()) - names(command.parser()) == elsewhere


def test_plot_file(line: Line) -> None:
    pytest.importorskip("matplotlib")
    line(*SHAPE, "--frontier", "--plot", str(line.folder / "a.png"))
    assert (line.folder / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
        (["--prompt-tokens", "-3"], "--prompt-tokens is -3; it must be at least 1 and at most 1,048,576"),
        (["--max-tokens", "0"], "max_tokens is 0; it must be a whole number"),
        (["--input", "x", "--rows", "3"], "leave one out"),
        (["--input", "x", "--rows", "1000"], "--rows and --input are both given"),
        (["--latency", "nan"], "--latency is nan; it must be a positive number"),
        ([*SHAPE, "--latency", "1e-9"], "set the limit higher"),
        (["--frontier", "--policy", "x"], "leave --policy out"),
        (["--policy", "missing.json"], "policy file missing.json"),
        (["--hardware", "missing.json"], "hardware file missing.json"),
        (["--device", "cpu"], "is of kind cuda; leave one out"),
        (["--device-mem", "1K"], "device memory: "),
        (["--plot", "x.jpg"], "does not end with .png"),
        (["--save", "/missing/x.json"], "/missing/x.json cannot be written"),
        (["--save", "/tmp"], "/tmp cannot be written: it is a directory; name a file in it"),
        (["--save", "x.json", "--save-lp", "x.json"], "--save and --save-lp are one file, x.json; give each a file"),
        (["--calibration-text", "x.json", "--save", "x.json"], "--calibration-text and --save are one file, x.json"),
        (["--weights", "int4", "--quality", "near"], "leave out one of them"),
        (["--policy", "POLICY", "--allow", "int4-cache"], "a policy is given; leave out one of them"),
        (["--allow", "int5-cache"], "'int5-cache' cannot be allowed"),
        (["--allow", "int8-cache, near"], "'near' cannot be allowed; choose from int8-weights, "),
        (["--cache", "bf16"], "cache is 'bf16', but this GPU computes in"),
        (["--sparse-attention", "2"], "sparse_attention is 2.0; it must be a share above 0 and below 1"),
        (["--sparsify", "2"], "sparsify is 2.0; it must be a share above 0 and below 1"),
        (["--calibrate"], "it is for weights that are fitted"),
    ],
)
def test_refusals(line: Line, options: list[str], message: str) -> None:
    (line.folder / "policy.json").write_text("{}")
    error = line(*(str(line.folder / "policy.json") if o == "POLICY" else o for o in options), code=2)
    assert error.startswith("flexengine: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_measured_machine(line: Line, monkeypatch: pytest.MonkeyPatch, machine: Hardware) -> None:
    def this_machine(options: MachineOptions, opened: object, again: bool, dtype: str) -> Hardware:
        activity.message("measuring")
        assert (options.device, options.offload_dir, opened, again, dtype) == ("cpu", ["d"], None, True, "auto")
        return machine

    monkeypatch.setattr(rates, "this_machine", this_machine)
    file = line.folder / "machine.json"
    arguments = ["--device", "cpu", "--offload-dir", "d", "--again", "--save", str(file)]
    assert measure.main(arguments) == 0
    captured = line.capsys.readouterr()
    assert captured.err == "flexengine: measuring\n"
    assert re.search(r"\n  host to device +1.00 GB/s\n" if machine is GPU else r"\n  RAM to slot +1.00 GB/s\n",
                     captured.out)  # fmt: skip
    assert ("host capacity" in captured.out) == (machine is GPU)
    assert Hardware.load(file) == machine
    assert measure.main([*arguments, "--json"]) == 0
    assert Hardware.from_json(json.loads(line.capsys.readouterr().out), "stdout") == machine


def test_a_table_of_rates_is_cut_to_four_points() -> None:
    table = tuple((float(2**i), 1e9 * (i + 1)) for i in range(12))
    text = hardware_text(replace(GPU, checkpoint_read=table))
    row = next(line for line in text.splitlines() if line.startswith("  model files"))
    assert row.count(" at ") == 4
    assert "1.00 GB/s at 1 B" in row
    assert "12.0 GB/s at 2.05 kB" in row
