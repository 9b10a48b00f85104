"""Text and tokens that a model cannot have are errors of their rows, found before much is computed. What the tokenizer
itself makes of a whole text is the judge."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.engine.scoring import encode_scored
from flexengine.errors import InvalidInput
from flexengine.job.bounds import MOST_CHARACTERS, PIECE_CHARACTERS, BoundedTokenizer, most_characters
from flexengine.job.chats import chat_fault
from flexengine.job.rows import Request, Row, encode
from flexengine.model.tokenizer import token_ids
from tests.helpers.tokenizers import byte_tokenizer

PARAMS = SamplingParams(max_tokens=1)
CONTEXT = 1000
SPACE = "\u0120"  # a space, as byte-level tokenizers write it


class PanicException(BaseException):
    """As the tokenizers library raises it."""


def long_tokens() -> PreTrainedTokenizerFast:
    """As Llama 3 and Qwen: bytes, and spaces that join up to 64."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(SPACE * 2**i, SPACE * 2**i) for i in range(6)]
    vocabulary |= {left + right: len(vocabulary) + i for i, (left, right) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT: white space is dropped, and a long unknown word is one token."""
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]", max_input_chars_per_word=100))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def stripping() -> PreTrainedTokenizerFast:
    """As Phi-3 and RoBERTa: an added token takes the white space around it."""
    made = long_tokens()
    made.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)], special_tokens=True)
    return made


FITTING = {
    "joined spaces": (long_tokens, " " * (64 * CONTEXT - 200)),
    "dropped spaces": (word_pieces, " " * 500_000 + "a"),
    "unknown words": (word_pieces, "b" * 500_000),
    "stripped": (stripping, " " * 300_000 + "<mask>" + "\n" * 300_000),
}


@pytest.mark.parametrize("name", FITTING)
def test_long_text_that_fits_is_tokenized(name: str) -> None:
    maker, text = FITTING[name]
    tokenizer, ids = maker(), maker()(text)["input_ids"]
    assert len(text) > PIECE_CHARACTERS * 0.9
    assert 0 < len(ids) < CONTEXT
    assert BoundedTokenizer(tokenizer, CONTEXT)(text)["input_ids"] == ids


@pytest.mark.parametrize("seed", range(20))
def test_no_text_is_refused_that_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is just as long as random text, which is counted in many pieces."""
    for name, value in (("PIECE_CHARACTERS", 2000), ("_CHARACTERS_PER_TOKEN", 0), ("_CUT_TOKENS", 128)):
        monkeypatch.setattr(f"flexengine.job.bounds.{name}", value)
    rng = random.Random(seed)
    maker = rng.choice([long_tokens, word_pieces, stripping])
    tokenizer = maker()
    parts = [" " * 30, "a", "bc ", "\n\n", "<mask>", "\u00e9", "d" * 50, "."]
    text = "".join(rng.choice(parts) for _ in range(3000))
    ids = tokenizer(text)["input_ids"]
    assert BoundedTokenizer(tokenizer, len(ids))(text)["input_ids"] == ids
    if maker is long_tokens:  # the others have too few tokens in a piece
        with pytest.raises(InvalidInput, match="more tokens than the model's context"):
            BoundedTokenizer(tokenizer, len(ids) // 3)(text)


@pytest.mark.parametrize(("text", "most"), [("word " * 4_000_000, 1), (" " * 19_999_999 + "a", 4)])
@pytest.mark.parametrize("maker", [long_tokens, stripping])
def test_text_far_beyond_the_context_is_refused_after_its_first_pieces(maker: Any, text: str, most: int) -> None:
    """most: pieces."""
    read = list[str]()

    class Counting:
        def __init__(self) -> None:
            self.inner = maker()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, text: str, **options: Any) -> Any:
            read.append(text)
            return self.inner(text, **options)

    row = encode(Row(0, 1, {"prompt": text}), Counting(), CONTEXT, PARAMS, 400)
    assert isinstance(row, Row)
    assert f"text of 20,000,000 characters has more tokens than the model's context of {CONTEXT:,}" in str(row.error)
    assert len(read) <= most
    assert max(map(len, read)) == PIECE_CHARACTERS


@pytest.mark.parametrize("fields", [{"text": "a"}, {"prompt": "a"}, {"context": "a", "continuation": "a"}], ids=str)
def test_text_that_takes_more_than_the_engines_memory(fields: dict[str, Any]) -> None:
    assert [most_characters(memory) for memory in (None, 1, 30 * 10**6)] == [1 << 23, 1 << 16, 100_000]
    row = Row(0, 1, {name: value * 100_001 for name, value in fields.items()}, scored="prompt" not in fields)
    found = (encode_scored if row.is_scored else encode)(
        row, word_pieces(), 1 << 40, PARAMS, 3, most=most_characters(30 * 10**6)
    )
    assert isinstance(found, Row)
    remedy = "characters is more than the 100,000 that are tokenized at once; cut it into several rows, or give the en"
    assert remedy in str(found.error)


@pytest.mark.parametrize(("fields", "context"), [
    ({"text": "a"}, 100), ({"prompt": "a"}, 1 << 40), ({"context": "a", "continuation": "a"}, 1 << 40),
    ({"prompt": " "}, 100),
], ids=str)  # fmt: skip
def test_text_beyond_what_is_tokenized_at_once(
    fields: dict[str, Any], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that may be longer than the context, of models without a limit, and of white space that is dropped."""
    assert 300 * MOST_CHARACTERS < 2.6e9
    monkeypatch.setattr("flexengine.job.bounds.MOST_CHARACTERS", 1 << 17)
    tokenizer = word_pieces()
    tokenizer.eos_token = "a"
    fields = {name: value * 139_999 + "a" for name, value in fields.items()}
    row = Row(0, 1, fields, scored="prompt" not in fields)
    found = (encode_scored if row.is_scored else encode)(row, tokenizer, context, PARAMS, 3)
    assert isinstance(found, Row)
    assert "0,000 characters is more than the 131,072 that are tokenized at once; cut it into several" in str(
        found.error
    )


# Tokens that the model does not have. <note> is the id 259, and the model has 259 tokens.
NOTE, SIZE = "<note>", 259
REASON = f"the text has the token '{NOTE}' with the id {SIZE}, which is beyond the model's vocabulary"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def noting(template: str = TEMPLATE) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(NOTE)])
    assert len(tokenizer) == SIZE + 1
    return tokenizer


def error_of(fields: dict[str, Any], tokenizer: Any, chat: bool = False) -> str | None:
    row = Row(0, 1, fields, chat=chat, scored="prompt" not in fields and "messages" not in fields)
    encoder = encode_scored if row.is_scored else encode
    found = encoder(row, tokenizer, 100, PARAMS, SIZE)
    return found.error if isinstance(found, Row) else None


@pytest.mark.parametrize("fields", [
    {"prompt": "a {}"}, {"messages": [{"role": "user", "content": "a {}"}]}, {"context": "a {}", "continuation": "b"},
    {"context": "a", "continuation": "b {}"}, {"context": "", "continuation": "{} b"},
    {"context": "a", "choices": ["b", "c", "{}"]}, {"text": "a {} b"},
], ids=str)  # fmt: skip
def test_tokens_beyond_the_embedding_are_errors_of_their_rows(fields: dict[str, Any]) -> None:
    def filled(value: Any, text: str) -> Any:
        if isinstance(value, dict):
            return {name: filled(each, text) for name, each in value.items()}
        return [filled(each, text) for each in value] if isinstance(value, list) else value.replace("{}", text)

    assert REASON in str(error_of(filled(fields, NOTE), noting()))
    assert error_of(filled(fields, "note"), noting()) is None


def test_a_template_that_writes_such_a_token() -> None:
    assert REASON in str(error_of({"prompt": "a"}, noting(NOTE + TEMPLATE), chat=True))
    assert error_of({"prompt": "a"}, noting(NOTE + TEMPLATE)) is None


def test_a_first_token_beyond_the_embedding() -> None:
    tokenizer = noting()
    tokenizer.bos_token = NOTE
    for fields in ({"context": "", "continuation": "a"}, {"text": "a"}, {"context": [], "continuation": [5]}):
        assert "beyond the model's vocabulary" in str(error_of(fields, tokenizer))


class Failing:
    """Fails with a given error in one of the methods of a tokenizer."""

    def __init__(self, inner: Any, error: BaseException) -> None:
        self.inner, self.error = inner, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("fields", [
    {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"context": "a", "continuation": "b"},
    {"context": "a", "choices": ["b"]}, {"text": "a"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("error", [PanicException("regex"), RecursionError("deep"), MemoryError()], ids=repr)
def test_any_error_of_a_tokenizer_is_one_of_its_row(fields: dict[str, Any], error: BaseException) -> None:
    found = str(error_of(fields, Failing(noting(), error)))
    assert f"cannot be tokenised: {type(error).__name__}" in found
    assert found.startswith("line 1: ")
    with pytest.raises(KeyboardInterrupt):
        error_of(fields, Failing(noting(), KeyboardInterrupt()))


def test_a_panic_at_the_first_message() -> None:
    assert "PanicException: regex" in str(chat_fault(Failing(noting(), PanicException("regex"))))
    with pytest.raises(KeyboardInterrupt):
        chat_fault(Failing(noting(), KeyboardInterrupt()))


def test_a_panic_of_the_library_itself() -> None:
    """Its regular expressions give up after many steps, as those of Llama 3 do on 11 million spaces."""
    tokenizer = byte_tokenizer()
    pattern = Regex(r"(?:\s|\s)*\r|\s+")
    splits = [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    row = encode(Row(0, 1, {"prompt": " " * 60 + "a"}), tokenizer, 100, PARAMS, SIZE)
    assert isinstance(row, Row)
    assert "prompt cannot be tokenised: PanicException: " in str(row.error)
    assert isinstance(encode(Row(1, 2, {"prompt": "a"}), tokenizer, 100, PARAMS, SIZE), Request)


def test_the_message_of_a_panic_is_an_error_of_the_package() -> None:
    with pytest.raises(InvalidInput, match="PanicException"):
        token_ids(Failing(noting(), PanicException("x")), "a", special=False)
