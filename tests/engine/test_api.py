"""The Python API: public names, options, the forms of generate, chat and score, and an engine that is closed."""

import inspect
import json
import subprocess
import sys
import weakref
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import flexengine
from flexengine import Engine, EngineOptions, InvalidInput, Links, Lossy, Policy, Result, SamplingParams
from flexengine.engine.scoring import encode_scored, split
from flexengine.job.rows import Row
from flexengine.plan.workload import Workload
from tests.helpers.families import NEW, reference
from tests.helpers.speaker import make_speaker

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
POLICY = Policy(gpu_batch_size=4, num_gpu_batches=1)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of a random Llama with a token per byte and a chat template, and the same model in transformers."""
    directory = tmp_path_factory.mktemp("speaker")
    model = make_speaker(directory)
    with Engine(directory, policy=POLICY, device="cpu", device_mem="1G") as engine:
        engine.reference = model  # type: ignore[attr-defined]
        yield engine


def expected_of(engine: Any, texts: list[str]) -> list[list[int]]:
    return reference(engine.reference, [engine.tokenizer(text)["input_ids"] for text in texts])


# Names.


def test_public_names() -> None:
    assert set(flexengine.__all__) == {
        "Activity", "BadCheckpoint", "Completion", "Engine", "EngineOptions", "FlexError", "Hardware", "InvalidInput",
        "Links", "Lossy", "ModelNotFound", "OutOfMemory", "Policy", "Progress", "RanOut", "Result", "SamplingParams",
        "Score", "Summary", "TooLittle", "UnsupportedModel", "__version__",
    }  # fmt: skip
    assert dir(flexengine) == sorted(flexengine.__all__)
    for name in flexengine.__all__:
        assert getattr(flexengine, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Egnine'"):
        flexengine.Egnine  # noqa: B018


def test_light_until_used() -> None:
    code = "import sys, flexengine; dir(flexengine); flexengine.Policy; flexengine.InvalidInput; flexengine.Activity\n"
    code += "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    root = Path(flexengine.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=100)
    assert out.stdout.strip() == "[]", out.stderr


def test_the_signature_is_that_of_the_options() -> None:
    """Each option once, with its type and default; all but the model by name only."""
    shown = inspect.signature(Engine).parameters
    assert set(shown) == {f.name for f in fields(EngineOptions)}
    assert next(iter(shown)) == "model"
    for f in fields(EngineOptions):
        assert shown[f.name].default == f.default is not MISSING
        assert shown[f.name].annotation == f.type
        by_name_only = shown[f.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert by_name_only == (f.name != "model")
    with pytest.raises(TypeError, match="modle"):
        Engine(modle="x")  # type: ignore[call-arg]


# Options.


@pytest.mark.parametrize(("options", "message"), [
    ({"lossy": "int4"}, "lossy is 'int4'; it must be a Lossy, such as Lossy(weights='int4')"),
    ({"lossy": None}, "; it must be a Lossy"),
    ({"on_sweep": 3}, "on_sweep is 3; it must be a function"),
    ({"allow": "int4-weights"}, "allow is 'int4-weights'; it must be a list of names, such as ['int4-weights']"),
    ({"allow": "near"}, "'near' cannot be allowed; choose from int8-weights, "),
    ({"allow": ["near"]}, "; near is int8-weights, int8-compute, int8-cache, as in flexengine run --quality near"),
    ({"allow": [4]}, "allow is [4]; it must be a list of names"),
    ({"allow": ["int4"]}, "'int4' cannot be allowed; choose from int8-weights"),
    ({"allow": ["int4-weights"], "policy": Policy()}, "allow cannot be combined with lossy or policy"),
    ({"offload_dir": [1]}, "offload_dir is [1]; it must be the name of a directory, or a list"),
    ({"offload_dir": [""]}, "; it must be the name of a directory, or a list"),
    ({"offload_dir": ""}, "offload_dir is ''; it must be the name of a directory"),
    ({"offload_dir": []}, "offload_dir is []; it must be the name of a directory"),
    ({"offload_dir": 7}, "offload_dir is 7"),
    ({"device_mem": -1}, "device_mem is -1; it must be at least one byte"),
    ({"device_mem": "much"}, "device_mem is 'much'; it must be a number of bytes"),
    ({"host_mem": [1]}, "host_mem is [1]"),
    ({"device": "tpu"}, "device is 'tpu'; it must be one of auto, cpu, cuda, sim"),
    ({"device": ["cpu"]}, "it must be one of auto, cpu, cuda, sim"),
    ({"links": "x"}, "links is 'x'; it must be a Links, such as Links(h2d=12e9), or None"),
    ({"hardware": "t4"}, "hardware is 't4'; it must be a Hardware, such as Hardware.load(FILE)"),
    ({"policy": {"slots": 2}}, "it must be a Policy, such as Policy(**fields) or Policy.load(FILE)"),
    ({"dtype": 16}, "dtype is 16; it must be one of auto, float32, bfloat16, float16"),
    ({"dtype": "int4"}, "dtype is 'int4'; it must be one of auto, float32, bfloat16, float16"),
    ({"trace": 3}, "trace is 3; it must be the name of a file"),
    ({"trace": ""}, "trace is ''; it must be the name of a file"),
    ({"verify": 1}, "verify is 1; it must be True or False"),
    ({"overlap": "no"}, "overlap is 'no'; it must be True or False"),
    ({"trust_remote_code": 0}, "trust_remote_code is 0; it must be True or False"),
    ({"model": 3}, "model is 3; it must be a directory, a .gguf file, a hub id"),
    ({"model": ""}, "model is ''; it must be a directory"),
])  # fmt: skip
def test_options_are_checked_before_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Engine(**{"model": "/no such model", **options})
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("fields", [
    {"h2d": 0}, {"d2h": -1.0}, {"disk_read": "fast"}, {"disk_write": True}, {"latency": -1}, {"latency": None},
    {"more_disks": 5}, {"more_disks": ((1.0,),)}, {"more_disks": ((1.0, 0),)},
])  # fmt: skip
def test_links_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        Links(**fields)


# generate.


def test_generate(speaker: Any) -> None:
    """A text or a row gives one Result, a list of them a list; all as transformers, and with their prompts."""
    texts = ["one", "and two", "3"]
    expected = expected_of(speaker, texts)
    one = speaker.generate(texts[0], GREEDY)
    row = speaker.generate({"prompt": texts[1], "max_tokens": 2}, GREEDY)
    ids = speaker.tokenizer(texts[2])["input_ids"]
    many = speaker.generate([texts[0], {"prompt": texts[1]}, {"prompt_token_ids": ids}, 5], GREEDY)
    assert isinstance(one, Result)
    assert one.token_ids == expected[0]
    assert row.token_ids == expected[1][:2]
    assert [r.token_ids for r in many] == [*expected, []]
    assert [r.prompt for r in many] == [texts[0], texts[1], ids, None]
    assert many[2].prompt is ids
    assert many[3].error
    assert speaker.generate("x" * 200, GREEDY).prompt == "x" * 200  # too long for the model
    assert speaker.generate(iter(texts), GREEDY) == speaker.generate(texts, GREEDY)
    assert speaker.generate([], GREEDY) == []


def test_parameters_of_each_prompt(speaker: Any) -> None:
    texts = ["one", {"prompt": "and two", "max_tokens": 3}]
    expected = expected_of(speaker, ["one", "and two"])
    params = [SamplingParams(2, ignore_eos=True), SamplingParams(5, ignore_eos=True, logprobs=0)]
    first, second = speaker.generate(texts, params)
    assert (first.token_ids, second.token_ids) == (expected[0][:2], expected[1][:3])  # those of a row win
    assert first.logprobs is None
    assert second.logprobs is not None
    assert [r.token_ids for r in sorted(speaker.stream(iter(texts), params), key=lambda r: r.index)] == [
        expected[0][:2], expected[1][:3]
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="params has 1 entries, but prompts has 2; give one SamplingParams for each"):
        speaker.generate(texts, params[:1])
    for prompts, given in (("one", params[:1]), (texts, 5), (texts, [5, 5]), (texts, {"max_tokens": 3})):
        with pytest.raises(InvalidInput, match=r"params is .*; it must be SamplingParams"):
            speaker.generate(prompts, given)


def test_a_stream_keeps_no_results(speaker: Any) -> None:
    kept: list[Any] = []
    for result in speaker.stream(["row"] * 12, SamplingParams(max_tokens=1)):
        kept.append(weakref.ref(result))
        assert result.prompt == "row"
        assert sum(r() is not None for r in kept) <= POLICY.block_size
    del result
    assert len(kept) == 12
    assert all(r() is None for r in kept)


# chat.


def test_chat(speaker: Any) -> None:
    hello = [{"role": "user", "content": "hi"}]
    longer = [*hello, {"role": "bot", "content": "yes"}, {"role": "user", "content": "no"}]
    texts = ["user:hi;bot:", "user:hi;bot:yes;user:no;bot:", "[f]user:hi;bot:"]  # templates write <s> themselves
    plain = [speaker.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected = reference(speaker.reference, plain)
    assert speaker.chat(tuple(hello), GREEDY).token_ids == expected[0]
    one = speaker.chat(hello, GREEDY)
    assert one.token_ids == expected[0]
    assert one.prompt is hello
    assert [r.token_ids for r in speaker.chat([hello, longer], GREEDY)] == expected[:2]
    assert [len(r.token_ids) for r in speaker.chat([hello, longer], [SamplingParams(1), SamplingParams(2)])] == [1, 2]
    assert speaker.chat(hello, GREEDY, tools=[{"name": "f"}]).token_ids == expected[2]
    assert speaker.chat([], GREEDY) == []
    assert speaker.chat([hello, []], GREEDY)[1].error
    for wrong in ("hi", hello[0], 5):
        with pytest.raises(InvalidInput, match="messages is "):
            speaker.chat(wrong)
    with pytest.raises(InvalidInput, match="tools is 'f'; it must be a list"):
        speaker.chat(hello, tools="f")


# score.


def merging_tokenizer(begins: bool) -> Any:
    """A tokenizer of merged bytes, as those of language models, with or without <s> before a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(["the answer is yes, the answer is no. question: what is the answer? \n"] * 9, trainer)
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>"} if begins else {"eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("context", "continuation"), [
    ("the answer is", " yes"), ("the answer is ", "yes"), ("the answer is  \n", "no"), ("the ans", "wer"),
    ("question: ", "what"), ("", "the answer"), ("", " the answer"), ("question", "<s>"),
])  # fmt: skip
def test_text_is_split_as_lm_eval_does(context: str, continuation: str, begins: bool) -> None:
    """TemplateLM's rule, written with the tokenizer's own `encode`."""
    tokenizer = merging_tokenizer(begins)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context_, continuation_ = context[:-spaces], context[-spaces:] + continuation
    else:
        context_, continuation_ = context, continuation
    if context_:
        begin = tokenizer.encode(context_)
        expected = begin, tokenizer.encode(context_ + continuation_)[len(begin) :]
    else:
        expected = [0 if begins else 1], tokenizer.encode(continuation_, add_special_tokens=False)
    assert split(tokenizer, context, continuation) == expected
    assert bool(expected[1]) == (context != "the ans")  # one token with the end of its context: nothing to score


