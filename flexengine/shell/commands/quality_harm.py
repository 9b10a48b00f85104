"""flexengine quality --harm FILE: how much each format of weights harms each layer, for plans over several devices."""

import json
from typing import TYPE_CHECKING, Any

from flexengine.shell.commands.messages import table

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine


def harm_of(engine: "Engine") -> dict[str, Any]:
    """Return the content of a file of harm (docs/cluster.md), measured unless the cache has it. engine: an engine of
    the model whose weights are fitted to a calibration text."""
    from flexengine.guests.harms import measured, variance  # imported here, as they import torch

    core, calibrator = engine.core, engine.calibrator
    return {
        "model": core.source.name,
        "layers": measured(core, calibrator),
        "variance": variance(core, calibrator),
    }


def harm_text(harm: dict[str, Any]) -> str:
    """Return the content of a file of harm, with a line for each layer."""
    lists = ",\n".join(f' "{name}": [\n  {_lines(harm[name])}\n ]' for name in ("layers", "variance"))
    return f'{{\n "model": {json.dumps(harm["model"])},\n{lists}\n}}'


def _lines(rows: list[dict[str, float]]) -> str:
    return ",\n  ".join(json.dumps({name: float(f"{x:.6g}") for name, x in row.items()}) for row in rows)


def harm_table(harm: dict[str, Any]) -> str:
    """Return the numbers as a table, a line for each layer."""
    formats = [*harm["layers"][0]]
    rows = [("layer", *formats, *(f"{name}, variance" for name in formats))]
    for number, (own, other) in enumerate(zip(harm["layers"], harm["variance"], strict=True)):
        rows.append((str(number), *(f"{row[name]:.3g}" for row in (own, other) for name in formats)))
    return table(rows, right=range(len(rows[0])))
