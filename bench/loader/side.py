"""Side process of bench.loader: encodes the weights of a model once, in one of two ways.

Reads {"model", "weights", "way", "out"} as JSON on stdin; prints one JSON line.
"""

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from bench.harness import Record, peak_rss, restart_peak, rss

STEPS = ("read", "encode", "write")
WARM_UP = 4  # pieces encoded before memory and time count, so that libraries and threads are there


class Encoding:
    """The steps of flexengine.model.encoding for all encoded parameters of a model.

    Attributes:
        facts: bytes and counts of the work.
    """

    def __init__(self, model: str, weights: str, out: Path) -> None:
        from flexengine.lossy import Lossy
        from flexengine.model import encoding, shards
        from flexengine.tier.memory import keep_freed
        from flexengine.worker.open_model import open_model

        keep_freed()  # as every machine without a GPU does: page faults would take a third of the time
        opened = open_model(model, None, "cpu", lossy=Lossy(weights=weights))
        self.encoding, self.forms, self.locations = encoding, opened.forms, opened.locations
        paths = {name: out / f"{number}.safetensors" for number, name in enumerate(self.forms)}
        self.files = shards.TensorFiles(paths, {name: form.shape for name, form in self.forms.items()})
        stored = {name: self.locations[name].nbytes for name in self.forms}
        self.facts = {
            "parameters": len(stored), "read_bytes": sum(stored.values()), "largest_bytes": max(stored.values()),
            "largest_encoded_bytes": max(form.nbytes for form in self.forms.values()),
            "written_bytes": sum(form.nbytes for form in self.forms.values()), "depth": encoding.DEPTH,
        }  # fmt: skip

    def pieces(self) -> Iterator[Any]:
        """Yield the pieces of all parameters."""
        for name, form in self.forms.items():
            yield from self.encoding.pieces(name, self.locations[name], form)

    def _encode(self, pieces: Iterable[Any], write: Callable[[Any], None]) -> None:
        self.encoding.in_threads(pieces, lambda piece: self.encoding._encoded(piece, None), write)

    def steps(self) -> Record:
        """Do each step alone. Return the seconds, and processor seconds, of each.

        Only reading starts with the checkpoint out of the page cache; it drops the pieces. They are read again, as many
        at a time as wait in the engine, encoded by the engine's threads, and written.
        """
        seconds, processor = dict.fromkeys(STEPS, 0.0), dict.fromkeys(STEPS, 0.0)

        @contextmanager
        def timed(step: str) -> Iterator[None]:
            began, cpu = time.perf_counter(), time.process_time()
            yield
            seconds[step] += time.perf_counter() - began
            processor[step] += time.process_time() - cpu

        with timed("read"):
            deque(self.pieces(), maxlen=0)
        again, parts = self.pieces(), list[Any]()
        while pieces := list(islice(again, self.encoding.DEPTH)):
            with timed("encode"):
                self._encode(pieces, parts.append)
            with timed("write"):
                deque(map(self.files.write, parts), maxlen=0)
            parts.clear()
        return {"steps": seconds, "step_cpu_seconds": processor}

    def overlapped(self) -> Record:
        """Read, encode and write as the engine does."""
        self._encode(self.pieces(), self.files.write)
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
        work.encoding._encoded(first, None)
    del first
    base, cpu, began = rss(), time.process_time(), time.perf_counter()
    restart_peak()
    with work.files:
        found = work.steps() if setting["way"] == "steps" else work.overlapped()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = peak_rss() - base
    line = {"seconds": seconds, "cpu_seconds": cpu, "peak": peak, "facts": work.facts, **found}
    print(json.dumps({**line, "digest": digest_of(out)}), flush=True)


if __name__ == "__main__":
    main()