def test_a_continuation_without_a_token_of_its_own_is_named() -> None:
    row = Row(0, 0, {"context": "", "continuation": "<s>"}, scored=True)
    refused = encode_scored(row, merging_tokenizer(True), 9, SamplingParams(), 330)
    assert isinstance(refused, Row)
    assert "continuation is '<s>', which has no token of its own: the tokenizer joins it" in (refused.error or "")


def test_an_empty_context_before_its_own_token() -> None:
    assert split(merging_tokenizer(True), "", "<s>the") == ([0], merging_tokenizer(False).encode("the"))


def test_a_context_that_names_the_first_token_has_it_once() -> None:
    """As in lm-evaluation-harness (`has_bos_prefix`)."""
    tokenizer = merging_tokenizer(True)
    assert split(tokenizer, "<s>the answer", " is") == split(tokenizer, "the answer", " is")


def logprobs_of(engine: Any, begin: list[int], rest: list[int]) -> tuple[list[float], bool]:
    with torch.no_grad():
        logits = engine.reference(torch.tensor([begin + rest])).logits[0, len(begin) - 1 : -1].double()
    found = logits.log_softmax(-1)[range(len(rest)), rest].tolist()
    return found, logits.argmax(-1).tolist() == rest


def test_score(speaker: Any) -> None:
    """Text and ids, one pair and lists, one context of many; log probabilities as transformers."""
    byte = speaker.tokenizer
    pairs = [("the answer is ", "yes"), ("no", " way"), ("", "empty")]
    ids = [(byte("the answer is")["input_ids"], byte(" yes", add_special_tokens=False)["input_ids"]),
           (byte("no")["input_ids"], byte(" way", add_special_tokens=False)["input_ids"]),
           ([0], byte("empty", add_special_tokens=False)["input_ids"])]  # fmt: skip
    found = speaker.score(*map(list, zip(*pairs, strict=True)))
    assert [r.index for r in found] == [0, 1, 2]
    for pair, result in zip(pairs, found, strict=True):
        assert speaker.score(*pair).logprobs == result.logprobs
    for result, (begin, rest), (context, _) in zip(found, ids, pairs, strict=True):
        logprobs, greedy = logprobs_of(speaker, begin, rest)
        assert result.token_ids == rest
        assert [e["logprob"] for e in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
        assert result.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-3)
        assert result.is_greedy == greedy
        assert result.prompt == context
        assert result.prompt_tokens == len(begin)
        by_ids = speaker.score(begin, rest)
        assert by_ids.logprobs == result.logprobs
        assert by_ids.prompt == begin
    first, second = speaker.score("the answer is ", ["yes", "no"])
    assert first.logprobs == found[0].logprobs
    assert second.token_ids == byte(" no", add_special_tokens=False)["input_ids"]
    assert speaker.score([], []) == speaker.score("the", []) == []


