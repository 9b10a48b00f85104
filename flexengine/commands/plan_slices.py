"""flexengine plan --slices: what crosses the cuts between the layers' attentions and the rest of the model."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flexengine.commands.options import AUTO, SAMPLING
from flexengine.commands.parser import refuse_given

if TYPE_CHECKING:
    from flexengine.model.slices import Cut, SlicedTensor, Slices
    from flexengine.worker.open_model import OpenModel

# Options of plan that do not change the slices, and their defaults.
_UNUSED = {"input": None, "input_format": None, "prompt_column": None, "chat": False, "score": False,
           "prefix_sharing": True, "limit": None, "prompt_tokens": None, "rows": None,
           "max_tokens": SAMPLING["max_tokens"], "n": SAMPLING["n"], "device_mem": None, "host_mem": None,
           "offload_dir": None, "weights": None, "budget": None, "layer_bits": None, "compute": None, "cache": None,
           "sparse_attention": None, "flash": None, "sparsify": None, "calibrate": False, "calibration_text": None,
           "quality": "exact", "allow": None, "policy": AUTO, "compare": None, "frontier": False, "latency": None,
           "plot": None, "save": None, "save_lp": None}  # fmt: skip
_ROW = "    {:<18}{:<24}{:<12}{:>12}"  # where to, name, shape, bytes


def check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if an option is given that does not go with --slices."""
    refuse_given(args, _UNUSED, "has no effect with --slices, which depends on the model and its dtype; leave one out")


def print_slices(args: argparse.Namespace, opened: "OpenModel") -> None:
    """Print the slices of a model, or with --json their numbers. Raise UnsupportedModel if it cannot be sliced."""
    from flexengine.model.slices import slices_of

    found = slices_of(opened.skeleton)
    if args.json:
        print(json.dumps(as_json(found, opened)))
    else:
        print("\n".join(text(found, opened)))


def grouped(cuts: "Sequence[Cut]") -> "dict[Cut, list[int]]":
    """Return the layers of each different cut."""
    groups: dict[Cut, list[int]] = {}
    for layer, cut in enumerate(cuts):
        groups.setdefault(cut, []).append(layer)
    return groups


def as_json(found: "Slices", opened: "OpenModel") -> dict[str, Any]:
    """Return the slices as a JSON object. All bytes are those of one token."""
    cuts = [{"layers": layers, "window": cut.window, "sent": [_part_json(part) for part in cut.sent],
             "fetched": _part_json(cut.fetched), "kept": [_part_json(part) for part in cut.kept]}
            for cut, layers in grouped(found.cuts).items()]  # fmt: skip
    return {
        "model": opened.source.name, "dtype": str(opened.dtype).removeprefix("torch."),
        "slices": len(found.cuts) + 1, "cuts": cuts, "tables": [_part_json(part) for part in found.tables],
        "sent_bytes": sum(cut.sent_bytes for cut in found.cuts),
        "fetched_bytes": sum(cut.fetched.nbytes for cut in found.cuts),
    }  # fmt: skip


def _part_json(part: "SlicedTensor") -> dict[str, Any]:
    return {"name": part.name, "shape": part.shape, "bytes": part.nbytes}


def text(found: "Slices", opened: "OpenModel") -> Iterator[str]:
    """Yield the lines of the report."""
    count, dtype = len(found.cuts), str(opened.dtype).removeprefix("torch.")
    yield f"{opened.source.name} in {dtype}: the attentions of {count} layers cut it into {count + 1} slices"
    yield ""
    yield "  slice 0: embedding, and layer 0 up to q, k and v"
    if count > 1:
        yield f"  slice i, from 1 to {count - 1}: layer i - 1 after its attention, and layer i up to q, k and v"
    yield f"  slice {count}: layer {count - 1} after its attention, and the head"
    yield ""
    yield _ROW.format("", "tensor", "of a token", "bytes")
    for cut, layers in grouped(found.cuts).items():
        yield f"  {_layers(layers)}" + (f", window of {cut.window:,} tokens" if cut.window else "")
        yield from _rows("to attention", cut.sent)
        yield from _rows("from attention", [cut.fetched])
        yield from _rows("kept", cut.kept)
    yield ""
    yield from _totals(found, opened)


def _layers(numbers: list[int]) -> str:
    """Return layer numbers as text, such as layers 0-29."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"layers {', '.join(shown)}"


def _rows(way: str, parts: "Sequence[SlicedTensor]") -> Iterator[str]:
    for i, part in enumerate(parts):
        shape = " x ".join(f"{n:,}" for n in part.shape) or "1"
        yield _ROW.format("" if i else way, part.name, shape, f"{part.nbytes:,}")


def _totals(found: "Slices", opened: "OpenModel") -> Iterator[str]:
    """Yield the bytes of all layers, and of the tables that slices read beside what crosses."""
    sent, fetched = (sum(x) for x in zip(*((c.sent_bytes, c.fetched.nbytes) for c in found.cuts), strict=True))
    yield f"All layers, per token: {sent:,} bytes to attention, {fetched:,} from it, {sent + fetched:,} together"
    if formula := _formula(found, opened):
        yield f"  = {formula}"
    facts, count = opened.facts, len(found.cuts)
    padded = (facts.sent + facts.fetched) * count
    if padded != sent + fetched:
        yield (
            f"  flexengine pads {facts.heads} heads and {facts.kv_heads} KV heads of every layer to"
            f" {facts.head_dim} elements, and moves {padded:,} bytes"
        )
    kept = max(cut.kept_bytes for cut in found.cuts)
    yield f"Kept while attention runs: at most {kept:,} bytes per token"
    if tables := Counter((part.name, part.nbytes) for part in found.tables):
        named = ", ".join((f"{n} x " if n > 1 else "") + f"{name} ({size:,})" for (name, size), n in tables.items())
        yield f"Beside these, slices read tables made from token ids and positions alone (bytes per token): {named}"


def _formula(found: "Slices", opened: "OpenModel") -> str:
    """Return Lamina's formula of the bytes of all layers (section 3.2), or "" if layers differ or heads have several
    widths."""
    shapes = {(*(part.shape for part in cut.sent), cut.fetched.shape) for cut in found.cuts}
    (q, k, v, out), *others = shapes
    if others or k != v or q != out or q[1] != k[1]:
        return ""
    group, e = q[0] // k[0], opened.dtype.itemsize
    form = "4 e d L" if group == 1 else "(2 + 2/G) e d L"
    grouped = "" if group == 1 else f", G {group} query heads per KV head"
    return f"{form}, with e {e} bytes, d {q[0] * q[1]:,}, L {len(found.cuts)} layers{grouped}"
