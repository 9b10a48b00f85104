"""Tokenizers of GGUF files. Those with byte-level BPE are split as their merges were learned.

The file names its pre-tokenizer (`tokenizer.ggml.pre`), whose patterns stand in llama.cpp's code (llama-vocab.cpp).
transformers knows some of the names and splits all others like GPT-2. It also respells special tokens in the byte
alphabet, which gives those of DeepSeek new ids beyond the embedding.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.activity import message
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.turn_ends import turn_ends

_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHINESE = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
# Code points, in base 16, of the cased letters that DeepSeek LLM splits at.
_CASED_RANGES = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_CASED_LETTERS = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _CASED_RANGES.split())
_PUNCTUATION = "[!-/:-~！-／：-～‘-‟\u3000-。]+"
_ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
_HUNDREDS = r"(?=(?:{0}{{3}})*(?!{0}))"  # the rest of a number has a multiple of three digits


def _words(letters: str, digits: str, tail: str = _SPACES, marks: str = r"[\r\n]*", other: str = "") -> str:
    """Return the pattern of GPT-4 and its relatives: contractions, words, numbers, punctuation, spaces."""
    return rf"{_CASES}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}\p{{N}}{other}]+{marks}|{tail}"


def _cased(digits: str, suffix: str = rf"{_CASES}?", marks: str = r"[\r\n/]*", without: str = "") -> str:
    """Return the pattern of GPT-4o and its relatives, which splits words before capitals."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"{_UPPER}{without}]", f"{_LOWER}{without}]"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}|{_SPACES}"


_LONG_SPACES = "|".join([r"\s*[\r\n]+", *(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])
_NUMBERS = r"\p{N}{1,3}"
# Patterns by names: every stretch that one matches, and every one between, is split by the next.
_PATTERNS: dict[str, Sequence[str]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9]{3}"),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe jina-es"
    " jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe": (
        _words(r"\p{L}", _NUMBERS),
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (_words(r"\p{L}", r"\p{N}"),),
    "qwen35": (_words(r"[\p{L}\p{M}]", r"\p{N}", other=r"\p{M}"),),
    "seed-coder": (_words(r"\p{L}", r"\p{N}", marks="", other=r"\r\n"),),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        _words(r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", r"\p{N}", r"\s*[\r\n]|\s+(?!\S)|\s+", marks=r"[\r\n/]?"),
    ),
    "minicpm5": (_NUMBERS, _words(r"\p{L}", r"\p{N}+")),
    "jais-2": (_words(r"\p{L}", _NUMBERS, _LONG_SPACES),),
    "tekken": (_cased(r"\p{N}", suffix=""),),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (_cased(_NUMBERS),),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", _cased(_NUMBERS)),
    "kimi-k2": (r"\p{Han}+|" + _cased(_NUMBERS, marks=r"[\r\n]*", without=r"&&[^\p{Han}]"),),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
        _cased(r"\p{N}"),
    ),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?" + _PUNCTUATION, r"\s+$", _CHINESE, r"\p{N}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm": (_NUMBERS, "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK),
    "afmoe": (_NUMBERS + _HUNDREDS.format(r"\p{N}"), _ASIAN, _DEEPSEEK),
    "superbpe": (r"\p{N}+", r"\d{3}" + _HUNDREDS.format(r"\d")),
    "poro-chat bloom gpt3-finnish": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    "chameleon": ("<sentinel:[0-9]+>|IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
}
PATTERNS = {name: patterns for names, patterns in _PATTERNS.items() for name in names.split()}
_LLAMA3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_WHOLE_WORDS = {*_LLAMA3.split(), "tekken", "youtu", "minicpm5", "granite-embed-multi-97m"}  # before merges
_BEGIN = {*_LLAMA3.split(), "tekken", "chameleon"}  # a text begins with <bos> unless the file states otherwise
_COMPOSED = {"qwen2", "qwen35", "command-r", "olmo", "mpt"}  # their tokenizers normalise text to NFC
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_ENDS = ("eos", "eot", "eom")
_GEMMA = ("gemma", "gemma2", "gemma3")  # architectures whose merges follow from the order of their tokens
_written = dict[tuple[int, ...], Any]()  # what `keep_written` was given