def test_greedy_is_what_the_model_would_say(speaker: Any) -> None:
    begin = speaker.tokenizer("and")["input_ids"]
    (said,) = reference(speaker.reference, [begin])
    assert speaker.score(begin, said).is_greedy is True
    assert speaker.score(begin, [*said[:-1], said[-1] ^ 1]).is_greedy is False
    assert Result(0).is_greedy is Result(0).cumulative_logprob is None
    assert speaker.generate("and", SamplingParams(2, logprobs=0)).is_greedy is None


def test_pairs_that_cannot_be_scored(speaker: Any) -> None:
    long, bad, good = speaker.score(["x" * 99, "", "a"], ["b", "", "b"])
    assert "context and continuation have 100 + 1 tokens; the model's context is 96 tokens" in long.error
    assert "continuation is empty; give a text of at least one character" in bad.error
    assert good.error is None
    assert speaker.score([5], [259]).error == "prompt 0: continuation holds 259; token ids lie in [0, 259)"
    for context, continuation, message in (
        (["a", "b"], ["c"], "context has 2 entries, but continuation has 1"), (["a"], "c", "beside one continuation"),
        ("a", [5], "give both as text, or both as token ids"), (5, "c", "context is 5"),
        ("a", 5, "continuation is 5"), ({}, ["c"], "context is {}"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            speaker.score(context, continuation)
    for wrong, said in ((5.0, "continuation is 5.0; it must be text or a list of token ids"), ([5], "give both as")):
        refused, good = speaker.score("a", [wrong, "b"])
        assert said in refused.error
        assert (refused.prompt, good.error) == ("a", None)


def test_a_text_is_scored_in_windows(speaker: Any, tmp_path: Path) -> None:
    """240 bytes in windows of the model's 96 tokens: each byte follows what the model's context can hold before it."""
    text = "".join(chr(97 + 7 * i % 26) for i in range(240))
    ids = speaker.tokenizer(text, add_special_tokens=False)["input_ids"]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text[:5], "name": "short"}) + "\n")
    speaker.run_job(source, output, score=True)
    long, short = map(json.loads, output.read_text().splitlines())
    parts = [([0], ids[:96]), (ids[95:96], ids[96:192]), (ids[240 - 96 - 1 : 192], ids[192:])]
    total = sum(sum(logprobs_of(speaker, *part)[0]) for part in parts)
    assert long["scores"] == [{"logprob": pytest.approx(total, abs=1e-3), "tokens": 240, "is_greedy": False}]
    assert long["text"] == text
    (score,) = short["scores"]
    assert score["logprob"] == pytest.approx(sum(logprobs_of(speaker, [0], ids[:5])[0]), abs=1e-4)
    assert short["name"] == "short"


def test_results_are_reported_as_they_come(speaker: Any) -> None:
    seen = []
    results = speaker.score(["the answer is"] * 2, [" yes", " no"], on_result=seen.append)
    assert sorted(seen, key=lambda result: result.index) == results


# A summary before, and an engine after the end.


def test_a_closed_engine(families: Any) -> None:
    known = families("llama")
    engine = Engine(known.directory, device="cpu", device_mem="1G")
    assert (engine.summary.rows, engine.summary.sweeps, engine.summary.plan) == (0, 0, None)
    begun = engine.stream(known.rows, GREEDY)  # nothing is computed before the first result
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate("a"), lambda: engine.generate(known.rows, GREEDY), lambda: engine.stream(known.rows),
        lambda: next(begun), lambda: engine.score([1], [2]), lambda: engine.chat([{"role": "user", "content": "a"}]),
        lambda: engine.plan(Workload({(3, 4): 1})), lambda: engine.run_job("a.jsonl", "b.jsonl"),
        lambda: engine.use(Lossy()), engine.prepare,
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="this engine is closed; open a new Engine"):
            call()
