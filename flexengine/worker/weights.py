"""Weights: those that stay are brought home once, the others pass through slots; the head comes in chunks of
rows."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexengine.codec.packed import Packed
from flexengine.model.form import WeightFormat
from flexengine.model.skeleton import ParamRef
from flexengine.places import DISK, is_disk, off_device
from flexengine.plan.facts import ENCODED_ROWS
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import slot_offsets
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.arrivals import Arrivals, Copy, to_disk, to_memory
from flexengine.worker.arrivals import Pair as Arriving
from flexengine.worker.mover import Mover, Part, spread
from flexengine.worker.opened import Opened
from flexengine.worker.regions import Regions

Pieces = list[Region]  # where the bytes of a tensor are, one piece after another
Parts = dict[str, tuple[Pieces, tuple[int, ...]]]  # name -> its pieces and its shape
Pair = tuple[Region, Tensor]  # what is to be read, and where to


class Weights:
    """Homes of all weights under a layout, the slots, and what is bound to the modules right now.

    What has a home in memory gets its room at once, and is read into it unit by unit and batch by batch: see `settle`.
    """

    def __init__(self, opened: Opened, layout: Layout, machine: Machine) -> None:
        skeleton = opened.skeleton
        self.skeleton, self.layout, self.machine, self.dtype = skeleton, layout, machine, opened.dtype
        self._stored, self._held, self._forms = opened.origins, opened.held, opened.forms
        self._regions = Regions(machine)
        self._homes: dict[str, Pieces] = {}
        self._resident: dict[str, Tensor] = {}
        try:
            self._arrivals = Arrivals(machine, self._regions, layout)
            self._make_room()
        except BaseException:  # a truncated shard, or an interrupt: gigabytes must not stay booked
            self._regions.free()
            raise
        self._bind_resident()
        self._embedding = skeleton.embedding[0]
        self._head = skeleton.output
        self._chunks = layout.head_chunks(skeleton.head[1][0])
        skeleton.head_module.chunks = len(self._chunks)
        self.units: list[Parts] = [self._streamed(layer) for layer in skeleton.layers]
        self.units += [self._head_unit(*rows) for rows in self._chunks]
        take, slots = self._regions.take, layout.policy.slots
        self._slots = [take("device", layout.slot, "weight slots") for _ in range(slots if layout.slot else 0)]
        stages = layout.stages.items() if machine.capacity.staged else ()
        self._stages = {disk: [take("host", size, "weight staging") for _ in range(slots)] for disk, size in stages}
        self._in_slot: dict[tuple[int, int], dict[str, Region]] = {}  # by unit and slot
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._mover = Mover(machine)
        self._bound: dict[int, int] = {}

    @property
    def streamed(self) -> list[tuple[str, ...]]:
        """Per unit the homes it is streamed from; () when resident."""
        return [off_device({self._tier(name) for name in unit}) for unit in self.units]

    def _tier(self, name: str) -> str:
        return self.layout.homes[name]

    @property
    def arriving(self) -> list[int]:
        """Units whose weights have not all left the checkpoint that are to stay in memory or on a further disk; see
        `Arrivals.units`. The first unit's need the embedding, norms and all else that belongs to no layer; those of the
        head come with its first chunk."""
        return self._arrivals.units

    @property
    def missing(self) -> float:
        """Share of the bytes that are to stay in memory or on a further disk that is not there yet."""
        return self._arrivals.missing

    @property
    def settled(self) -> int:
        """Bytes that `settle` has read."""
        return self._arrivals.settled

    def settle(self, unit: int) -> None:
        """Read the next batch of the weights of a unit that are to stay. Before its last batch the unit must not be
        computed, nor loaded from a place other than the checkpoint's disk. Raise BadCheckpoint if a read fails."""
        self._arrivals.settle(unit)

    def settle_all(self) -> None:
        """What `settle` does, of all units."""
        for unit in self.arriving:
            self.settle(unit)

    def _make_room(self) -> None:
        """Take room for every tensor, but for those on the first disk, where the checkpoint holds them."""
        units = {name: j for j, layer in enumerate(self.skeleton.layers) for name in layer}
        first, head = 0, len(self.skeleton.layers)
        arriving: dict[int, list[Arriving]] = {}
        for name, tier in self.layout.homes.items():
            stored = self._stored[name]
            source = [self.machine.disk.checkpoint(*run, stored.dtype) for run in stored.runs]  # type: ignore[attr-defined]
            if tier == DISK:
                self._homes[name] = source
                continue
            unit = head if name == self.skeleton.head[0] != self.skeleton.embedding[0] else units.get(name, first)
            dtype = self._held[name] if tier == "device" else stored.dtype
            home = self._regions.take(tier, stored.nbytes // stored.dtype.itemsize * dtype.itemsize, "weights", dtype)
            self._homes[name] = [home]
            if is_disk(tier):
                arriving.setdefault(unit, []).extend(to_disk(source, Copy(self.machine.tier(tier), home)))
                continue
            target = self.machine.tier(tier).view(home)
            if tier == "device":
                self._resident[name] = _parameter(target.view(stored.shape))
            arriving.setdefault(unit, []).extend(to_memory(source, target))
        self._arrivals.expect(arriving)

    def _bind_resident(self) -> None:
        for layer in (*self.skeleton.layers, self.skeleton.others):
            for name, slot in layer.items():
                if name in self._resident:
                    slot.bind(self._resident[name])
        if self.machine.compute.type != "cpu":
            for module in self.skeleton.model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[key] = buffer.to(self.machine.compute)

    def _streamed(self, layer: dict[str, ParamRef]) -> Parts:
        return {n: (self._homes[n], self._stored[n].shape) for n in layer if self._tier(n) != "device"}

    def _head_unit(self, low: int, high: int) -> Parts:
        if self._tier(self._head) == "device":
            return {}
        pieces, width = self._homes[self._head], self.skeleton.head[1][1]
        if (form := self._forms.get(self._head)) is not None:
            row = form.packed.blocks[1] * form.packed.block_bytes  # of encoded rows, which lie together
            first, size = low // ENCODED_ROWS * row, replace(form.packed, rows=high - low).nbytes
            return {self._head: (_part(pieces, first, size), (size,))}
        row = width * pieces[0].dtype.itemsize
        return {self._head: (_part(pieces, low * row, (high - low) * row), (high - low, width))}

    def load(self, unit: int, slot: int, home: str, hop: int, without: Collection[str] = ()) -> None:
        """Copy what a unit streams from `home`, except some tensors, one leg toward the slot; see `Mover.load`."""
        names = [n for n in self.units[unit] if self._tier(n) == home and n not in without]
        stages, slots = self._stage_homes(unit, slot, home), self._slot_regions(unit, slot)
        self._mover.load(home, hop, [Part(self.units[unit][n][0], stages.get(n), slots[n]) for n in names])

    def load_rows(self, unit: int, slot: int, home: str, hop: int, names: Sequence[str], rows: Sequence[int]) -> None:
        """Copy rows of streamed tensors one leg toward their own places in the slot.

        Args:
            names: tensors of the unit; those that lie elsewhere are skipped.
            rows: rising indices of the tensors' first dimension.
        """
        stages, slots = self._stage_homes(unit, slot, home), self._slot_regions(unit, slot)
        parts = list[Part]()
        for name in (n for n in names if self._tier(n) == home):
            pieces, shape = self.units[unit][name]
            stored, held = _nbytes(pieces) // shape[0], slots[name].nbytes // shape[0]  # bytes of a row
            for low, high in _runs(rows):
                start, nbytes = low * stored, (high - low) * stored
                stage = stages[name].part(start, nbytes) if stages else None
                own = slots[name].part(low * held, (high - low) * held)
                parts.append(Part(_part(pieces, start, nbytes), stage, own))
        self._mover.load(home, hop, parts)

    def bring_rows(self, unit: int, slot: int, names: Sequence[str], rows: Sequence[int]) -> None:
        """Load rows of streamed tensors to their places in the slot. Staging is not used: other lanes may fill it. The
        arguments are those of `load_rows`."""
        views = self._slot_views(unit, slot)
        for name in names:
            pieces, shape = self.units[unit][name]
            width = _nbytes(pieces) // shape[0]
            for low, high in _runs(rows):
                target = views[name][low:high]
                own = torch.empty(target.shape, dtype=pieces[0].dtype)
                part = _part(pieces, low * width, (high - low) * width)
                self.machine.tier(self._tier(name)).load_all(spread(part, own))
                target.copy_(own)

    def _stage_homes(self, unit: int, slot: int, home: str) -> dict[str, Region]:
        """Return the places in staging of what a unit streams from `home`; none if its way has one leg."""
        if home not in self._stages:
            return {}
        parts = {n: pieces for n, (pieces, _) in self.units[unit].items() if self._tier(n) == home}
        offsets = slot_offsets([(n, _nbytes(pieces)) for n, pieces in parts.items()])
        stage = self._stages[home][slot]
        return {n: Region(stage.place, stage.start + offsets[n], _nbytes(p), p[0].dtype) for n, p in parts.items()}

    def _slot_regions(self, unit: int, slot: int) -> dict[str, Region]:
        """Return the places in a slot of a unit's streamed tensors, in the dtypes they are held in."""
        key = (unit, slot)
        if key not in self._in_slot:
            parts, held, place = self.units[unit], self._held, self._slots[slot].place
            sizes = {n: _nbytes(p) // p[0].dtype.itemsize * held[n].itemsize for n, (p, _) in parts.items()}
            offsets = slot_offsets(list(sizes.items()))
            self._in_slot[key] = {n: Region(place, offsets[n], sizes[n], held[n]) for n in parts}
        return self._in_slot[key]

    def _slot_views(self, unit: int, slot: int) -> dict[str, Tensor]:
        """Return the streamed tensors of a unit as they lie in a slot."""
        key = (unit, slot)
        if key not in self._views:
            regions, view = self._slot_regions(unit, slot), self.machine.device.view
            shapes = {n: shape for n, (_, shape) in self.units[unit].items()}
            self._views[key] = {n: _parameter(view(region).view(shapes[n])) for n, region in regions.items()}
        return self._views[key]

    def bind(self, layer: int, slot: int) -> None:
        """Makes layer's modules use the weights that lie in `slot` (-1: all resident, nothing to do)."""
        if slot < 0 or self._bound.get(layer) == slot:
            return
        views = self._slot_views(layer, slot)
        for name, place in self.skeleton.layers[layer].items():
            if name in views:
                place.bind(views[name])
        self._bound[layer] = slot

    def head(self, chunk: int, slot: int) -> tuple[Tensor, Tensor | None, Packed | None]:
        """Rows of the output projection and of its bias, and how they lie if they are encoded."""
        low, high = self._chunks[chunk]
        bias = self._resident[self.skeleton.head_bias][low:high] if self.skeleton.head_bias else None
        form = replace(self._forms[self._head].packed, rows=high - low) if self._head in self._forms else None
        if slot < 0:
            return self._resident[self._head], bias, form
        return self._slot_views(len(self.skeleton.layers) + chunk, slot)[self._head], bias, form

    @property
    def table(self) -> Tensor | None:
        """The embedding, if it is on the device."""
        return self._resident.get(self._embedding)

    @property
    def embedding_form(self) -> WeightFormat | None:
        """How the embedding is kept, if it is encoded."""
        return self._forms.get(self._embedding)

    def gather(self, numbers: list[int]) -> Tensor:
        """Rows of an embedding off the device, or blocks of encoded rows, by their rising numbers: in RAM."""
        form, pieces = self.embedding_form, self._homes[self._embedding]
        if form is None:
            width, dtype = self.skeleton.embedding[1][1], self._held[self._embedding]
        else:
            width, dtype = form.packed.blocks[1] * form.packed.block_bytes, torch.uint8
        row, rows = width * pieces[0].dtype.itemsize, torch.empty(len(numbers), width, dtype=dtype)
        pairs, at = list[Pair](), 0
        for low, high in _runs(numbers):  # neighbours in the table are one read
            pairs += spread(_part(pieces, low * row, (high - low) * row), rows[at : at + high - low])
            at += high - low
        self.machine.tier(self._tier(self._embedding)).load_all(pairs)
        return rows

    def close(self) -> None:
        """Gives all memory back: the modules forget their weights, the ledgers their entries."""
        for group in (*self.skeleton.layers, self.skeleton.others):
            for slot in group.values():
                slot.bind(_parameter(torch.empty(slot.shape, dtype=self.dtype, device="meta")))
        self._arrivals.close()
        self._regions.free()
        slots = (self._views, self._in_slot, self._slots, self._stages)
        for held in (self._homes, self._resident, *slots):
            held.clear()


def _nbytes(pieces: Pieces) -> int:
    return sum(piece.nbytes for piece in pieces)


def _part(pieces: Pieces, start: int, nbytes: int) -> Pieces:
    """nbytes at byte `start` of what lies in pieces."""
    found, at = Pieces(), 0
    for piece in pieces:
        low, high = max(start, at), min(start + nbytes, at + piece.nbytes)
        if low < high:
            found.append(piece.part(low - at, high - low))
        at += piece.nbytes
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers among rising ones, as (first, last + 1)."""
    runs = list[tuple[int, int]]()
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
