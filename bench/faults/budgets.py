"""Jobs in little memory, five sizes of it: a container's limit (a cgroup's, page cache included), and what
--device-mem gives. Each must finish with the results that much memory gives, and the process must not grow by more than
a tenth over what it was given. In the smallest container a job may refuse instead, in words and before it loads the
weights: it has read no more of files than the headers and the places that tell one model from another."""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.faults.failing import Fault
from bench.faults.trials import Tally, forked
from bench.harness import peak_rss, rss
from bench.limit import NotPermitted, run_limited
from bench.models import OptShape, make, shard_files

MB = 10**6
OVER = 1.1
LOOKED = 0.1  # of the model's bytes may be read before it is refused
SECONDS = 300.0
REFUSED = 2
COUNTED = """
import os, sys, threading
real, count, lock = os.preadv, 0, threading.Lock()
def preadv(*how):
    global count
    got = real(*how)
    with lock:
        count += got
    return got
os.preadv = preadv  # all that is read of models passes there
from flexengine.commands import run
code = run.main(sys.argv[1:])
print("bytes read:", count, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Sizes:
    """A model and, in bytes, what is given to --device-mem and to containers. refusable: limits under which a job may
    refuse."""

    shape: OptShape
    given: tuple[int, ...]
    limits: tuple[int, ...]
    refusable: tuple[int, ...] = ()


# With less than 300 MB, the 20 MB of buffers for reading are about a tenth; as a limit, that hardly holds Python and
# torch. The models are 0.7 and 0.2 GB of fp16, twice that as they are computed with.
FULL = Sizes(OptShape(layers=24, hidden=1024, ffn=4096, heads=16), (300 * MB, 450 * MB, 700 * MB, 1000 * MB, 1400 * MB),
             (300 * MB, 600 * MB, 900 * MB, 1300 * MB, 2000 * MB), refusable=(300 * MB,))  # fmt: skip
QUICK = Sizes(OptShape(layers=10, hidden=768, ffn=3072, heads=12), (300 * MB,), (600 * MB,))


class Budgets:
    """The same rows in all memories; `work` is an empty folder."""

    def __init__(self, work: Path, sizes: Sizes) -> None:
        self.work, self.sizes = work, sizes
        self.model = make(sizes.shape, work / "model")
        rows = [{"prompt_token_ids": [7 + i + j for j in range(16 + 8 * i)], "max_tokens": 3} for i in range(8)]
        (work / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.expected = self._in_peace()

    def _arguments(self, name: str) -> list[str]:
        return [str(self.work / "in.jsonl"), "--model", str(self.model), "--output", str(self.work / name),
                "--offload-dir", str(self.work / "offload"), "--device", "cpu", "--ignore-eos"]  # fmt: skip

    def _in_peace(self) -> bytes:
        from flexengine.commands import run

        ended = forked(lambda: run.main(self._arguments("whole")), [], Fault(), self.work / "log", SECONDS)
        if ended.code:
            raise RuntimeError(f"the job fails in peace: {ended.said[-2000:]}")
        return (self.work / "whole").read_bytes()

    def given(self, tally: Tally) -> None:
        """--device-mem, in forks of this process, which has imported everything."""
        for size in self.sizes.given:
            log = self.work / "log"
            ended = forked(lambda size=size: self._growth(size), [], Fault(), log, SECONDS)  # type: ignore[misc]
            grown = int(ended.said.rpartition("grown ")[2] or 0) if ended.code == 0 else 0
            wrong = self._judged(f"given-{size}", ended.code, ended.said)
            if grown > OVER * size:
                wrong.append(f"grown by {grown:,}")
            tally.points[f"{size // MB} MB: grown by"] = grown
            tally.note(f"--device-mem {size:,}", wrong, seconds=ended.seconds)

    def _growth(self, size: int) -> int:
        from flexengine.commands import run

        before = rss()
        code = run.main([*self._arguments(f"given-{size}"), "--device-mem", str(size)])
        print(f"grown {peak_rss() - before}", file=sys.stderr, flush=True)
        return code

    def limited(self, tally: Tally, offload: Path | None = None) -> None:
        """A cgroup around a process that is told nothing of it. offload: its offload directory, if not on the disk."""
        for size in self.sizes.limits:
            name = f"limited-{size}{'-ram' * (offload is not None)}"
            command = [sys.executable, "-c", COUNTED, *self._arguments(name)]
            command += ["--offload-dir", str(offload)] if offload else []
            try:
                code, _, said, peak = run_limited(command, size, timeout=SECONDS, env=_environment())
            except NotPermitted as error:
                tally.faults.append(f"skipped: {error}")
                return
            tally.points[f"{size // MB} MB: {'refused' if code == REFUSED else 'most used'}"] = peak or 0
            refused = code == REFUSED and size in self.sizes.refusable and "Traceback" not in said
            wrong = [] if refused else self._judged(name, code, said)
            if not wrong:
                counted = re.search(r"bytes read: (\d+)", said)
                wrong = self._misread(int(counted[1]), refused) if counted else [f"nothing was counted: {said[-400:]}"]
            tally.note(f"limit of {size:,}", wrong)

    def _judged(self, name: str, code: int, said: str) -> list[str]:
        if code:
            return [f"exit code {code}: {said.strip()[-400:]}"]
        return [] if (self.work / name).read_bytes() == self.expected else ["other results"]

    def _misread(self, count: int, refused: bool) -> list[str]:
        """What is wrong with so many bytes read: too many before a refusal, or too few for having read the weights."""
        size = sum(file.stat().st_size for file in shard_files(self.model))
        if refused:
            return [f"refused after {count:,} bytes of {size:,} were read"] if count > LOOKED * size else []
        return [f"only {count:,} bytes of {size:,} were read: not all reads are counted"] if count < size else []


def _environment() -> dict[str, str]:
    path: Sequence[str] = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
