"""flexengine plan --slices: what crosses the cuts between the layers' attentions and the rest of the model."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flexengine.shell.commands.parser import refuse_given
from flexengine.shell.commands.plan_cluster import CLUSTER_ONLY

if TYPE_CHECKING:
    from flexengine.model.slices import Cut, SlicedTensor, Slices
    from flexengine.worker.open_model import OpenModel

# Options of plan that go with --slices; those of a cluster plan are refused for themselves.
_USED = {"model", "dtype", "device", "trust_remote_code", "allow_symlinks", "hardware", "slices", "json", "config"}
_ALLOWED = {*_USED, "quiet", "verbose", *CLUSTER_ONLY}
_ROW = "    {:<18}{:<24}{:<12}{:>12}"  # where to, name, shape, bytes


def check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if an option is given that does not go with --slices."""
    names = [name for name in args.changed if name not in _ALLOWED]
    refuse_given(args, names, "has no effect with --slices, which depends on the model and its dtype; leave one out")


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

    def parts(tensors: "Sequence[SlicedTensor]") -> list[dict[str, Any]]:
        return [{"name": part.name, "shape": part.shape, "bytes": part.nbytes} for part in tensors]

    cuts = [
        {
            "layers": layers,
            "window": cut.window,
            "sent": parts(cut.sent),
            "fetched": parts([cut.fetched])[0],
            "kept": parts(cut.kept),
        }
        for cut, layers in grouped(found.cuts).items()
    ]
    return {
        "model": opened.source.name,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "slices": len(found.cuts) + 1,
        "cuts": cuts,
        "tables": parts(found.tables),
        "sent_bytes": sum(cut.sent_bytes for cut in found.cuts),
        "fetched_bytes": sum(cut.fetched.nbytes for cut in found.cuts),
    }


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
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


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
