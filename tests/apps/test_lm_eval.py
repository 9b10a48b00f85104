"""flexengine lm-eval: results, texts and metrics are those of the harness's own model `hf` on the same checkpoint."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when datasets is imported
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

from lm_eval._cli import HarnessCLI  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CacheHook  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from flexengine.apps.lm_eval.arguments import ALLOWED, OWN  # noqa: E402
from flexengine.apps.lm_eval.model import RECORD, FlexLM  # noqa: E402
from flexengine.engine.options import EngineOptions  # noqa: E402
from flexengine.errors import FlexError, InvalidInput  # noqa: E402
from flexengine.lossy import Lossy  # noqa: E402
from flexengine.shell.commands.lm_eval import split  # noqa: E402
from flexengine.shell.commands.main import main  # noqa: E402
from tests.helpers.pages import PAGES, blocks, commands  # noqa: E402
from tests.helpers.speaker import TEMPLATE, make_byte_llama  # noqa: E402
from tests.helpers.tokenizers import byte_tokenizer  # noqa: E402

CONTEXT = 128  # tokens; prompts with two examples have more and fewer
TASKS = ["tiny_choice", "tiny_text", "tiny_rolling"]
ROWS = {
    "choice": [{"q": f"{'long ' * (i % 4)}{a} and {b}?", "choices": ["yes", "no", f"{a}{b}"], "gold": i % 3}
               for i, (a, b) in enumerate(zip("abcdefgh", "hgfedcba", strict=True))],
    "text": [{"q": f"{word} {'x' * 40 * (i % 3)}", "a": word} for i, word in enumerate(["one", "two", "two", "six"])],
    "rolling": [{"text": text} for text in ("a b c", "words " * 60, "a b c", "é" * 30)],
}  # fmt: skip
KINDS = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "Q: {{q}}\nA:", "doc_to_choice": "{{choices}}",
               "doc_to_target": "gold", "num_fewshot": 2, "fewshot_split": "test",
               "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "text": {"output_type": "generate_until", "doc_to_text": "{{q}} ", "doc_to_target": "{{a}}",
             "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 24},
             "metric_list": [{"metric": "exact_match"}]},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out two slow steps of the harness: facts about the machine, and the index of its own tasks."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a token per byte, an end token and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = "</s>", TEMPLATE
    tokenizer.save_pretrained(folder)
    make_byte_llama(folder, len(tokenizer), seed=3, width=32, context=CONTEXT, spread=0.3)
    return str(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks and their data. YAML files may hold JSON."""
    folder = tmp_path_factory.mktemp("tasks")
    for kind, rows in ROWS.items():
        (data := folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": f"tiny_{kind}", "dataset_path": "json", "test_split": "test", "metadata": {"version": 0},
                "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}}  # fmt: skip
        (folder / f"{kind}.yaml").write_text(json.dumps(task | KINDS[kind]))
    return folder


@pytest.fixture(scope="module")
def ours(model: str) -> Iterator[FlexLM]:
    made = FlexLM(model, device="cpu", device_mem="64M", progress=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def theirs(model: str) -> HFLM:
    return HFLM(model, device="cpu", dtype="float32", batch_size=4)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def evaluated(lm: Any, tasks: Path, names: Sequence[str] = TASKS, **options: Any) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        lm, tasks=list(names), task_manager=manager, bootstrap_iters=0, verbosity="ERROR", **options
    )


def test_metrics_are_those_of_hf(ours: FlexLM, theirs: HFLM, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All metrics, and each response. The engine is called once for each type of request."""
    calls = []
    for name in ("score", "stream"):
        called = getattr(ours.engine, name)
        monkeypatch.setattr(ours.engine, name, lambda *a, _f=called, _n=name, **k: calls.append(_n) or _f(*a, **k))
    mine, other = evaluated(ours, tasks), evaluated(theirs, tasks)
    assert sorted(calls) == ["score", "score", "stream", "stream", "stream"]  # score itself calls stream
    for name in TASKS:
        metrics = {key: value for key, value in other["results"][name].items() if isinstance(value, float)}
        assert metrics
        assert {key: mine["results"][name][key] for key in metrics} == pytest.approx(metrics, rel=1e-4)
        for a, b in zip(mine["samples"][name], other["samples"][name], strict=True):
            same(flat(a["resps"]), flat(b["resps"]))


def flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list | tuple) else [value]


def same(mine: Sequence[Any], other: Sequence[Any]) -> None:
    """Log probabilities may differ by rounding; texts and whether a continuation is greedy may not."""
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        assert a == (pytest.approx(b, abs=2e-3) if isinstance(b, float) else b)


def test_pairs(ours: FlexLM, theirs: HFLM) -> None:
    """Duplicates, empty contexts, spaces at the end, texts with a beginning-of-sequence token, and too long ones."""
    pairs = [("a b", " c"), ("", "c d"), ("a b", " c"), ("a b ", "c"), ("<s>a b", " c"), ("", "<s>c"), ("a b", " d"),
             ("y" * 300, " c"), ("y" * 300, "z" * 100), ("y", "z" * CONTEXT), ("", "z" * CONTEXT),
             ("é", "ü")]  # fmt: skip
    given = requests("loglikelihood", *pairs)
    mine, other = ours.loglikelihood(given), theirs.loglikelihood(given)
    same(flat(mine), flat(other))
    assert mine[0] == mine[2]
    assert not all(greedy for _, greedy in mine)


def test_texts(ours: FlexLM, theirs: HFLM) -> None:
    texts = [("",), ("a",), ("abc " * 100,), ("a",), ("x" * (CONTEXT - 1),), ("<s>x",)]
    given = requests("loglikelihood_rolling", *texts)
    same(ours.loglikelihood_rolling(given), theirs.loglikelihood_rolling(given))


def test_generated(ours: FlexLM, theirs: HFLM) -> None:
    """Requests with different arguments in one call, in the order of the requests."""
    ways = [{"until": ["e"], "max_gen_toks": 20}, {"until": "q", "max_gen_toks": 9},
            {"until": [], "max_new_tokens": 5, "do_sample": False},
            {"until": [chr(i) for i in range(97, 117)], "num_beams": 1, "max_gen_toks": 12}]  # fmt: skip
    pairs = [(context, way) for way in ways for context in ("a b c", "<s>a", "w" * 200, "a b c", "Hello")]
    alone = [theirs.generate_until(requests("generate_until", pair), disable_tqdm=True)[0] for pair in pairs]
    mine = ours.generate_until(requests("generate_until", *pairs))
    assert mine == alone
    assert len(set(mine)) > 5
    assert isinstance(ours.generate_until(requests("generate_until", ("", {"max_gen_toks": 2})))[0], str)


@pytest.mark.parametrize("begin", [True, False])
def test_chat(ours: FlexLM, theirs: HFLM, begin: bool) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert ours.apply_chat_template(turns, begin) == theirs.apply_chat_template(turns, begin)
    assert ours.tokenizer_name == theirs.tokenizer_name
    assert ours.chat_template(True) == TEMPLATE


def test_a_chat_template_without_system_messages(ours: FlexLM, theirs: HFLM, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    for lm in (ours, theirs):
        monkeypatch.setattr(lm.tokenizer, "chat_template", strict)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns) == "user:u;bot:"


# Continuing from the harness's cache.


class Stopped(Exception):
    pass


@pytest.mark.parametrize("name", TASKS)
def test_continued_from_the_cache(
    ours: FlexLM, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A run that an exception ends after two finished requests. The next run computes only the others."""
    kept: list[Any] = []
    limit = 2

    def add(hook: CacheHook, *args: Any) -> None:
        if len(kept) == limit:
            raise Stopped
        kept.append(args[:2])
        stored(hook, *args)

    stored = CacheHook.add_partial
    monkeypatch.setattr(CacheHook, "add_partial", add)
    with pytest.raises(Stopped):
        evaluated(ours, tasks, [name], use_cache=str(tmp_path / "cache"))
    ours.cache_hook.dbdict.close()
    first, kept, limit = kept, [], 99
    resumed = evaluated(ours, tasks, [name], use_cache=str(tmp_path / "cache"))
    assert RECORD in ours.cache_hook.dbdict
    ours.cache_hook.dbdict.close()
    ours.set_cache_hook(CacheHook(None))
    assert len(first) == 2
    assert kept
    assert [each for each in kept if each in first] == []
    assert resumed["results"] == evaluated(ours, tasks, [name])["results"]


# Arguments.


def test_refused_requests(ours: FlexLM, model: str) -> None:
    with pytest.raises(InvalidInput, match=f"max_gen_toks is 500; it must be below max_length {CONTEXT}"):
        ours.generate_until(requests("generate_until", ("a", {"max_gen_toks": 500})))
    with pytest.raises(InvalidInput, match=f"has 200 tokens; it must have 1 to {CONTEXT}"):
        ours.loglikelihood(requests("loglikelihood", ("a", "b" * 200)))
    with pytest.raises(InvalidInput, match=f"max_length is 500; it must be from 2 to {CONTEXT}"):
        FlexLM(model, max_length=500, progress=False)
    with pytest.raises(FlexError, match=r"1 of 1 requests could not be computed; request 0: .*token"):
        ours._loglikelihood_tokens([(("a", "b"), [5], [9999])])


def test_empty_continuations(ours: FlexLM) -> None:
    for context in ("", "a"):
        with pytest.raises(InvalidInput, match=f"the continuation of the context '{context}' is empty"):
            ours.loglikelihood(requests("loglikelihood", ("a", "b"), (context, "")))


def test_thinking_is_for_tasks_that_generate(model: str) -> None:
    with pytest.raises(InvalidInput, match="enable_thinking is true without think_end_token"):
        FlexLM(model, enable_thinking=True)
    lm = FlexLM(model, device="cpu", device_mem="64M", progress=False, enable_thinking=True, think_end_token="x")
    with pytest.raises(InvalidInput, match="enable_thinking is true, but a task scores given answers"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b")))
    lm.close()


# The command.


def test_command(model: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: HFLM) -> None:
    words = ["--tasks", "tiny_choice", "--include_path", str(tasks), "--output_path", str(tmp_path / "out.json"),
             "--model_args", "device_mem=64M", "device=cpu", "--limit", "3", "-b", "8"]  # fmt: skip
    assert main(["lm-eval", "-q", *words, "--model", model]) == 0
    assert "|tiny_choice|" in capsys.readouterr().out
    (file,) = tmp_path.rglob("out*.json")
    found = json.loads(file.read_text())
    assert found["config"]["model"] == "flexengine"
    assert found["config"]["model_args"] == {"device_mem": "64M", "device": "cpu", "model": model}
    assert found["config"]["model_dtype"] == "float32"
    other = evaluated(theirs, tasks, ["tiny_choice"], limit=3)["results"]["tiny_choice"]
    assert found["results"]["tiny_choice"]["acc,none"] == other["acc,none"]


@pytest.mark.parametrize(("words", "message"), [
    ([], "no task is given; write flexengine lm-eval --model MODEL --tasks TASK"),
    (["--tasks", "t", "--model", "m", "--model_args", "model=n"], "--model is 'm', but model_args names 'n'"),
    (["ls", "tasks", "--model", "m"], "lm-eval ls uses no model; leave it out"),
    (["--tasks", "t", "--model", "hf", "--model_args", "pretrained=m"], "another engine of lm-eval; here this engine"),
    (["--tasks", "t", "--config", "/nowhere/c.yaml"], "flexengine: lm-eval: Config file not found: /nowhere/c.yaml"),
    (["--tasks", "t", "--model_args", "{bad"], "flexengine: lm-eval: Invalid JSON: {bad"),
    (["--tasks", "t", "--output_path", "/proc/x/y"], "--output_path is /proc/x/y, but /proc/x/y cannot be made"),
    (["--tasks", "t", "--use_cache", "/proc/x/y"], "--use_cache is /proc/x/y, but /proc/x cannot be made"),
    (["--tasks", "t", "-v", "DEBUG"], "-v is --verbose here, which takes no value; write --verbosity DEBUG"),
])  # fmt: skip
def test_refused_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm-eval", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--tasks", "t", "--model"], "-m/-M needs a value; flexengine lm-eval --help lists the options"),
    (["--tasks", "t", "--quiet=x"], "-q takes no value, but 'x' is given"),
])  # fmt: skip
def test_options_that_cannot_be_read(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_options_of_the_harness_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lm-eval", "run", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "directory, .gguf file or hub id (default: the demo model)" in out
    assert "default: hf" not in out
    assert "default: 1)" not in out


def test_a_missing_task_and_a_missing_chat_template(
    model: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, no stack of calls."""
    words = ["lm-eval", "--include_path", str(tasks), "--model_args", "device_mem=64M"]
    assert main([*words, "--tasks", "nonesuch", "-m", model]) == 2
    assert "flexengine: lm-eval: Tasks not found: nonesuch\n" in capsys.readouterr().err
    assert main([*words, "--tasks", "tiny_choice", "--num_fewshot", "50", "-m", model]) == 2
    assert "a task has fewer documents than examples are to be drawn; lower --num_fewshot" in capsys.readouterr().err
    make_byte_llama(tmp_path, len(byte_tokenizer(tmp_path)), seed=3, width=32, context=CONTEXT, spread=0.3)
    assert main([*words, "--tasks", "tiny_choice", "--apply_chat_template", "-m", str(tmp_path)]) == 2
    assert "flexengine: the model has no chat template; leave out --apply_chat_template" in capsys.readouterr().err


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["lm-eval", "--tasks", "t"]) == 2
    assert 'pip install "flexengine[lm-eval]"' in capsys.readouterr().err


def test_words_for_the_harness(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('model = "m"\n')
    args, rest = split(["--tasks", "a,b", "-s", "--config", str(tmp_path / "own.toml"), "--limit", "3"])
    assert (args.model, rest) == ("m", ["--tasks", "a,b", "-s", "--limit", "3"])
    assert split(["-t", "a", "--config", "x.yaml"])[1] == ["-t", "a", "--config", "x.yaml"]


def test_commands_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness accepts every command of docs/lm-eval.md. The page names all arguments of generation and of model."""
    page = next(page for page in PAGES if page.name == "lm-eval.md")
    found = [line for block in blocks(page) if block.kind == "sh" for line in commands(block.text)]
    for line in found:
        args, rest = split(shlex.split(line)[2:])
        monkeypatch.setattr("sys.argv", ["lm-eval", *rest])
        assert HarnessCLI().parse_args().tasks
        assert args.model == "MODEL"
    assert len(found) == 3
    text = page.read_text("utf-8")
    ours = {*OWN, *(f.name for f in fields(Lossy)), *(f.name for f in fields(EngineOptions)), *ALLOWED}
    ours -= {"group", "strategy", "sharing", "worker_sharing"}  # of pipelines and fleets
    ours -= {"model", "on_sweep", "links", "lossy", "device", "max_tokens", "max_new_tokens", "max_completion_tokens"}
    assert {name for name in ours if f"`{name}`" not in text and f"`--{name}`" not in text} == set()
