"""The strategy of a pipeline: which device computes which layers, in which formats. A strategy is also a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from flexengine.errors import InvalidInput
from flexengine.policy import MOST_SEQUENCES, Policy
from flexengine.records import Limit, check, load, printable, read, refuse

FORMATS = (None, "int8", "int4", "int3")  # of a layer's matrices, from exact to coarse; None: the checkpoint's numbers
BITS = {None: 16, "int8": 8, "int4": 4, "int3": 3}
MOST_LAYERS = 10_000
_Count = Annotated[int, Limit(1, MOST_SEQUENCES)]
_REMEDY = "make a strategy with flexengine plan --cluster --save"


def _layers(name: str, value: Any) -> tuple[int, int]:
    first, end = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if not (type(first) is int and type(end) is int and 0 <= first < end <= MOST_LAYERS):
        refuse(name, value, f"[first, end] with 0 <= first < end <= {MOST_LAYERS:,}")
    return first, end


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline.

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.
    """

    device: Annotated[str, printable]  # name of the device, as in the cluster file
    # (first, end) of the layers that the stage computes; `end` is not among them
    layers: Annotated[tuple[int, int], _layers]
    # for each of these layers, the format of its matrices, from FORMATS
    weights: tuple[Annotated[str | None, FORMATS[1:], ", or null (exact)"], ...]
    # block shape and placement on this device; None for the planner's choice on the device itself
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check(self)
        if len(self.weights) != self.count:
            raise InvalidInput(f"weights hold {len(self.weights)} formats, but layers {list(self.layers)} are"
                               f" {self.count}; give one format per layer")  # fmt: skip

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return self.layers[1] - self.layers[0]

    @property
    def runs(self) -> list[tuple[str | None, int]]:
        """Return the formats in the order of the layers, as (format, number of layers in a row)."""
        return [(name, len(list(same))) for name, same in groupby(self.weights)]


@dataclass(frozen=True)
class Strategy:
    """Stages of a pipeline, and sizes of the batches that pass through them.

    Raises:
        InvalidInput: a value is not allowed, or the stages do not hold each layer once, in order.
    """

    model: Annotated[str, printable]  # shape of the model that the strategy was made for; see `plan.stages.shape_name`
    num_layers: Annotated[int, Limit(1, MOST_LAYERS)]  # layers of the model
    stages: Annotated[tuple[StagePlan, ...], Limit(1), "a list of at least one stage"]  # in the order of their layers
    prefill_batch: _Count  # sequences of one prefill micro-batch
    decode_batch: _Count  # sequences of one decode micro-batch; a cohort
    cohorts: _Count  # cohorts in the pipeline at once. At most decode_batch * cohorts sequences are alive.

    def __post_init__(self) -> None:
        check(self, "strategy ")
        if self.prefill_batch > self.decode_batch:
            raise InvalidInput(f"strategy prefill_batch is {self.prefill_batch} and decode_batch {self.decode_batch};"
                               " a cohort is prefilled in parts, so prefill_batch must not be larger")  # fmt: skip
        self._check_ranges()

    def _check_ranges(self) -> None:
        names = [stage.device for stage in self.stages]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidInput(f"strategy device {twice} has two stages; give each device one range of layers")
        end = 0
        for stage in self.stages:
            first, last = stage.layers
            if first != end:
                fault = f"layers {end} to {first - 1} are in no stage" if first > end else (
                    f"layers {first} to {min(end, last) - 1} are in two stages")  # fmt: skip
                raise InvalidInput(f"strategy {fault}: stage {stage.device} begins with layer {first}, but must begin"
                                   f" with layer {end}; {_REMEDY}")  # fmt: skip
            end = last
        if end != self.num_layers:
            raise InvalidInput(f"strategy stages end with layer {end - 1}, but the model has layers 0 to"
                               f" {self.num_layers - 1}; {_REMEDY}")  # fmt: skip

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the stages' devices, in order."""
        return tuple(stage.device for stage in self.stages)

    @property
    def weights(self) -> tuple[str | None, ...]:
        """Return the format of every layer of the model."""
        return tuple(name for stage in self.stages for name in stage.weights)

    def check(self, model: str, num_layers: int, devices: Sequence[str] | int) -> None:
        """Raise InvalidInput if the strategy was made for another model or for other devices.

        Args:
            model: shape of the model that is to be run, as in `model`.
            num_layers: layers of this model.
            devices: names of the devices at hand, or their number.
        """
        if self.num_layers != num_layers:
            raise InvalidInput(f"the strategy is for a model of {self.num_layers} layers, but this one has"
                               f" {num_layers}; {_REMEDY} for this model")  # fmt: skip
        if self.model != model:
            raise InvalidInput(f"the strategy was made for the model {self.model}, but this one is {model}; {_REMEDY}"
                               " for this model")  # fmt: skip
        number = devices if isinstance(devices, int) else len(devices)
        if number < len(self.stages):
            raise InvalidInput(f"the strategy has {len(self.stages)} stages, but there are {number} devices; {_REMEDY}"
                               " for these devices")  # fmt: skip
        names = () if isinstance(devices, int) else devices
        if names and (unknown := [name for name in self.devices if name not in names]):
            raise InvalidInput(f"the strategy names device {unknown[0]}, but the devices are {', '.join(names)};"
                               f" {_REMEDY} for these devices")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a strategy file holds them."""
        stages = [
            {"device": stage.device, "layers": list(stage.layers), "weights": list(stage.weights),
             "policy": stage.policy.to_json() if stage.policy else None}
            for stage in self.stages
        ]  # fmt: skip
        return {"model": self.model, "num_layers": self.num_layers, "prefill_batch": self.prefill_batch,
                "decode_batch": self.decode_batch, "cohorts": self.cohorts, "stages": stages}  # fmt: skip

    def text(self) -> str:
        """Return the text of a strategy file, with a line for each stage."""
        fields = self.to_json()
        stages = ",\n  ".join(json.dumps(stage) for stage in fields.pop("stages"))
        head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items())
        return f'{{\n{head} "stages": [\n  {stages}\n ]\n}}'

    @staticmethod
    def from_json(values: dict[str, Any], what: str) -> "Strategy":
        """Return the strategy with these fields. Raise InvalidInput that names `what` and the wrong field."""
        return read(Strategy, values, what)

    @staticmethod
    def load(path: str | Path) -> "Strategy":
        """Read a strategy file. Raise InvalidInput, with the file's name and the fault, if it has no strategy."""
        return load(Strategy, path, "strategy file")
