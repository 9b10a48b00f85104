"""Numbers of rotary positions that a config states wrongly. Imported if one of them is no number of at least 1."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexengine.errors import BadCheckpoint, shown
from flexengine.model.files import AGAIN

_TABLES = ("rope_parameters", "rope_scaling")  # of transformers 5, and of earlier ones
_ABOVE_0 = ("rope_theta", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_LISTS = ("short_factor", "long_factor")
# transformers only warns of these, and computes with them or fails in a product.
_LEAST = dict.fromkeys(("factor", "original_max_position_embeddings"), 1)
_LEAST |= dict.fromkeys(("attention_factor", "attn_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"), 0)


def check_rope(path: Path, values: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint for the first number of rotary positions that is none, or out of its range; null is none.
    path: of config.json, for the message. values: the whole config."""
    for name, key, value in _settings_in(values, ""):
        many = key in _LISTS
        numbers = value if many and isinstance(value, list) else [value]
        least = _LEAST.get(key)
        good = all(_number(x) and (x > 0 if least is None else x >= least) for x in numbers)
        if good and many == isinstance(value, list):
            continue
        kind = "a list of numbers" if many else "a number"
        must = f"{kind} above 0" if least is None else f"{kind} of at least {least}"
        raise BadCheckpoint(f"{path} sets {name} to {shown(value)}; it must be {must}: correct it, or {AGAIN}")


def _settings_in(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name with its tables, such as rope_parameters.factor, the key and the value of each known setting.
    Outside of the tables a config has names of its own, of which only two are of rotary positions."""
    inside = any(name in before for name in _TABLES)
    known = {*_ABOVE_0, *_LISTS, *_LEAST} if inside else {"rope_theta", "partial_rotary_factor"}
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings_in(value, f"{before}{key}.")
        elif key in known and value is not None:
            yield f"{before}{key}", key, value


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
