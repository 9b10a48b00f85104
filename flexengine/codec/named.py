"""Codecs by name: WEIGHTS, which users select, and CACHES, the codecs of papers for comparison."""

from typing import NamedTuple

from flexengine.codec.base import Codec
from flexengine.codec.groupwise import Groupwise


class KV(NamedTuple):
    """Codecs of keys and values from papers. Jobs use codec.cache instead.

    Attributes:
        keys: codec of K.
        values: codec of V.
        window: tokens per group of keys that runs along the tokens. The newest tokens of a sequence stay unencoded
            until a group is full.
    """

    keys: Codec
    values: Codec
    window: int = 1


# flexgen4 (systems 1.6) groups along the output channel; the others along the input, where errors do less harm.
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

EDGES = Groupwise("int8", 8, 64)  # codec of the embedding and the output projection if the layers are encoded


def _kivi(bits: int) -> KV:
    """Return codecs that group keys by channel and values by token (KIVI, arXiv 2402.02750, section 3)."""
    name = f"kivi{bits}"
    return KV(Groupwise(name, bits, 32, across=True), Groupwise(name, bits, 32), window=32)


def _by_token(name: str, bits: int) -> KV:
    """Return codecs that group keys and values along the elements of a head, token by token (FlexGen)."""
    return KV(Groupwise(name, bits, 64), Groupwise(name, bits, 64))


CACHES: dict[str, KV] = {
    "kivi4": _kivi(4),
    "kivi2": _kivi(2),
    "flexgen8": _by_token("flexgen8", 8),
    "flexgen4": _by_token("flexgen4", 4),
}
