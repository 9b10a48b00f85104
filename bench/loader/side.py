"""Side process of bench.loader: encodes the weights of a model once, in one of two ways.

Reads {"model", "weights", "way", "out"} as JSON on stdin; prints one JSON line.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import Record, peak_rss, restart_peak, rss

WARM_UP = 4  # pieces encoded before memory and time count, so that libraries and threads are there


class Encoding:
    """The steps of flexengine.model.encoding for all encoded parameters of a model.

    Attributes:
        facts: bytes and counts of the work.
    """

    def __init__(self, model: str, weights: str, out: Path) -> None:
        from flexengine.lossy import Lossy
        from flexengine.model import encoding, tensor_files
        from flexengine.worker.opened import open_model

        opened = open_model(model, None, "cpu", lossy=Lossy(weights=weights))
        self.encoding, self.forms, self.locations = encoding, opened.forms, opened.locations
        paths = {name: out / f"{number}.safetensors" for number, name in enumerate(self.forms)}
        self.files = tensor_files.TensorFiles(paths, {name: form.shape for name, form in self.forms.items()})
        stored = {name: self.locations[name].nbytes for name in self.forms}
        self.facts = {
            "parameters": len(stored), "read_bytes": sum(stored.values()), "largest_bytes": max(stored.values()),
            "largest_encoded_bytes": max(form.nbytes for form in self.forms.values()),
            "written_bytes": sum(form.nbytes for form in self.forms.values()), "depth": encoding.DEPTH,
        }  # fmt: skip

    def pieces(self) -> Iterator[Any]:
        """Yield the pieces of all parameters."""
        for name, form in self.forms.items():
            yield from self.encoding._pieces(name, self.locations[name], form)

    def encoded(self, piece: Any) -> Any:
        """Return a piece's encoded bytes."""
        return self.encoding._encoded(piece, None)

    def in_turn(self) -> Record:
        """Read, encode and write piece by piece in this thread. Return the seconds of each step."""
        steps = dict.fromkeys(("read", "encode", "write"), 0.0)

        def timed(step: str, work: Callable[..., Any], *args: Any) -> Any:
            began = time.perf_counter()
            done = work(*args)
            steps[step] += time.perf_counter() - began
            return done

        pieces = self.pieces()
        while (piece := timed("read", next, pieces, None)) is not None:
            part = timed("encode", self.encoded, piece)
            timed("write", self.files.write, part)
        return {"steps": steps}

    def overlapped(self) -> Record:
        """Read, encode and write as the engine does."""
        self.encoding.encode(self.pieces(), None, self.files.write)
        return {}


def digest_of(folder: Path) -> str:
    """Return a hash of the files in a directory."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run the setting on stdin."""
    setting = json.load(sys.stdin)
    out = Path(setting["out"])
    work = Encoding(setting["model"], setting["weights"], out)
    first = next(work.pieces())
    for _ in range(WARM_UP):
        work.encoded(first)
    del first
    base, cpu, began = rss(), time.process_time(), time.perf_counter()
    restart_peak()
    with work.files:
        found = work.in_turn() if setting["way"] == "in turn" else work.overlapped()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = peak_rss() - base
    line = {"seconds": seconds, "cpu_seconds": cpu, "peak": peak, "facts": work.facts, **found}
    print(json.dumps({**line, "digest": digest_of(out)}), flush=True)


if __name__ == "__main__":
    main()
