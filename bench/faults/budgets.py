"""Jobs in little memory, of five sizes: in a container (a cgroup, page cache included), and with --device-mem.

Each job must finish with the results of that much memory, and its process must not grow by more than a tenth over its
budget. In the smallest container a job may refuse instead, with a message and before it loads the weights: it has then
read only the headers and the samples that identify a model's files.
"""

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
LOOKED = 0.1  # share of the model's bytes that a job may read before it refuses
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
from flexengine.shell.commands import run
code = run.main(sys.argv[1:])
print("bytes read:", count, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Sizes:
    """A model and its memory sizes in bytes.

    Attributes:
        given: sizes for --device-mem.
        limits: sizes for containers.
        refusable: limits under which a job may refuse.
    """

    shape: OptShape
    given: tuple[int, ...]
    limits: tuple[int, ...]
    refusable: tuple[int, ...] = ()


# Below 300 MB the 20 MB of read buffers would be about a tenth of the budget, and a container of that size hardly
# holds Python and torch. The models are 0.7 and 0.2 GB in fp16, and twice that in fp32, in which they are computed.
FULL = Sizes(OptShape(layers=24, hidden=1024, ffn=4096, heads=16), (300 * MB, 450 * MB, 700 * MB, 1000 * MB, 1400 * MB),
             (300 * MB, 600 * MB, 900 * MB, 1300 * MB, 2000 * MB), refusable=(300 * MB,))  # fmt: skip
QUICK = Sizes(OptShape(layers=10, hidden=768, ffn=3072, heads=12), (300 * MB,), (600 * MB,))


class Budgets:
    """The same rows with all memory sizes.

    Attributes:
        work: an empty directory.
    """

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
        from flexengine.shell.commands import run

        ended = forked(lambda: run.main(self._arguments("whole")), [], Fault(), self.work / "log", SECONDS)
        if ended.code:
            raise RuntimeError(f"the job fails without an injected fault: {ended.said[-2000:]}")
        return (self.work / "whole").read_bytes()

    def given(self, tally: Tally) -> None:
        """Run with --device-mem, in forks of this process, which has imported everything."""
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
        from flexengine.shell.commands import run

        before = rss()
        code = run.main([*self._arguments(f"given-{size}"), "--device-mem", str(size)])
        print(f"grown {peak_rss() - before}", file=sys.stderr, flush=True)
        return code

    def limited(self, tally: Tally, offload: Path | None = None) -> None:
        """Run in a cgroup, without --device-mem.

        Args:
            offload: offload directory of the job, if it is not on the disk.
        """
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
        """Return what is wrong with the number of bytes that a job read: too many before a refusal, or fewer than the
        weights have."""
        size = sum(file.stat().st_size for file in shard_files(self.model))
        if refused:
            return [f"refused after {count:,} bytes of {size:,} were read"] if count > LOOKED * size else []
        return [f"only {count:,} bytes of {size:,} were read: not all reads are counted"] if count < size else []


def _environment() -> dict[str, str]:
    path: Sequence[str] = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
