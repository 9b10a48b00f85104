"""A tokenizer of bytes."""

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def byte_tokenizer(directory: Path | None = None) -> Any:
    """A token per byte, from 3 on; <s> before every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2} | {c: 3 + i for i, c in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    if directory is not None:
        made.save_pretrained(directory)
    return made
