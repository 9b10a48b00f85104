"""Damaged inputs and models: bytes are cut, flipped, repeated or replaced by hostile values. Each must end in a result
or in an error of flexengine's own, within SECONDS and MEMORY."""

import json
import os
import random
import select
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.compare.gguf_files import convert
from bench.faults.failing import Fault
from bench.faults.trials import Tally, forked, own_cache, real_command
from bench.harness import peak_rss

FILES = ("safetensors", "index", "config", "gguf")
BATCH = 25  # files per process
SECONDS = 30.0  # most seconds per file
MEMORY = 400 << 20  # most bytes by which a process may grow
NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (-1, 0, 10**9, 2**63, 1.5, 1e308, float("nan"), "", "x" * 10_000, [], [[[[]]]], {}, None,
                           True, "../../etc/passwd", "/dev/zero", "a/b", "\0")  # fmt: skip
JUNK = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b'"', b"}", b"NaN", b"\\ud800", b"[[", b"\xe2\x82", b",", b"\t")


def damaged(whole: bytes, generator: random.Random, head: int | None = None) -> bytes:
    """Return damaged bytes.

    Args:
        head: bytes at the beginning in which most damage is done; the default is all.
    """
    data, head = bytearray(whole), min(head or len(whole), len(whole))
    kind = generator.randrange(6)
    if kind == 0:
        return bytes(data[: generator.randrange(len(data))])
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(max(1, min(head, len(data))))
        if kind == 1:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            data[at] = generator.randrange(256)
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", generator.choice(NUMBERS))
        elif kind == 4:
            del data[at : at + generator.randrange(1, 40)]
        else:
            data[at:at] = generator.choice((data[at : at + generator.randrange(1, 40)], generator.choice(JUNK)))
    return bytes(data)


def hostile_json(whole: bytes, generator: random.Random) -> bytes:
    """Return a JSON object in which some values, at any depth, are replaced, or whose bytes are damaged."""
    if generator.random() < 0.4:
        return damaged(whole, generator)
    value = json.loads(whole)
    for _ in range(generator.randrange(1, 3)):
        place = value
        while (inner := [v for v in place.values() if isinstance(v, dict) and v]) and generator.random() < 0.6:
            place = generator.choice(inner)
        name = generator.choice(list(place))
        if generator.random() < 0.2:
            del place[name]
        else:
            old = place.get(name)
            numbers = [old * 2, old + 1, old - 1, -old] if type(old) is int else []
            place[name] = generator.choice([*VALUES, *numbers])
        if not place:
            break
    return json.dumps(value).encode()


def drawn(one: Callable[[random.Random], bytes], count: int, seed: int) -> list[bytes]:
    """Return `count` different cases. hypothesis draws their choices, with edges and repetitions more often than at
    random.

    The cases run later, in processes that may hang or die (see `_batch`), so hypothesis does not shrink them.
    """
    from hypothesis import HealthCheck, Phase, given, settings, strategies
    from hypothesis import seed as seeded

    cases: dict[bytes, None] = {}

    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategies.randoms(use_true_random=False))
    def draw(generator: random.Random) -> None:
        cases[one(generator)] = None

    attempt = known = 0
    while len(cases) < count:
        seeded(seed + attempt)(draw)()
        if len(cases) == known:
            raise ValueError(f"there are {known} different cases; {count} are wanted")
        attempt, known = attempt + 1, len(cases)
    return list(cases)[:count]


# Input lines.


def mutated_lines(count: int, generator: random.Random) -> list[bytes]:
    """Return lines of which about half are damaged, in different ways."""
    plain = b'{"prompt_token_ids": [7, 12, 300], "max_tokens": 2, "id": 12.5, "tags": ["a", null]}'
    batch = (b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": [9, 8, 7],'
             b' "max_tokens": 1, "temperature": 0.5}}')  # fmt: skip
    lines = []
    for i in range(count):
        line = plain if i % 2 else batch % i
        hurt = damaged(line, generator) if generator.random() < 0.6 else line
        lines.append(hurt.replace(b"\n", b" "))
    return lines


