"""Files of formats: a JSON object that names the format in which each layer of one model stores its matrices.

An example is {"model": "SmolLM2-135M", "layers": 30, "weights": ["int8", "int4", null, ...]}. A strategy file, which
names the formats of each stage's layers, is read, too.
"""

import json
from dataclasses import replace

from flexengine.errors import InvalidInput, shown
from flexengine.lossy import Formats, Lossy
from flexengine.records import read_object

_FIELDS = ("model", "layers", "weights")
_REMEDY = "; flexengine quality --weights mixed --budget SIZE --save-bits FILE.json makes one for a model"


def as_json(model: str, formats: Formats) -> str:
    """Return the content of a file."""
    return json.dumps(dict(zip(_FIELDS, (model, len(formats), list(formats)), strict=True)))


def read(lossy: Lossy, model: str, layers: int) -> Lossy:
    """Return the switches with the formats of the file that `weights` names; unchanged if `weights` names none.

    Raises:
        InvalidInput: the file cannot be read, holds something else, or is of another model.
    """
    if lossy.file is None:
        return lossy
    values = read_object(lossy.file, "file of bits")
    if "stages" in values:
        return _of_strategy(lossy, lossy.file, model, layers)
    if set(values) != set(_FIELDS) or not isinstance(values["weights"], list):
        raise InvalidInput(
            f"file of bits {lossy.file} has the fields {shown(sorted(values))}; it must have model,"
            f" layers, and weights with a format per layer{_REMEDY}"
        )
    if (name := values["model"]) != model:
        raise InvalidInput(
            f"file of bits {lossy.file} is of the model {shown(name)}, but this model is"
            f" {shown(model)}; give the file of this model, or write its name into the file if the model"
            f" was only renamed{_REMEDY}"
        )
    if wrong := next((n for n in (values["layers"], len(values["weights"])) if n != layers), None):
        raise InvalidInput(f"file of bits {lossy.file} has {shown(wrong)} layers, but {model} has {layers}{_REMEDY}")
    try:
        return replace(lossy, weights=tuple(values["weights"]))
    except InvalidInput as error:
        raise InvalidInput(f"file of bits {lossy.file}: {error}") from error


def _of_strategy(lossy: Lossy, path: str, model: str, layers: int) -> Lossy:
    from flexengine.plan.stages import Strategy  # few jobs have one

    found = Strategy.load(path)
    if found.num_layers != layers:
        raise InvalidInput(f"strategy file {path} has {found.num_layers} layers, but {model} has {layers}; plan again")
    return replace(lossy, weights=found.weights if any(found.weights) else None)
