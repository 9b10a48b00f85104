"""Why transformers cannot build a model from its config. Imported when that has failed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flexengine.errors import shown
from flexengine.model.config import SIZES, entries, parts, stated_sizes
from flexengine.model.files import AGAIN

# What transformers calls kinds.
_WORDS = {"int": "a whole number", "float": "a number with a point, such as 1.0", "str": "a string", "list": "a list"}
_WORDS |= {"bool": "true or false", "NoneType": "null", "dict": "an object"}


def config_fault(error: Exception, values: Mapping[str, Any]) -> str:
    """Return why transformers cannot build a model. values: its config.

    transformers looks names up in tables, and the text of their errors is only the name: the key that has it is added.
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if fault := _field_fault(text, values):
        return f"config.json {fault}; correct it, or {AGAIN}"
    name = text if isinstance(error, KeyError) else text.removeprefix("module 'torch' has no attribute ").strip("'")
    if " " in name or not name:
        return text or repr(error)
    keys = [key for key, value in entries(values) if value in (name, f"torch.{name}")]
    if keys:
        return f"config.json sets {keys[0]} to {shown(name)}, which transformers does not know; correct it"
    return f"config.json lacks {shown(name)}, or sets it to what transformers does not know ({type(error).__name__})"


def odd_sizes(config: Any) -> str:
    """Return the sizes of a transformers config that are 0 or less, and not so by default, as the end of a message on
    why the model cannot be computed; "" if there are none. Some models may have such a size."""
    try:
        changed = config.to_diff_dict()
    except Exception:  # the defaults of some families contradict themselves
        return ""
    odd = dict.fromkeys(
        f"{key} to {value}"
        for part in parts(changed)
        for key, value in part.items()
        if type(value) in (int, float) and value <= 0 and (SIZES.search(key) or key.endswith(("window", "step")))
    )
    return f"; config.json sets {' and '.join(odd)}, which may be why: correct it" if odd else ""


def _field_fault(text: str, values: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, by the text of an error of transformers; "" if the text names none."""
    sizes = stated_sizes(values)
    if field := re.match(r"Validation error for field '(\w+)'", text):
        named = re.findall(r"' expected (\w+)", text)
        kinds = dict.fromkeys(_WORDS.get(kind, kind) for kind in named)
        stated = [value for value in _stated(values, field[1]) if type(value).__name__ not in named]
        what = f"sets {field[1]} to {shown(stated[0])}" if len(stated) == 1 else f"has a wrong {field[1]}"
        return what + (f"; it must be {' or '.join(kinds)}" if kinds else "")
    if "does not recognize this architecture" in text:
        return f"sets model_type to {shown(values.get('model_type'))}, which the installed transformers does not know"
    if "Padding_idx" in text:
        for part in parts(values):
            pad, (_, vocabulary) = part.get("pad_token_id"), stated_sizes(part).get("vocab_size", ("", None))
            if isinstance(pad, int) and isinstance(vocabulary, int) and pad >= vocabulary:
                return f"sets pad_token_id to {pad}, but vocab_size to {vocabulary}; token ids must be below vocab_size"
        return "has a pad_token_id that is not below vocab_size"
    if re.search("multiple of|divisible by", text) and {"hidden_size", "num_attention_heads"} <= sizes.keys():
        (width, columns), (heads, number) = sizes["hidden_size"], sizes["num_attention_heads"]
        if isinstance(columns, int) and isinstance(number, int) and number > 0 and columns % number:
            return f"sets {width} to {columns} and {heads} to {number}; {width} must be a multiple of {heads}"
    return f"contradicts itself: {text.rpartition('Error: ')[2]}" if text.startswith("Class validation") else ""


def _stated(values: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key, at any depth."""
    if isinstance(values, Mapping) and key in values:
        yield values[key]
    for part in values.values() if isinstance(values, Mapping) else ():
        yield from _stated(part, key)
