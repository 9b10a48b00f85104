"""How much an error in a column of a matrix matters: the mean square of the inputs that meet it, over a text's tokens.

The squared error of a row's product with an input is, in the mean over inputs whose columns are taken to be
independent, the sum of its columns' squared errors times these.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexengine.errors import BadCheckpoint
from flexengine.model.linear import FastLinear
from flexengine.model.products import FastConv1D, is_experts
from flexengine.model.skeleton import Skeleton, Slot

COARSE, FINE = 2.0**-10, 2.0**-50  # units that squares are split into
TOGETHER = 256  # tokens whose squares are held at a time
PRIOR = 16  # tokens with alike columns that are thought to have come before the text, so that a few decide nothing


@dataclass(frozen=True)
class Importances:
    """columns: fp32, by parameter [columns], of experts [experts, columns]; digest: of the file they are kept in."""

    columns: Mapping[str, Tensor]
    digest: str

    def of(self, name: str, number: int) -> Tensor | None:
        """Of one matrix, `number` among its experts; None where no token met it."""
        found = self.columns.get(name)
        if found is None:
            return None
        own = found[number] if found.dim() > 1 else found
        return own if bool(own.any()) else None


def load(path: Path) -> Importances:
    """What `Recorder.save` wrote. Raises BadCheckpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        data = path.read_bytes()
        return Importances(parse(data), hashlib.sha256(data).hexdigest()[:32])
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; remove its directory to calibrate again") from error


class Recorder:
    """Sum up the squares of what reaches the matrices of a model's layers. Memory: 16 bytes per column, and some MB.

    The sums do not depend on which tokens were computed together: each square is split into a multiple of `COARSE` and
    one of `FINE` (what is smaller is rounded off), and fp64 adds up 2^13 multiples of either exactly, for squares
    below 2^30.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._slots = {name: slot for layer in skeleton.layers for name, slot in layer.items() if _columns(slot)}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, list[int]] = {}
        for name, slot in self._slots.items():
            count = slot.shape[0] if len(slot.shape) == 3 else 1
            self._sums[name] = torch.zeros(2, count, _columns(slot), dtype=torch.float64)
            self._tokens[name] = [0] * count

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is open, what the modules compute is recorded; before and after they know nothing of it."""
        hooks, experts = [], [slot for slot in self._slots.values() if len(slot.shape) == 3]
        for name, slot in self._slots.items():
            if len(slot.shape) == 3:
                slot.module.__dict__.setdefault("watch", {})[slot.name] = self._noter(name)
            else:
                hooks.append(slot.module.register_forward_pre_hook(self._hook(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for slot in experts:
                slot.module.__dict__.pop("watch", None)

    def _hook(self, name: str) -> Any:
        return lambda _, args: self._note(name, 0, args[0])

    def _noter(self, name: str) -> Any:
        return lambda expert, x: self._note(name, expert, x)

    def _note(self, name: str, number: int, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        for part in torch.split(rows, TOGETHER):
            for sums, units in zip(self._sums[name], exact_parts(part.double().square()), strict=True):
                sums[number] += units.sum(0).cpu()
        self._tokens[name][number] += len(rows)

    def means(self) -> dict[str, Tensor]:
        """As in `Importances`; 0 where no token came by."""
        found = {}
        for name, (coarse, fine) in self._sums.items():
            sums = coarse + fine
            tokens = torch.tensor(self._tokens[name], dtype=torch.float64)[:, None]
            flat = sums.mean(1, keepdim=True) / tokens.clamp(min=1)
            means = ((sums + PRIOR * flat) / (tokens + PRIOR)).float()
            found[name] = means if len(self._slots[name].shape) == 3 else means[0]
        return found


def exact_parts(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp64 numbers as multiples of `COARSE` and of `FINE`, which add up to them to within half of `FINE`."""
    coarse = torch.round(squares / COARSE) * COARSE
    return coarse, torch.round((squares - coarse) / FINE) * FINE


def _columns(slot: Slot) -> int:
    """Inputs of the matrix, or matrices, of this place; 0 if no Product reads it."""
    module = slot.module
    if slot.name == "weight" and isinstance(module, FastLinear | FastConv1D):
        return slot.shape[0 if isinstance(module, FastConv1D) else 1]
    if len(slot.shape) == 3 and is_experts(module):
        return slot.shape[1 if module.is_transposed else 2]
    return 0
