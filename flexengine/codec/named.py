"""Codecs by name: of weights as users give them, and of papers, to compare with."""

from typing import NamedTuple

from flexengine.codec.base import Codec
from flexengine.codec.groupwise import Groupwise


class KV(NamedTuple):
    """How papers store keys and values; what jobs do is codec.cache. window: the newest tokens of a sequence, which
    stay as they are until there are so many: groups of keys that run along the tokens are encoded when they are full.
    """

    keys: Codec
    values: Codec
    window: int = 1


# flexgen4: systems 1.6, groups along the output channel; the others along the input, where errors cost less.
WEIGHTS: dict[str, Groupwise] = {
    codec.name: codec
    for codec in (
        Groupwise("int8", 8, 64),
        Groupwise("int4", 4, 64, fitted=True),
        Groupwise("int3", 3, 64, fitted=True),
        Groupwise("int2", 2, 32, fitted=True),
        Groupwise("flexgen4", 4, 64, across=True),
    )
}

EDGES = Groupwise("int8", 8, 64)  # embedding and output projection, wherever the layers are encoded


def _kivi(bits: int) -> KV:
    """Keys by channel, values by token (KIVI, arXiv 2402.02750, section 3)."""
    name = f"kivi{bits}"
    return KV(Groupwise(name, bits, 32, across=True), Groupwise(name, bits, 32), window=32)


def _by_token(name: str, bits: int) -> KV:
    """Both along the elements of a head, token by token (FlexGen)."""
    return KV(Groupwise(name, bits, 64), Groupwise(name, bits, 64))


CACHES: dict[str, KV] = {
    "kivi4": _kivi(4),
    "kivi2": _kivi(2),
    "flexgen8": _by_token("flexgen8", 8),
    "flexgen4": _by_token("flexgen4", 4),
}
