"""What to do about a checkpoint whose tensors do not fit its config."""

import re
from collections.abc import Iterable, Mapping

from flexengine.model.files import PLAIN

_QUANTISED = re.compile(
    r"\.(qweight|qzeros|weight_(packed|scale(_inv)?|scale_2)|(weight\.)?(absmax|quant_map)|SCB|codebooks)$"
)


def remedy_of(
    faults: dict[str, list[str]], wanted: Mapping[str, tuple[int, ...]], have: Iterable[tuple[int, ...]]
) -> str:
    """Return what to do about a checkpoint that does not fit its config.

    Args:
        faults: names of tensors by fault.
        wanted: shapes of the model's tensors.
        have: shapes of the checkpoint's tensors.
    """
    missing, unused = faults["missing"], faults["not used by the model"]
    if faults["in 8 bits without scales"] or any(_QUANTISED.search(name) for name in unused):
        return f"its weights are quantised; {PLAIN}"
    if any(".lora_A." in name or ".base_layer." in name for name in unused):
        return "it holds an adapter of peft: merge it (merge_and_unload), and save the model"
    before = next((name.removesuffix(missing[0]) for name in unused if missing and name.endswith(missing[0])), "")
    if before and {before + name for name in missing} <= {*unused}:
        return f"its tensors are named with {before!r} before the names of the model: rename them without it"
    head = wanted[missing[0]] if len(missing) == 1 and re.search(r"(^lm_head|embed_out)\.", missing[0]) else None
    if head is not None and head in have:
        return 'if the head is the embedding, as where both are tied, put "tie_word_embeddings": true into config.json'
    if len(unused) == sum(map(len, faults.values())):
        return "if they may be left out, load it with transformers and save it again (save_pretrained)"
    return "correct config.json, or download it and the weights again"
