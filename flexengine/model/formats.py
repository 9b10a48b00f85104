"""Formats of encoded weights: which matrices of a model are encoded, and how."""

from collections.abc import Sequence

from flexengine.codec.forms import WeightFormat, make_form
from flexengine.model.linear import FastLinear
from flexengine.model.products import FastConv1D
from flexengine.model.skeleton import ParamRef, Skeleton

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
            if (form := _form(slot, codec)) is not None and not (len(slot.shape) == 2 and form.packed.rows in experts):
                formats[name] = form
    for name, shape in (skeleton.embedding, skeleton.head):
        if name in skeleton.wanted:
            formats[name] = WeightFormat(make_form(EDGES, *shape))
    return formats


def _form(slot: ParamRef, codec: str) -> WeightFormat | None:
    if slot.name == "weight" and isinstance(slot.module, FastLinear | FastConv1D):
        turned = isinstance(slot.module, FastConv1D)
        rows, columns = reversed(slot.shape) if turned else slot.shape
        return WeightFormat(make_form(codec, rows, columns), transposed=turned)
    if slot.of_experts:
        turned = bool(slot.module.is_transposed)
        count, *shape = slot.shape
        return WeightFormat(make_form(codec, *(reversed(shape) if turned else shape)), count, turned)
    return None