def end_tokens(path: Path, values: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text or a turn. values: metadata, with tokens. Raise BadCheckpoint if an id has no
    token."""
    tokens: list[str] = values.get("tokenizer.ggml.tokens") or []
    ends = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDS}
    for key, token in ends.items():
        if token is not None and not (type(token) is int and 0 <= token < (len(tokens) or 2**32)):
            raise BadCheckpoint(f"{path}: {key}_token_id is {token}, but there are {len(tokens):,} tokens")
    written = turn_ends(str(values.get("tokenizer.chat_template", "")), tokens)
    named = (number for number, text in enumerate(tokens if written else ()) if text in written)
    return list(dict.fromkeys([*(token for token in ends.values() if token is not None), *named]))


def byte_level(path: Path, values: Mapping[str, Any]) -> Any:
    """Return the transformers tokenizer of a file with byte-level BPE. values: metadata, with tokens, their types and
    merges. Raise UnsupportedModel if its pre-tokenizer is not known, errors of many types if values are wrong."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    name = values.get("tokenizer.ggml.pre")
    if name is None:
        text = f"{path} does not name its pre-tokenizer (tokenizer.ggml.pre): llama.cpp's default is used"
        effect = "which may split numbers and spaces differently than the model learned"
        message(f"{text}, {effect}; take a file that was made after April 2024", logging.WARNING)
    if (patterns := PATTERNS.get(name or "default")) is None:
        fault = f"{path} splits text by the pre-tokenizer {shown(name)} (tokenizer.ggml.pre), which is not known"
        raise UnsupportedModel(f"{fault}; take the model's safetensors checkpoint, which holds its tokenizer")
    texts, kinds = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.token_type") or ()
    ids = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in (*_SPECIAL, *_ENDS)}
    control = {number for number, kind in enumerate(kinds) if kind == _CONTROL}
    control |= {number for number in ids.values() if number is not None} | {*end_tokens(path, values)}
    user = {number for number, kind in enumerate(kinds) if kind == _USER_DEFINED} - control
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    vocabulary = dict(zip(_spelled(texts, control | user), range(len(texts)), strict=True))
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    for number in sorted(control | user):
        tokenizer.add_tokens([AddedToken(texts[number], normalized=False, special=number in control)])
    special = {f"{short}_token": texts[ids[key]] for key, short in _SPECIAL.items() if ids[key] is not None}
    begin = values.get("tokenizer.ggml.add_bos_token", name in _BEGIN) and "bos_token" in special
    end = values.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=begin,
        add_eos_token=end,
        chat_template=values.get("tokenizer.chat_template"),
        **special,
    )


def _spelled(texts: Sequence[str], added: Collection[int]) -> list[str]:
    """Return the tokens in the byte alphabet, in which merges are written: one visible character for each byte. Added
    tokens keep their spelling, as do tokens that are spelled so already."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet: dict[int, str] = bytes_to_unicode()
    known = set(alphabet.values())
    return [
        text if number in added or known.issuperset(text) else "".join(alphabet[byte] for byte in text.encode())
        for number, text in enumerate(texts)
    ]


def sentencepiece(path: Path, values: Mapping[str, Any]) -> Any:
    """Return the transformers tokenizer of a file with another tokenizer, as transformers builds it from the metadata.
    values: metadata, with tokens, their scores, types and merges. Raise errors of many types if values are wrong."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs
    except ImportError:  # older releases read the file themselves, in some seconds
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    parts = {name: values.get(f"tokenizer.{key}") for key, name in theirs.GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    kind, texts = values["tokenizer.ggml.model"], values["tokenizer.ggml.tokens"]
    given = {name: part for name, part in parts.items() if part is not None}
    architecture = str(values["general.architecture"])
    if kind == "llama" and architecture in _GEMMA and "merges" not in given:
        backend = _gemma(theirs, given)
    else:
        backend, _ = theirs.convert_gguf_tokenizer(architecture, given)
    ids = {short: values.get(f"tokenizer.ggml.{key}_token_id") for key, short in _SPECIAL.items()}
    # A class attribute, as an argument would be copied, which takes a second for the vocabulary of Gemma.
    made = type("TokenizersBackend", (PreTrainedTokenizerFast,), {"_tokenizer": backend})
    return made(
        # The template of Gemma 4 writes <bos> itself; sentencepiece adds it unless the file states otherwise.
        add_bos_token=kind != "gemma4" and values.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        add_eos_token=values.get("tokenizer.ggml.add_eos_token", False),
        chat_template=values.get("tokenizer.chat_template"),
        **{f"{short}_token": texts[number] for short, number in ids.items() if number is not None},
    )


def _gemma(theirs: Any, given: Mapping[str, Any]) -> Any:
    """Return what `gemma_tokenizer` of transformers makes of a file without merges, whose search for merges takes twice
    as long. theirs: its module; given: its arguments."""
    from transformers import GemmaTokenizer

    texts = ["\u2581" * len(text) if " " in text and not text.strip() else text for text in given["tokens"]]
    ids = {text: number for number, text in enumerate(texts)}
    merges = [
        (text[:end], text[end:])
        for text in sorted(ids, key=ids.__getitem__)
        for end in range(len(text) - 1, 0, -1)
        if text[:end] in ids and text[end:] in ids
    ]
    tokenizer = theirs.add_gguf_special_tokens(GemmaTokenizer(vocab=ids, merges=merges), given)
    return theirs.set_split_regex(tokenizer, given).backend_tokenizer


def keep_written(directory: Path, backend: Any) -> None:
    """Keep what was written to a directory's tokenizer.json, until `take_written`. backend: of the tokenizers
    library."""
    _written[_place(directory)] = backend


def take_written(directory: Path) -> Any:
    """Return a class of transformers that makes the tokenizer of a directory without reading its tokenizer.json; None
    if this process did not write that file, or the file has changed. Reading 260,000 tokens takes a second."""
    if (backend := _written.pop(_place(directory), None)) is None:
        return None
    from transformers import PreTrainedTokenizerFast

    def without_file(_: Any, /, trust_remote_code: bool = False, tokenizer_file: object = None, **kwargs: Any) -> Any:
        return kwargs

    members = {"_tokenizer": backend, "convert_to_native_format": classmethod(without_file)}
    return type("TokenizersBackend", (PreTrainedTokenizerFast,), members)


def _place(directory: Path) -> tuple[int, ...]:
    """Return what tells the tokenizer.json of a directory from others, whatever the directory is called."""
    try:
        about = (directory / "tokenizer.json").stat()
    except OSError:
        return ()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
