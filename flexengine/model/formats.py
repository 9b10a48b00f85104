"""Formats of encoded weights: which matrices of a model are encoded, and how."""

from collections.abc import Sequence

from flexengine.codec.forms import WeightFormat, make_form
from flexengine.model.skeleton import Skeleton

EDGES = "int8"  # format of embedding and output projection if layers are encoded


def forms(skeleton: Skeleton, codecs: str | Sequence[str | None] | None) -> dict[str, WeightFormat]:
    """Return the format of every matrix that is encoded: those of layers in `codecs`, embedding and head in EDGES.

    Routers, which choose the experts of a token, are not encoded: they are small, and a wrong choice does much harm.

    Args:
        skeleton: the model, or a range of its layers.
        codecs: a name in codec.forms.FORMS, or one for each layer of the whole model, of which None encodes nothing
            in its layer; None encodes nothing at all.
    """
    if codecs is None:
        return {}
    formats: dict[str, WeightFormat] = {}
    for number, layer in enumerate(skeleton.layers, skeleton.first):
        codec = codecs if isinstance(codecs, str) else codecs[number]
        if codec is None:
            continue
        experts = {slot.shape[0] for slot in layer.values() if slot.of_experts}
        for name, slot in layer.items():
            if slot.matrix is not None:
                count, rows, columns, turned = slot.matrix
                if count or rows not in experts:
                    formats[name] = WeightFormat(make_form(codec, rows, columns), count, turned)
    for name, shape in (skeleton.embedding, skeleton.head):
        if name in skeleton.wanted:
            formats[name] = WeightFormat(make_form(EDGES, *shape))
    return formats
