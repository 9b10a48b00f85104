"""Formats of weights that are encoded in the checkpoint, for the explanation of a plan."""

from collections import Counter

from flexengine.errors import format_words
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import percent


def form_words(model: ModelFacts) -> list[str]:
    """Return a line on the formats of weights that are encoded in the checkpoint, with bits per number, if any is."""
    nbytes, elements = Counter[str](), Counter[str]()
    for tensor in model.tensors:
        name = (tensor.form if tensor.encoded else "").partition(" ")[0]
        nbytes[name] += tensor.stored_bytes
        elements[name] += tensor.elements
    names = [name for name, _ in nbytes.most_common() if name and not name.startswith("int")]
    shares = [
        f"{format_words(n)}, {8 * nbytes[n] / elements[n]:.3g} bits ({percent(nbytes[n] / nbytes.total())})"
        for n in names
    ]
    return [f"weights as in the file: {'; '.join(shares)}"] if shares else []
