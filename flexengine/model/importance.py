"""Importance of each column of a matrix: the mean square of its inputs over the tokens of a text.

If the columns of the inputs are independent, the mean squared error of an output is the sum, over the columns, of the
squared error of the weight times the importance of the column.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexengine.errors import BadCheckpoint
from flexengine.model.skeleton import ParamRef, Skeleton

COARSE, FINE = 2.0**-10, 2.0**-50  # units that squares are split into
TOGETHER = 256  # tokens whose squares are in memory at a time
PRIOR = 16  # a prior of this many tokens with equal columns limits the weight of a few tokens


@dataclass(frozen=True)
class Importances:
    """Importances of all matrices of a model."""

    columns: Mapping[str, Tensor]  # by parameter, fp32 [columns]; for experts [experts, columns]
    digest: str  # of the file that holds the importances

    def of(self, name: str, number: int) -> Tensor | None:
        """Return the importances [columns] of expert `number` (0 for a single matrix), None if no token reached it."""
        columns = self.columns.get(name)
        if columns is None:
            return None
        own = columns[number] if columns.dim() > 1 else columns
        return own if bool(own.any()) else None


def load(path: Path) -> Importances:
    """Read the importances that `Calibration` saved. Raise BadCheckpoint if the file cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        data = path.read_bytes()
        return Importances(parse(data), hashlib.sha256(data).hexdigest()[:32])
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; remove its directory to calibrate again") from error


class ImportanceRecorder:
    """Sums of the squared inputs of all matrices in a model's layers. Memory: 16 bytes per column, and some MB.

    The sums are independent of the batches. Each square is split into a multiple of COARSE and a multiple of FINE;
    smaller parts are rounded off. For squares below 2^30, fp64 adds up to 2^13 multiples of either unit exactly.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._slots: dict[str, ParamRef] = {}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, list[int]] = {}
        for name, slot in (item for layer in skeleton.layers for item in layer.items()):
            if slot.matrix is not None:
                experts, _, columns, _ = slot.matrix
                self._slots[name], self._tokens[name] = slot, [0] * max(1, experts)
                self._sums[name] = torch.zeros(2, max(1, experts), columns, dtype=torch.float64)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the inputs of the modules while the block runs. Hooks are installed before and removed after."""
        with ExitStack() as watched:
            for name, slot in self._slots.items():
                if len(slot.shape) == 3:
                    watch = slot.module.__dict__.setdefault("watch", {})
                    watch[slot.name] = partial(self._note, name)
                    watched.callback(slot.module.__dict__.pop, "watch", None)
                else:
                    hook = slot.module.register_forward_pre_hook(partial(self._note_input, name))
                    watched.enter_context(hook)
            yield

    def _note_input(self, name: str, _: Any, args: tuple[Tensor]) -> None:
        self._note(name, 0, args[0])

    def _note(self, name: str, number: int, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        for part in torch.split(rows, TOGETHER):
            for sums, units in zip(self._sums[name], exact_parts(part.double().square()), strict=True):
                sums[number] += units.sum(0).cpu()
        self._tokens[name][number] += len(rows)

    def means(self) -> dict[str, Tensor]:
        """Return the importances as in `Importances.columns`; 0 for matrices that no token reached."""
        result = {}
        for name, (coarse, fine) in self._sums.items():
            sums = coarse + fine
            tokens = torch.tensor(self._tokens[name], dtype=torch.float64)[:, None]
            flat = sums.mean(1, keepdim=True) / tokens.clamp(min=1)
            means = ((sums + PRIOR * flat) / (tokens + PRIOR)).float()
            result[name] = means if len(self._slots[name].shape) == 3 else means[0]
        return result


def exact_parts(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return multiples of COARSE and of FINE, fp64, whose sum differs from `squares` by at most FINE / 2."""
    coarse = torch.round(squares / COARSE) * COARSE
    return coarse, torch.round((squares - coarse) / FINE) * FINE
