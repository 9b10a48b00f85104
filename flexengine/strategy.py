"""The strategy of a pipeline: which device computes which layers, in which formats. A strategy is also a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from flexengine.config import from_fields, read_object, shown
from flexengine.errors import InvalidInput
from flexengine.policy import MOST_SEQUENCES, Policy

FORMATS = (None, "int8", "int4", "int3")  # of a layer's matrices, from exact to coarse; None: the checkpoint's numbers
BITS = {None: 16, "int8": 8, "int4": 4, "int3": 3}
MOST_LAYERS = 10_000
_REMEDY = "make a strategy with flexengine plan --cluster --save"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline.

    Attributes:
        device: name of the device, as in the cluster file.
        layers: (first, end) of the layers that the stage computes; `end` is not among them.
        weights: for each of these layers, the format of its matrices, from FORMATS.
        policy: block shape and placement on this device; None for the planner's choice on the device itself.

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.
    """

    device: str
    layers: tuple[int, int]
    weights: tuple[str | None, ...]
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.device, str) and self.device and self.device.isprintable()):
            raise InvalidInput(f"strategy device is {shown(self.device)}; it must be the name of a device")
        layers = self.layers
        pair = isinstance(layers, (list, tuple)) and len(layers) == 2
        whole = pair and not any(isinstance(x, bool) or not isinstance(x, int) for x in layers)
        if not whole or not 0 <= layers[0] < layers[1] <= MOST_LAYERS:
            raise InvalidInput(f"strategy layers of {self.device} are {shown(layers)}; they must be [first, end] with 0"
                               f" <= first < end <= {MOST_LAYERS:,}")  # fmt: skip
        object.__setattr__(self, "layers", tuple(layers))
        if not isinstance(self.weights, (list, tuple)):
            raise InvalidInput(f"strategy weights of {self.device} are {shown(self.weights)}; they must be a list with"
                               " one format per layer")  # fmt: skip
        if wrong := [name for name in self.weights if name is not None and name not in FORMATS[1:]]:
            raise InvalidInput(f"strategy weights of {self.device} hold {shown(wrong[0])}; a format must be null"
                               f" (exact), {', '.join(map(str, FORMATS[1:]))}")  # fmt: skip
        if len(self.weights) != self.count:
            raise InvalidInput(f"strategy weights of {self.device} hold {len(self.weights)} formats, but its layers"
                               f" {list(self.layers)} are {self.count}; give one format per layer")  # fmt: skip
        object.__setattr__(self, "weights", tuple(self.weights))
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise InvalidInput(f"strategy policy of {self.device} is {shown(self.policy)}; it must be an object of"
                               " policy fields, or null")  # fmt: skip

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

    Attributes:
        model: shape of the model that the strategy was made for; see `plan.stages.shape_name`.
        num_layers: layers of the model.
        stages: in the order of their layers.
        prefill_batch: sequences of one prefill micro-batch.
        decode_batch: sequences of one decode micro-batch; a cohort.
        cohorts: cohorts in the pipeline at once. At most decode_batch * cohorts sequences are alive.

    Raises:
        InvalidInput: a value is not allowed, or the stages do not hold each layer once, in order.
    """

    model: str
    num_layers: int
    stages: tuple[StagePlan, ...]
    prefill_batch: int
    decode_batch: int
    cohorts: int

    def __post_init__(self) -> None:
        if not (isinstance(self.model, str) and self.model and self.model.isprintable()):
            raise InvalidInput(f"strategy model is {shown(self.model)}; it must be the text that names a model's shape")
        limits = {"num_layers": MOST_LAYERS, "prefill_batch": MOST_SEQUENCES, "decode_batch": MOST_SEQUENCES,
                  "cohorts": MOST_SEQUENCES}  # fmt: skip
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidInput(f"strategy {name} is {shown(value)}; it must be a whole number of at least 1 and at"
                                   f" most {most:,}")  # fmt: skip
        if self.prefill_batch > self.decode_batch:
            raise InvalidInput(f"strategy prefill_batch is {self.prefill_batch} and decode_batch {self.decode_batch};"
                               " a cohort is prefilled in parts, so prefill_batch must not be larger")  # fmt: skip
        if not isinstance(self.stages, (list, tuple)) or not self.stages:
            raise InvalidInput(f"strategy stages are {shown(self.stages)}; they must be a list of at least one stage")
        object.__setattr__(self, "stages", tuple(self.stages))
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
        given = dict(values)
        stages = given.get("stages")
        if isinstance(stages, list):
            given["stages"] = tuple(_stage(stage, f"{what}, stage {k + 1}") for k, stage in enumerate(stages))
        strategy = _made(Strategy, given, what)
        assert isinstance(strategy, Strategy)
        return strategy

    @staticmethod
    def load(path: str | Path) -> "Strategy":
        """Read a strategy file. Raise InvalidInput, with the file's name and the fault, if it has no strategy."""
        return Strategy.from_json(read_object(path, "strategy file"), f"strategy file {path}")


def _stage(values: object, what: str) -> StagePlan:
    if not isinstance(values, dict):
        raise InvalidInput(f"{what} is {shown(values)}; it must be an object of fields")
    given = dict(values)
    if isinstance(given.get("policy"), dict):
        given["policy"] = _made(Policy, given["policy"], f"{what}, policy")
    stage = _made(StagePlan, given, what)
    assert isinstance(stage, StagePlan)
    return stage


def _made(kind: type, values: dict[str, Any], what: str) -> Any:
    """Return a dataclass of these fields. Raise InvalidInput that names `what` if one is missing, unknown or wrong."""
    if missing := sorted({f.name for f in fields(kind) if f.default is MISSING} - set(values)):
        raise InvalidInput(f"{what} lacks fields {missing}; {_REMEDY}")
    try:
        return from_fields(kind, values, what)
    except InvalidInput as error:
        text = str(error)
        raise InvalidInput(text if text.startswith(what) else f"{what}: {text}") from error
