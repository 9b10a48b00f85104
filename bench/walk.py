"""The modules that one prompt, one streamed weight and one out-of-memory error pass through in a job.

python -m bench.walk prompt|weight|error

Runs a job of a tiny model with a trace function in all threads. A module is a *room* of the walk if one of its
functions is called with the thing: the prompt's text or its token ids, the weight's name or its bytes, the error; or
with a record that holds it, at most DEPTH records deep; or if the error is raised through it. A *turn* is a move from a
room to one that was entered earlier; equal moves count once. Prints the rooms in the order of first entry, with the
numbers of the rooms that the walk turns back to from there, and counts. docs/architecture.md has the three walks.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bench.models import LlamaShape, make

DEPTH = 2
MOST_ITEMS = 8  # of a collection that is looked into
PACKAGE = "flexengine"
TEXT = "A walk"  # a row's prompt
IDS = [ord(letter) for letter in TEXT]
MESSAGE = "DefaultCPUAllocator: can't allocate memory"
FAILING_TASK = 12  # a task of the second sweep
SHAPE = LlamaShape(layers=3, hidden=64, ffn=176, heads=4, kv_heads=2, vocab=256)
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@dataclass
class Walk:
    """Rooms and turns of what `is_thing` recognises.

    Attributes:
        rooms: modules in the order of first entry, each with the function that was entered first.
        turns: (from, to) of moves back to earlier rooms.
    """

    is_thing: Callable[[Any], bool]
    rooms: dict[str, str] = field(default_factory=dict)
    turns: set[tuple[str, str]] = field(default_factory=set)
    _last: str = ""

    def holds(self, value: Any, depth: int = DEPTH) -> bool:
        """Return whether a value is the thing, or a record or short collection that holds it."""
        if self.is_thing(value):
            return True
        return depth > 0 and any(self.holds(part, depth - 1) for part in parts(value))

    def trace(self, frame: FrameType, event: str, value: Any) -> Any:
        """Note a call with the thing, or the thing raised. For `sys.settrace`."""
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(PACKAGE + "."):
            return None
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if event == "call" and any(self.holds(frame.f_locals.get(argument)) for argument in arguments):
            self.enter(name, code.co_qualname)
        if event == "exception" and self.is_thing(value[1]):
            self.enter(name, code.co_qualname)
        return self.trace

    def enter(self, room: str, function: str) -> None:
        """Move from the last room to this one."""
        order = list(self.rooms)
        if room in self.rooms and order.index(room) < order.index(self._last):
            self.turns.add((self._last, room))
        self.rooms.setdefault(room, function)
        self._last = room


def drawing(walk: Walk) -> list[str]:
    """Return a line per room: its number, its name, and the numbers of the rooms that the walk turns back to."""
    numbers = {room: n for n, room in enumerate(walk.rooms, 1)}
    lines = []
    for room, n in numbers.items():
        back = sorted(numbers[target] for start, target in walk.turns if start == room)
        marks = "back to " + " ".join(map(str, back)) if back else ""
        lines.append(f"{n:2} {room.removeprefix(PACKAGE + '.'):22} {marks}".rstrip())
    return lines


def parts(value: Any) -> Iterator[Any]:
    """Yield the items of a short collection, or the fields of a record of the package."""
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= MOST_ITEMS:
        yield from value
    elif isinstance(value, dict) and len(value) <= MOST_ITEMS:
        yield from value.values()
    elif type(value).__module__.startswith(PACKAGE + "."):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def is_prompt(value: Any) -> bool:
    """Return whether a value is the prompt's text or its token ids."""
    return value == TEXT if isinstance(value, str) else isinstance(value, list | tuple) and list(value) == IDS


def is_weight(value: Any) -> bool:
    """Return whether a value is the weight's name, or a tensor of its shape, which only its layer's twins have."""
    if isinstance(value, str):
        return value == WEIGHT
    shape = getattr(value, "shape", ())
    return isinstance(shape, tuple) and list(shape) == [SHAPE.hidden, SHAPE.ffn]


def is_error(value: Any) -> bool:
    """Return whether a value is the injected error, or one that was raised from it."""
    seen = set[int]()
    while isinstance(value, BaseException) and id(value) not in seen:
        if MESSAGE in str(value):
            return True
        seen.add(id(value))
        value = value.__cause__ or value.__context__
    return False


def fail_once(at: int) -> None:
    """Let the task of this number fail as torch does without memory."""
    from flexengine.worker.worker import Worker

    perform, count = Worker.perform, iter(range(1 << 60))

    def failing(self: Any, task: Any) -> None:
        if next(count) == at:
            raise RuntimeError(MESSAGE)
        perform(self, task)

    Worker.perform = failing  # type: ignore[method-assign]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token per character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(i): i for i in range(128)}
    fast = Tokenizer(models.WordLevel(letters, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)


def run(what: str, folder: Path) -> Walk:
    """Run a job and return the walk of what it asks for."""
    from flexengine import Engine, SamplingParams

    model = make(SHAPE, folder / "model")
    write_tokenizer(model)
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "Another prompt")))
    if what == "error":
        fail_once(FAILING_TASK)
    walk = Walk(THINGS[what])
    with Engine(str(model), device="sim", device_mem="1M", host_mem="64M", offload_dir=str(folder)) as engine:
        threading.settrace(walk.trace)
        sys.settrace(walk.trace)
        try:
            engine.run_job(str(source), str(target), SamplingParams(max_tokens=4, ignore_eos=True))
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
    lines = target.read_text().splitlines()
    if len(lines) != 2 or any(json.loads(line).get("error") for line in lines):
        raise SystemExit(f"the job failed: {lines}")
    return walk


THINGS = {"prompt": is_prompt, "weight": is_weight, "error": is_error}


def main() -> None:
    """Print a walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=THINGS)
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as folder:
        walk = run(what, Path(folder))
    print(*drawing(walk), sep="\n")
    print(f"{len(walk.rooms)} rooms, {len(walk.turns)} turns")


if __name__ == "__main__":
    main()
