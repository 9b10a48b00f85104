"""Bodies of messages in MessagePack: records come back with their types, and nothing is executed."""

from functools import cache
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from flexengine.guests.wire.link import Broken
from flexengine.places import Lane, Place

T = TypeVar("T")


def pack(values: Any) -> Tensor:
    """Return values as uint8 [bytes]: numbers, text, lists, dicts, dataclasses and named tuples; places and lanes by
    their names."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(values, enc_hook=_name)), dtype=torch.uint8)


def _name(value: object) -> str:
    if isinstance(value, Place | Lane):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be packed")


def unpack(body: Tensor, kind: type[T]) -> T:
    """Return the values in a body. Raise Broken if they are not of a type.

    Args:
        body: uint8 [bytes], from `pack`.
        kind: the type, such as a dataclass or dict[str, int].
    """
    try:
        values: T = _decoder(kind).decode(memoryview(body.numpy()))  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise Broken(f"a message is no {kind.__name__} ({error})") from error
    return values


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