def input_lines(model: Path, work: Path, count: int, seed: int, tally: Tally) -> None:
    """Run one job of `count` lines. Every line that is not blank must have a result or an error."""
    work.mkdir()
    lines = mutated_lines(count, random.Random(seed))
    seen: set[str] = set()
    for i, line in enumerate(lines):  # damage may make two ids equal, for which the whole input is refused
        try:
            value = json.loads(line)
            name = value.get("custom_id") if isinstance(value, dict) else None
        except (ValueError, RecursionError):
            continue
        if isinstance(name, str) and name in seen:
            lines[i] = b"?" + line
        seen |= {name} if isinstance(name, str) else set()
    (work / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    output = work / "out.jsonl"
    policy = work / "policy.json"
    policy.write_text('{"gpu_batch_size": 64, "num_gpu_batches": 1}')
    arguments = [str(work / "in.jsonl"), "--model", str(model), "--output", str(output), "--policy", str(policy),
                 "--device", "cpu", "--max-tokens", "2", "--json"]  # fmt: skip

    def run() -> int:
        code = real_command(arguments)
        print(f"peak {peak_rss()}", flush=True)
        return code

    before = peak_rss()
    ended = forked(run, [], Fault(), work / "log", 900.0)
    rows = sum(1 for line in lines if line.strip())
    out = [json.loads(line) for line in output.read_bytes().splitlines()] if output.exists() else []
    failed = sum(1 for row in out if row.get("error") or (row.get("response") or {}).get("status_code", 200) != 200)
    peak = int(ended.said.rpartition("peak ")[2].split()[0]) if "peak " in ended.said else 0
    wrong = [] if ended.code == 1 else [f"exit code {ended.code}: {ended.said[-500:]}"]
    wrong += [] if peak - before < MEMORY else [f"{peak - before:,} bytes more memory"]
    tally.tried, tally.lost, tally.slowest = rows, abs(rows - len(out)), round(ended.seconds, 1)
    tally.survived = rows if not wrong and rows == len(out) else 0
    tally.points.update({"rows in": rows, "results": len(out) - failed, "error rows": failed, "peak bytes": peak})
    tally.faults += wrong


# Models.


def model_files(model: Path, work: Path, what: str, count: int, seed: int, tally: Tally) -> None:
    """Open and run `count` models in which a file of this kind is damaged."""
    work.mkdir()
    with own_cache(work / "cache") as cache:
        given, target, hurt = _prepared(model, work, what)
        whole, number = target.read_bytes(), 0
        cases = drawn(lambda generator: hurt(whole, generator), count, seed)
        while number < count:
            number += _batch(given, target, whole, cases[number : number + BATCH], tally)
        if left := [p.name for p in cache.glob("prepared/*.tmp-*")]:
            tally.note("at the end", [f"left over: {left[:3]}"])


def _prepared(model: Path, work: Path, what: str) -> tuple[Path, Path, Callable[[bytes, random.Random], bytes]]:
    """Return the model's path, the file to damage, and the way to damage it."""
    copy = work / "model"
    shutil.copytree(model, copy)
    _join(copy)
    if what == "gguf":
        convert(copy, file := work / "model.gguf")
        return file, file, lambda whole, g: damaged(whole, g, None if g.random() < 0.2 else 6000)
    if what == "config":
        return copy, copy / "config.json", hostile_json
    if what == "index":
        _shard(copy)
        return copy, copy / "model.safetensors.index.json", hostile_json
    file = copy / "model.safetensors"
    head = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    return copy, file, lambda whole, g: damaged(whole, g, None if g.random() < 0.2 else head)


def _join(directory: Path) -> None:
    """Join the shards to one file."""
    from safetensors.torch import load_file, save_file

    shards = sorted(directory.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for file in (*shards, *directory.glob("*.safetensors.index.json")):
        file.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _shard(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, directory / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _batch(given: Path, target: Path, whole: bytes, cases: Sequence[bytes], tally: Tally) -> int:
    """Try these cases in one process. Return how many were tried; the last of fewer cases ended the process."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(reader)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            shapes = _opened(given, target, whole)[1]
            for case in cases:
                os.write(writer, (json.dumps(_judged(given, target, case, shapes)) + "\n").encode())
        finally:
            os._exit(0)
    os.close(writer)
    tried = 0
    for line in _lines(reader):
        verdict, wrong, seconds = json.loads(line)
        tally.points[verdict] += 1
        tally.note(f"file {tally.tried}", wrong, seconds=seconds)
        tried += 1
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if tried < len(cases):
        keep = target.parent.parent / f"fault-{tally.tried}"
        keep.write_bytes(cases[tried])
        tally.note(f"file {tally.tried}", [f"hangs or ends the process (status {status})"])
        tried += 1
    return tried


def _lines(reader: int) -> Iterator[bytes]:
    """Yield lines from a pipe until it ends or no line comes for SECONDS."""
    rest = b""
    with open(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], SECONDS)[0] and (data := pipe.read(65536)):
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _opened(given: Path, target: Path, data: bytes) -> tuple[list[int], dict[str, Any]]:
    """Return the output of a model with this file, and the shapes of its parameters."""
    from flexengine.config import SamplingParams
    from flexengine.engine.engine import Engine
    from flexengine.policy import Policy

    target.write_bytes(data)
    with Engine(str(given), policy=Policy(gpu_batch_size=1, num_gpu_batches=1), device="cpu") as engine:
        shapes = {name: list(shape) for name, shape in engine.core.skeleton.loading.shapes.items()}
        result = engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, ignore_eos=True))[0]
        if result.error is not None:
            return [], shapes
        return result.token_ids, shapes


def _judged(given: Path, target: Path, data: bytes, shapes: dict[str, Any]) -> tuple[str, list[str], float]:
    from flexengine.errors import FlexError

    began, before = time.monotonic(), peak_rss()
    wrong: list[str] = []
    try:
        tokens, found = _opened(given, target, data)
        verdict = "loaded" if tokens else "row error"
        if found != shapes:
            wrong.append("loaded with other shapes")
    except FlexError:
        verdict = "refused"
    except BaseException as error:
        verdict = "another error"
        wrong.append(repr(error)[:300])
    seconds, grown = time.monotonic() - began, peak_rss() - before
    if grown > MEMORY:
        wrong.append(f"{grown:,} bytes more memory")
    if seconds > SECONDS:
        wrong.append(f"{seconds:.0f} s")
    return verdict, wrong, seconds
