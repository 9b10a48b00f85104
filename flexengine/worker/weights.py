"""Weights of a job: resident ones are read once, streamed ones pass through slots, the head in chunks of rows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexengine.activity import activity
from flexengine.codec.forms import Form, WeightFormat
from flexengine.model.forward import pausing_layers
from flexengine.model.native.layer import release
from flexengine.model.skeleton import Skeleton
from flexengine.places import DEVICE, DISK, off_device, place_of
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import slot_offsets
from flexengine.schedule.batches import Batch, continues
from flexengine.tier.base import Region, aligned
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Mover, Regions, Transfer, consecutive, part_of, pick_rows, spread
from flexengine.worker.resident import ResidentReads, note_plain, pack_resident

if TYPE_CHECKING:
    from flexengine.worker.in_place import InPlace

PAIRS = "flexengine.model.row_pairs"  # imported if a GGUF file has rows in pairs
Pieces = list[Region]  # the bytes of a tensor, in order
Parts = dict[str, tuple[Pieces, tuple[int, ...]]]  # by name of a tensor: pieces and shape


class Weights:
    """Memory of all weights under a layout: resident tensors, slots, and staging.

    The constructor allocates resident tensors. `load_resident` reads them, unit by unit and batch by batch.

    Attributes:
        units: by unit (layers, then head chunks), the streamed tensors.
        arrivals: pending reads from the checkpoint into memory or to a further disk. Weights that belong to no layer
            (embedding, norms) are read with the first unit, the head with its first chunk.
        arrived: whether all resident weights are read. Any thread may read it.
    """

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, in_place: bool = False) -> None:
        """Make room for the weights. in_place: whether those that the page cache holds stay there, if it holds all; see
        worker/in_place.py."""
        skeleton = opened.skeleton
        self.skeleton, self.layout, self.machine, self.dtype = skeleton, layout, machine, opened.dtype
        self._stored, self._held, self._forms = opened.prepare_weights(), opened.held, opened.forms
        self._regions = Regions(machine)
        self._pieces: dict[str, Pieces] = {}  # by name, on the tensor's tier
        self._resident: dict[str, Tensor] = {}
        self._pairs: dict[str, tuple[int, int]] = {}  # by name, `Origin.pairs`
        self._own = dict[str, "InPlace"]()  # by name, weights that stay where they are
        placing: Mapping[str, Callable[[], InPlace]] = {}
        if in_place:
            find = resolve_name("flexengine.worker.in_place:find_in_place")
            placing = find(skeleton, layout, self._stored, self._held)
        try:
            self.arrivals = ResidentReads(machine, self._regions, layout)
            self._make_room(placing)
        except BaseException:  # also an interrupt: the memory must not stay booked
            self._regions.free()
            raise
        self.arrived = not self.arrivals.units
        self._bind_resident()
        for name, (module, (_, width), _) in skeleton.tables.items():
            stored = self._stored[name]
            pieces = [machine.disk.checkpoint(*run, stored.dtype) for run in stored.runs]
            module.read = partial(pick_rows, machine.disk, pieces, width=width, dtype=self._held[name])
        self._embedding = skeleton.embedding[0]
        self._head = skeleton.output
        self._chunks = layout.head_chunks(skeleton.head[1][0])
        skeleton.head_module.chunks = len(self._chunks)
        streamed = [[n for n in layer if self._tier(n) != "device"] for layer in skeleton.layers]
        self.units: list[Parts] = [{n: (self._pieces[n], self._stored[n].shape) for n in names} for names in streamed]
        self.units += [self._head_unit(*rows) for rows in self._chunks]
        take = partial(self._regions.take, reads=True)
        self._halves = layout.policy.half_layers
        self._slots = [take("device", size, "weight slots") for size in layout.slots] if any(layout.slots) else []
        disks = dict.fromkeys((*layout.stages, *layout.early_stages)) if machine.capacity.staged else ()
        self._stages = {d: [take("host", size, "weight staging") for size in layout.slot_stages(d)] for d in disks}
        self._in_slot: dict[tuple[int, int], dict[str, Region]] = {}  # by unit and slot
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._mover = Mover(machine)
        self._bound: dict[int, int] = {}  # by layer: the slot that its modules use

    @property
    def in_place(self) -> bool:
        """Whether weights stay in the page cache."""
        return bool(self._own)

    @property
    def streamed(self) -> list[tuple[str, ...]]:
        """Tiers that each unit is streamed from; () if all its weights are resident."""
        return [off_device({self._tier(name) for name in unit}) for unit in self.units]

    @property
    def halves(self) -> list[list[tuple[str, ...]]]:
        """Tiers of the first and of the second half of each unit, by half; [] if units are loaded whole."""
        if not self._halves:
            return []
        return [
            [off_device({self._tier(n) for n in unit if (n in self.skeleton.early) == early}) for unit in self.units]
            for early in (True, False)
        ]

    def _slot_of(self, name: str, slot: int) -> int:
        """Return the slot of a tensor. slot: of its unit, if units are loaded whole."""
        return slot if not self._halves else int(name not in self.skeleton.early)

    def _tier(self, name: str) -> str:
        return self.layout.homes[name]

    def load_resident(self, unit: int) -> None:
        """Read the next batch of a unit's resident weights. Raise BadCheckpoint if a read fails.

        Before the last batch is read, the unit must not be computed, and not be streamed except from the checkpoint.
        """
        self.arrivals.load_resident(unit)
        complete = unit < len(self.skeleton.layers) and unit not in self.arrivals.units
        for name in self._pairs.keys() & self.skeleton.layers[unit] if complete else ():
            if self._tier(name) != DISK:
                self._part(name, self._tier(name), self._pieces[name][0])
                self.machine.synchronize()
        # Reorder the layer's weights for the CPU's products; with 16-bit activations, torch multiplies.
        if complete and self.machine.compute.type == "cpu" and self.skeleton.product.dtype == torch.float32:
            for name, param in self.skeleton.layers[unit].items():
                if name in self._resident and name not in self._forms and name not in self._own:
                    pack_resident(param, self._resident[name])
        self.arrived = not self.arrivals.units

    def load_all_resident(self) -> None:
        """Read the resident weights of all units. Raise BadCheckpoint if a read fails."""
        with activity("loading", "reading the weights that stay in memory", self.arrivals.pending_bytes, "B"):
            for unit in self.arrivals.units:
                self.load_resident(unit)

    def _make_room(self, placing: "Mapping[str, Callable[[], InPlace]]") -> None:
        """Allocate every tensor except those on the first disk, which stay in the checkpoint."""
        units = {name: j for j, layer in enumerate(self.skeleton.layers) for name in layer}
        first, head = 0, len(self.skeleton.layers)
        for name, tier in self.layout.homes.items():
            stored = self._stored[name]
            runs, further = stored.runs, place_of(tier).disk and tier != DISK
            if stored.pairs and further:  # a further disk gets the rows in order
                runs = resolve_name(f"{PAIRS}:in_order")(stored)
            elif stored.pairs:
                self._pairs[name] = stored.pairs
            source = [self.machine.disk.checkpoint(*run, stored.dtype) for run in runs]
            if tier == DISK:
                self._pieces[name] = source
                continue
            unit = head if name == self.skeleton.head[0] != self.skeleton.embedding[0] else units.get(name, first)
            dtype = self._held[name] if tier == "device" else stored.dtype
            nbytes = stored.nbytes // stored.dtype.itemsize * dtype.itemsize
            if name in placing:
                self._regions.keep_room(tier, aligned(nbytes), "weights")
                self.arrivals.kept_bytes += nbytes
                self._own[name] = own = placing[name]()  # copies some matrices
                self._pieces[name], self._resident[name] = source, _parameter(own.tensor)
                continue
            region = self._regions.take(tier, nbytes, "weights", dtype)
            self._pieces[name] = [region]
            if further:
                self.arrivals.onto_disk(unit, source, self.machine.tier(tier), region)
                continue
            target = self.machine.tier(tier).view(region)
            if tier == "device":
                self._resident[name] = _parameter(target.view(stored.shape))
            self.arrivals.into_memory(unit, source, target)
        self.arrivals.divide()

    def _bind_resident(self) -> None:
        for layer in (*self.skeleton.layers, self.skeleton.others):
            for param in layer.values():
                note_plain(param)
            for name, param in layer.items():
                if name in self._resident:
                    param.bind(self._resident[name])
                if name in self._own and (apart := self._own[name].apart) is not None:
                    param.module.__dict__.setdefault("apart", {})[param.name] = apart
        if self.machine.compute.type != "cpu":
            for module in self.skeleton.model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[key] = buffer.to(self.machine.compute)

    def _head_unit(self, low: int, high: int) -> Parts:
        if self._tier(self._head) == "device":
            return {}
        pieces, width = self._pieces[self._head], self.skeleton.head[1][1]
        if (form := self._forms.get(self._head)) is not None:
            parts = [piece for span in form.packed.spans(low, high) for piece in part_of(pieces, *span)]
            return {self._head: (parts, (_nbytes(parts),))}
        row = width * pieces[0].dtype.itemsize
        return {self._head: (part_of(pieces, low * row, (high - low) * row), (high - low, width))}

    def load(self, unit: int, slot: int, home: str, hop: int, without: Collection[str] = ()) -> None:
        """Copy a unit's tensors on tier `home`, except `without`, one leg toward the slot; see `Mover.load`."""
        here = (n for n in self.units[unit] if self._tier(n) == home and self._slot_of(n, slot) == slot)
        names = [n for n in here if n not in without]
        stages, slots = self._stage_homes(unit, slot, home), self._slot_regions(unit, slot)
        self._mover.load(home, hop, [Transfer(self.units[unit][n][0], stages.get(n), slots[n]) for n in names])
        for name in self._pairs.keys() & names if home == DISK and not hop else ():
            self._part(name, *(("host", stages[name]) if stages else (DEVICE, slots[name])))

    def _part(self, name: str, tier: str, region: Region) -> None:
        """Put the rows of a tensor that was read in order."""
        resolve_name(f"{PAIRS}:part_pairs")(self.machine.tier(tier).view(region), *self._pairs[name])

    def load_rows(self, unit: int, slot: int, home: str, hop: int, names: Sequence[str], rows: Sequence[int]) -> None:
        """Copy rows of streamed tensors one leg toward the slot; see `Mover.load`.

        Args:
            names: tensors of the unit; tensors on other tiers than `home` are skipped.
            rows: rising indices of the tensors' first dimension.
        """
        stages, slots = self._stage_homes(unit, slot, home), self._slot_regions(unit, slot)
        parts = list[Transfer]()
        for name in (n for n in names if self._tier(n) == home):
            pieces, shape = self.units[unit][name]
            stored, held = _nbytes(pieces) // shape[0], slots[name].nbytes // shape[0]  # bytes of a row
            for low, high in consecutive(rows):
                start, nbytes = low * stored, (high - low) * stored
                stage = stages[name].part(start, nbytes) if stages else None
                own = slots[name].part(low * held, (high - low) * held)
                parts.append(Transfer(part_of(pieces, start, nbytes), stage, own))
        self._mover.load(home, hop, parts)

    def bring_rows(self, unit: int, slot: int, names: Sequence[str], rows: Sequence[int]) -> None:
        """Load rows of streamed tensors into the slot, without staging, which other lanes may use. Arguments as in
        `load_rows`."""
        views = self._slot_views(unit, slot)
        for name in names:
            pieces, shape = self.units[unit][name]
            width = _nbytes(pieces) // shape[0]
            for low, high in consecutive(rows):
                target = views[name][low:high]
                own = torch.empty(target.shape, dtype=pieces[0].dtype)
                part = part_of(pieces, low * width, (high - low) * width)
                self.machine.tier(self._tier(name)).load_all(spread(part, own))
                target.copy_(own)

    def _stage_homes(self, unit: int, slot: int, home: str) -> dict[str, Region]:
        """Return the staging regions of a unit's tensors on tier `home`; none if the route has one leg."""
        if home not in self._stages:
            return {}
        own = {n: pieces for n, (pieces, _) in self.units[unit].items() if self._slot_of(n, slot) == slot}
        parts = {n: pieces for n, pieces in own.items() if self._tier(n) == home}
        sizes, stage = {n: _nbytes(pieces) for n, pieces in parts.items()}, self._stages[home][slot]
        offsets = slot_offsets(list(sizes.items()), {n: pieces[0].start for n, pieces in parts.items()})
        return {n: Region(stage.place, stage.start + offsets[n], sizes[n], parts[n][0].dtype) for n in parts}

    def _slot_regions(self, unit: int, slot: int) -> dict[str, Region]:
        """Return the regions of a unit's streamed tensors in a slot, in their dtypes on the device."""
        key = (unit, slot)
        if key not in self._in_slot:
            parts, held, regions = self.units[unit], self._held, dict[str, Region]()
            sizes = {n: _nbytes(p) // p[0].dtype.itemsize * held[n].itemsize for n, (p, _) in parts.items()}
            straight = [n for n in parts if place_of(self._tier(n)).disk and not self.machine.capacity.staged]
            for number in {self._slot_of(n, slot) for n in parts}:
                own = [(n, nbytes) for n, nbytes in sizes.items() if self._slot_of(n, slot) == number]
                offsets = slot_offsets(own, {n: parts[n][0][0].start for n in straight})
                regions |= {n: Region(self._slots[number].place, offsets[n], size, held[n]) for n, size in own}
            self._in_slot[key] = regions
        return self._in_slot[key]

    def _slot_views(self, unit: int, slot: int) -> dict[str, Tensor]:
        """Return the streamed tensors of a unit as parameters on a slot's memory."""
        key = (unit, slot)
        if key not in self._views:
            regions, view = self._slot_regions(unit, slot), self.machine.device.view
            shapes = {n: shape for n, (_, shape) in self.units[unit].items()}
            self._views[key] = {n: _parameter(view(region).view(shapes[n])) for n, region in regions.items()}
        return self._views[key]

    def bind(self, layer: int, slot: int | None) -> None:
        """Make a layer's modules use the weights in `slot`; None if all weights are resident: nothing changes."""
        if slot is None or self._bound.get(layer) == slot:
            return
        views = self._slot_views(layer, slot)
        for name, param in self.skeleton.layers[layer].items():
            if name in views:
                param.bind(views[name])
        self._bound[layer] = slot

    def head(self, chunk: int, slot: int | None) -> tuple[Tensor, Tensor | None, Form | None]:
        """Return a chunk of rows of the output projection and of its bias, and their encoding if they are encoded."""
        low, high = self._chunks[chunk]
        bias = self._resident[self.skeleton.head_bias][low:high] if self.skeleton.head_bias else None
        form = self._forms[self._head].packed.with_rows(high - low) if self._head in self._forms else None
        if slot is None:
            return self._resident[self._head], bias, form
        return self._slot_views(len(self.skeleton.layers) + chunk, slot)[self._head], bias, form

    @property
    def table(self) -> Tensor | None:
        """The embedding table; None if it is off the device."""
        return self._resident.get(self._embedding)

    @property
    def embedding_form(self) -> WeightFormat | None:
        """Format of the embedding; None if it is not encoded."""
        return self._forms.get(self._embedding)

    def gather(self, numbers: list[int]) -> Tensor:
        """Return rows of an embedding off the device, or blocks of encoded rows, in RAM. numbers: numbers of the rows
        or blocks, rising."""
        form, pieces = self.embedding_form, self._pieces[self._embedding]
        if form is None:
            width, dtype = self.skeleton.embedding[1][1], self._held[self._embedding]
        else:
            width, dtype = form.packed.step_bytes, torch.uint8
        return pick_rows(self.machine.tier(self._tier(self._embedding)), pieces, numbers, width, dtype)

    def close(self) -> None:
        """Free all memory, and bind the modules to meta tensors."""
        for group in (*self.skeleton.layers, self.skeleton.others):
            for param in group.values():
                param.bind(_parameter(torch.empty(param.shape, dtype=self.dtype, device="meta")))
                note_plain(param)  # the next job may read these experts on demand
        for table in self.skeleton.tables.values():
            table.module.read = None
        release(self.skeleton.model)
        if self.skeleton.experts:
            resolve_name("flexengine.model.experts:release")(self.skeleton.product)
        self.arrivals.close()
        self._regions.free()
        self._own = {}
        for held in (self._pieces, self._resident, self._views, self._in_slot, self._slots, self._stages):
            held.clear()


def _nbytes(pieces: Pieces) -> int:
    return sum(piece.nbytes for piece in pieces)


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class JoinedLayers:
    """Tells the program which layers a cell computes."""

    def __init__(self, skeleton: Skeleton, weights: Weights) -> None:
        self._modules, self._weights = pausing_layers(skeleton.model)[: len(skeleton.layers)], weights
        self._tokens: list[int] = []  # by gpu_batch; 0 if each of its cells computes one layer

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin a sweep.

        KV and hidden states of all gpu_batches must be on the device: links would stand still while one gpu_batch
        computes all layers before the others begin, as there are few buffers. A gpu_batch whose attention reads what an
        earlier one of the sweep appends must wait for it in every layer.
        """
        on_device = all(batch.cache_home == batch.hidden_home == DEVICE for batch in batches)
        self._tokens = [
            batch.tokens if on_device and not any(continues(other, batch) for other in batches[:number]) else 0
            for number, batch in enumerate(batches)
        ]

    def count(self, layer: int, batch: int) -> int:
        """Return the number of layers, from this one on, that a cell computes.

        Their weights are on the device, and the input of each was the output of the layer before in the last pass. They
        are no more than one call of kernels computes, so that Ctrl-C and reports of progress wait for one call only.
        """
        native, tokens = self._modules[layer].native, self._tokens[batch]
        if native is None or not tokens or not self._weights.arrived:
            return 1
        rest = range(layer + 1, min(len(self._modules), layer + native.most_layers(tokens)))
        for j in rest:
            other = self._modules[j].native
            if self._weights.units[j] or other is None or not other.joined:
                return j - layer
        return rest.stop - layer

    def native(self, layer: int, end: int) -> range:
        """Return the layers of layer .. end - 1 that kernels may compute: none if modules compute the first one."""
        return range(layer, layer if self._modules[layer].native is None else end)
