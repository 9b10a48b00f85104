"""Tokenizers of GGUF files with byte-level BPE, compared with tokenizers that are built as the originals are."""

import json
import logging
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model import gguf_pre
from flexengine.model.source import resolve
from flexengine.model.tokenizer import load_tokenizer
from tests.helpers.tiny_gguf import SHAPE, gguf_tensors, tiny_model, write_gguf

TEXTS = (
    "What is 3333+777? 1234567",
    "Steps:\n\n1. one\n\n 2. two\r\n",
    "I'LL WAIT, they've GONE; helloWorld",
    "    x\n\n  y  ",
    "東京は大きい 2024年、です。 12",
    "naïve café a\u0301b ½² \u0d05\u0d3e",
    "a/b//c\n/d != (e)  \t\n",
    "한국어 ไทย\u3000Ω",
    " 1 12 123",
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def values(pre: str | None = "gpt-2", added: tuple[tuple[str, int], ...] = (), **more: object) -> dict[str, object]:
    """Metadata of a file whose tokens are the bytes, "ab", "abc" (which no merge makes) and added ones."""
    texts = [*ALPHABET, "ab", "abc", *(text for text, _ in added)]
    return {
        **({"tokenizer.ggml.pre": pre} if pre else {}),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [1] * (len(texts) - len(added)) + [kind for _, kind in added],
        "tokenizer.ggml.merges": ["a b"],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def built(*args, **kwargs):
    return gguf_pre.byte_level(Path("m.gguf"), values(*args, **kwargs))


def pieces(pre: str, text: str) -> list[str]:
    """Parts into which text is split, in the byte alphabet."""
    return [part for part, _ in built(pre).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def by(*steps: object) -> list[list[str]]:
    """Parts of TEXTS by steps of the tokenizers library; a string is the pattern of a split."""
    parts = [pre_tokenizers.Split(Regex(x), "isolated") if isinstance(x, str) else x for x in steps]
    if isinstance(steps[-1], str):
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    whole = pre_tokenizers.Sequence(parts)
    return [[part for part, _ in whole.pre_tokenize_str(text)] for text in TEXTS]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM = (pre_tokenizers.Digits(individual_digits=True), GPT2)
# As in the tokenizer.json of the originals.
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")


@pytest.mark.parametrize(
    ("pre", "steps"),
    [("gpt-2", [GPT2]), ("olmo", [GPT2]), ("smollm", SMOLLM), ("starcoder", SMOLLM), ("command-r", SMOLLM),
     ("deepseek-v3", DEEPSEEK3), ("hunyuan-dense", DEEPSEEK3), ("deepseek-coder", CODER)],
)  # fmt: skip
def test_text_is_split_as_by_the_original_tokenizer(pre, steps):
    assert [pieces(pre, text) for text in TEXTS] == by(*steps)


def test_text_is_split_as_by_transformers_where_it_knows_the_name():
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    assert not set(known) - set(gguf_pre.PATTERNS)
    for pre, pattern in known.items():
        assert [pieces(pre, text) for text in TEXTS] == by(pattern), pre


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("superbpe", "by the 1234567", ["byĠtheĠ", "1", "234", "567"]),
        ("afmoe", "12345 ab", ["12", "345", "Ġab"]),
        ("tiny_aya", "1234567 aB", ["1", "234", "567", "Ġa", "B"]),
        ("kimi-k2", "aB 中文x 1234", ["a", "B", "Ġ", "ä¸Ńæĸĩ", "x", "Ġ", "123", "4"]),
        ("deepseek-llm", "a 12\n\nb", ["a", "Ġ", "1", "2", "Ċ", "Ċ", "b"]),
        ("falcon", "a1234!b", ["a", "123", "4", "!", "b"]),
        ("default", "x 12 1234", ["x", "Ġ", "12", "Ġ", "123", "4"]),
        ("falcon", "a `b", ["a", "Ġ", "`", "b"]),
        ("default", "a `b", ["a", "Ġ`", "b"]),
        ("viking", "ab 12.c", ["ab", "Ġ", "1", "2", ".", "c"]),
        ("bloom", "ab 12.c", ["ab", "Ġ12", ".", "c"]),
        ("chameleon", "a  b,1", ["a", "ĠĠ", "b", ",", "1"]),
        ("minicpm5", "a1234", ["a", "123", "4"]),
        ("jais-2", "a     b", ["a", "ĠĠĠĠ", "Ġb"]),
        ("youtu", "中aB12", ["ä¸Ń", "a", "B", "1", "2"]),
        ("exaone-moe", "a b 1\n\nc", ["aĠb", "Ġ", "1", "ĊĊ", "c"]),
        ("bailingmoe", "a\n\nb1", ["a", "ĊĊ", "b", "1"]),
        ("seed-coder", "a!\n12", ["a", "!", "Ċ", "1", "2"]),
    ],
)
def test_what_each_kind_of_pattern_splits(pre, text, expected):
    assert pieces(pre, text) == expected


def test_every_known_pattern_keeps_all_text():
    for pre in gguf_pre.PATTERNS:
        tokenizer, composed = built(pre), pre in gguf_pre._COMPOSED
        for text in TEXTS:
            kept = unicodedata.normalize("NFC", text) if composed else text
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == kept, (pre, text)


def test_an_unknown_pre_tokenizer_is_refused_and_a_missing_one_named(caplog):
    with pytest.raises(UnsupportedModel, match=r"m\.gguf splits text by the pre-tokenizer 'brand-new'.*safetensors"):
        built("brand-new")
    with caplog.at_level(logging.WARNING):
        assert built(None)("12 1234")["input_ids"] == built("default")("12 1234")["input_ids"]
    assert "does not name its pre-tokenizer" in caplog.text


def test_added_tokens_keep_their_ids_whatever_their_letters():
    added = (("<｜begin▁of▁sentence｜>", 3), ("<think>", 4), ("  ", 4), ("[PAD7]", 5), ("<｜end｜>", 1))
    first = len(ALPHABET) + 2
    tokenizer = built("deepseek-v3", added, bos_token_id=first, eos_token_id=first + 4, add_bos_token=True)
    assert tokenizer("<think>a  b")["input_ids"][:3] == [first, first + 1, ALPHABET.index("a")]
    assert tokenizer("a  b")["input_ids"][2] == first + 2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (first, first + 4, first + 5)
    assert tokenizer.decode([first, first + 1, first + 4], skip_special_tokens=True) == "<think>"


def test_flags_and_their_defaults():
    bos = {"added": (("<s>", 3),), "bos_token_id": len(ALPHABET) + 2}
    for pre, begins in {"llama-bpe": True, "qwen2": False, "tekken": True}.items():
        assert (built(pre, **bos)("a")["input_ids"][0] == bos["bos_token_id"]) == begins
    assert built("llama-bpe", **bos, add_bos_token=False)("a")["input_ids"] == [ALPHABET.index("a")]
    assert built("gpt-2", **bos, add_bos_token=True)("a")["input_ids"][0] == bos["bos_token_id"]
    whole, merged = built("llama-bpe")("abc")["input_ids"], built("gpt-2")("abc")["input_ids"]
    assert (whole, merged) == ([len(ALPHABET) + 1], [len(ALPHABET), ALPHABET.index("c")])  # no merge makes the word
    composed, apart = (built(pre)("e\u0301")["input_ids"] for pre in ("qwen2", "gpt-2"))
    assert (len(composed), len(apart)) == (2, 3)


@pytest.mark.parametrize(
    ("ids", "template", "expected"),
    [
        ({"eos": 0}, "", [0]),
        ({"eos": 0, "eot": 1, "eom": 2}, "", [0, 1, 2]),
        ({"eos": 0}, "{{ '<|eot_id|>' }}", [0, 1]),
        ({"eos": 1}, "{{ '<|eot_id|>' }}", [1]),
        ({"eos": 0}, "{{ '<|end|>' }}", [0]),
        ({}, "", []),
    ],
)
def test_end_tokens(ids, template, expected):
    named = {f"tokenizer.ggml.{key}_token_id": token for key, token in ids.items()}
    tokens = ["</s>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"]
    given = {**named, "tokenizer.chat_template": template, "tokenizer.ggml.tokens": tokens}
    assert gguf_pre.end_tokens(Path("m.gguf"), given) == expected


def test_an_end_of_a_turn_is_one_token_whatever_its_type():
    given = {**values("qwen2", (("<|im_end|>", 1),)), "tokenizer.chat_template": "{{ '<|im_end|>' }}"}
    ids = gguf_pre.byte_level(Path("m.gguf"), given)("a<|im_end|>")["input_ids"]
    assert ids == [ALPHABET.index("a"), len(ALPHABET) + 2]


def test_an_end_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(BadCheckpoint, match=r"eot_token_id is 9, but there are 1 tokens"):
        gguf_pre.end_tokens(Path("m.gguf"), {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.tokens": ["a"]})


@pytest.mark.usefixtures("cache")
def test_a_converted_file_has_the_tokenizer_and_the_ends_of_its_metadata(tmp_path):
    count = SHAPE["vocab_size"]
    texts = [*ALPHABET[: count - 3], "AB", "<s>", "<|im_end|>"]

    def extra(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(texts)
        writer.add_token_types([1] * (count - 2) + [3, 3])
        writer.add_token_merges(["A B"])
        writer.add_eot_token_id(count - 1)

    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors("llama", tiny_model("llama")), extra=extra)
    directory = resolve(str(path)).directory
    reference = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, [("A", "B")]))
    reference.pre_tokenizer = pre_tokenizers.Sequence(list(SMOLLM))
    assert load_tokenizer(directory)("AB12 X")["input_ids"] == reference.encode("AB12 X").ids
    assert GenerationConfig.from_pretrained(directory).eos_token_id == [7, count - 1]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("space", [True, False])
def test_the_first_space_of_sentencepiece_follows_the_flag(tmp_path, space):
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(32, 122)), "▁", "a", "▁a"]
    assert len(texts) == SHAPE["vocab_size"]

    def extra(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([-float(number) for number in range(len(texts))])
        writer.add_token_types([2, 3, 3, *[6] * 90, 1, 1, 1])
        writer.add_bos_token_id(1)
        writer.add_add_space_prefix(space)

    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors("llama", tiny_model("llama")), extra=extra)
    directory = resolve(str(path)).directory
    kept, tokenizer = load_tokenizer(directory), load_tokenizer(directory)  # the second one is read from the file
    assert kept.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (kept.init_kwargs, kept("a a<s>")) == (tokenizer.init_kwargs, tokenizer("a a<s>"))
    ids = tokenizer("a a")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁a" if space else "a", "▁a"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a a"
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("a a", "a<s>a</s> a", " a", "A 7 a!") if space else ():
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert (tokenizer.special_tokens_map, len(tokenizer)) == (theirs.special_tokens_map, len(theirs))
    assert json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]["type"] == "Metaspace"


def test_the_merges_of_gemma_are_those_that_transformers_finds():
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    drawn = random.Random(0)
    words = {"".join(drawn.choices("ab▁é", k=drawn.randint(1, 6))) for _ in range(400)}
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "  ", "    ", "[x]"]
    texts = [*special, *sorted(words, key=lambda word: word[::-1]), "ab", "<ü>"]
    given = {"tokenizer_type": "llama", "tokens": texts, "token_type": [3] * 5 + [4] * 3 + [1] * len(words) + [1, 3]}
    backend, _ = theirs.convert_gguf_tokenizer("gemma3", given)
    ours = gguf_pre._gemma(theirs, given)
    assert json.loads(ours.to_str()) == json.loads(backend.to_str())
    assert len(json.loads(ours.to_str())["model"]["merges"]) > 300
