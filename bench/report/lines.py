"""Records of comparisons as lines of one format, and the texts of the tables."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cases import Case, Lengths
from bench.harness import REPO, Record

RESULTS = REPO / "bench" / "results"
MODELS = {"demo": "SmolLM2-135M", "opt-1.3b": "OPT-1.3B shape, fp16", "opt-13b": "OPT-13B shape, fp16",
          "llama-1.1b": "LLaMA-1.1B shape, fp16", "opt-tiny": "three tiny OPT layers",
          "qwen3.5-moe-2.7b": "Qwen3.5-MoE shape, bf16", "nemotron-h-2.7b": "Nemotron-H shape, bf16"}  # fmt: skip
EARLIER = {"generate": ("demo", "transformers"), "offload": ("opt-1.3b", "accelerate-disk")}  # bench: (model, peer)


def records(*names: str, folder: Path = RESULTS) -> list[Record]:
    """Return the records of these files of bench/results, oldest first."""
    paths = [folder / f"{name}.jsonl" for name in names]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


# ---- comparisons: three kinds of records as one


@dataclass(frozen=True)
class Line:
    """flexengine with some switches against one peer, in one run of a case.

    Attributes:
        ours, theirs: useful tokens/s as {median, min, max}; None if a side has none.
        share: flexengine's share of the bound.
        batch, dtype: batch size and dtype of the peer.
    """

    case: Case
    model: str
    switches: str
    limit: int | None
    time: str
    ours: Record | None
    share: Record | None
    peer: str
    theirs: Record | None
    ratio: Record | None
    equal: list[int] | None
    batch: int | None
    dtype: str | None
    runs: tuple[int, int]  # rounds of flexengine, of the peer
    at_least: float | None = None  # the ratio if the peer was stopped while generating
    why: str | None = None  # why there is no ratio
    command: str | None = None  # the command, if the record has it
    classes: tuple[str, str] | None = None  # of numbers, of flexengine and of the peer, if the record has them

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the line's key. A later line replaces an earlier one with the same key."""
        return self.case.name, self.switches, self.peer


def case_of(fields: Record) -> Case:
    """Return the case of a record."""
    lengths = {name: Lengths(**fields[name]) for name in ("prompt", "output")}
    return Case(**fields | lengths | {"peer_batches": tuple(fields["peer_batches"])})


def earlier_lines(record: Record) -> list[Line]:
    """Return the lines of a record of bench.generate or bench.offload, which were replaced by bench.compare."""
    model, peer = EARLIER[record["bench"]]
    case = case_of(record["case"])
    dtype = record.get("peer_dtype", "float32")
    return [
        Line(
            case, model, record.get("lossy", "exact"), record.get("limit_bytes"), record["time"], record["ours_tok_s"],
            record.get("share_of_bound_per_sweep"), peer, record["peer_tok_s"], record["ratio"], record["rows_equal"],
            record.get("peer_batch", case.rows), dtype, (len(record["ours"]), len(record["peer"])),
            record.get("ratio_at_least"),
        )
    ]  # fmt: skip


def lines_of(record: Record) -> list[Line]:
    """Return one line per peer of a record; none for records of other benches."""
    if record["bench"] in EARLIER:
        return earlier_lines(record)
    if record["bench"] != "compare":
        return []
    case, bound = case_of(record["case"]), record["bound"]
    return [
        Line(
            case, record["model"], record["lossy"], record["limit_bytes"], record["time"], record["ours_tok_s"],
            bound and bound["share"], peer, found["tok_s"], found["ratio"], found["rows_equal"], found["batch"],
            found["dtype"], (len(record["ours"]), len(found["runs"])), found["ratio_at_least"], found["error"],
            record.get("command"), (record["class"], found["class"]) if "class" in found else None,
        )
        for peer, found in record["peers"].items()
    ]  # fmt: skip


def latest(found: Iterable[Line]) -> list[Line]:
    """Return the newest line of each key (of one day, the line with most rounds), sorted by case, peer, exact first,
    ratio."""
    newest: dict[tuple[str, str, str], Line] = {}
    for line in sorted(found, key=lambda x: (x.time[:10], x.runs[1], x.time)):
        newest[line.key] = line
    return sorted(newest.values(), key=lambda x: (x.case.name, x.peer, x.switches != "exact", rate(x.ours)))


def rate(stats: Record | None) -> float:
    """Return the median; 0 for None."""
    return float(stats["median"]) if stats else 0.0


# ---- words


def short(value: float) -> str:
    """Return a number with three digits and no exponent."""
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if "e" in text else text


def spread(stats: Record | None, unit: str = "", scale: float = 1.0) -> str:
    """Return "1.91 (1.81-2.02)": median, minimum and maximum."""
    if stats is None:
        return ""
    middle, low, high = (short(scale * stats[k]) for k in ("median", "min", "max"))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}-{high})"


def lengths_text(lengths: Lengths) -> str:
    """Return "128" or "16-512"."""
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low}-{lengths.high}"


def case_text(line: Line) -> str:
    """Return model, memory limit and rows of a line as text."""
    case, limit = line.case, f", memory limit {line.limit / 1e9:.1f} GB" if line.limit else ""
    return (f"({case.name}) {MODELS.get(line.model, line.model)}{limit}, "
            f"{case.rows} x ({lengths_text(case.prompt)} in, {lengths_text(case.output)} out)")  # fmt: skip


def peer_text(line: Line) -> str:
    """Return a text such as "transformers, float32, batch 64"."""
    return ", ".join(filter(None, [f"`{line.peer}`", line.dtype, f"batch {line.batch}" if line.batch else None]))


def ratio_text(line: Line) -> str:
    """Return the ratio, or why there is none. The classes of numbers are named if they differ."""
    if line.ratio:
        mixed = line.classes is not None and line.classes[0] != line.classes[1]
        return spread(line.ratio) + (f", {line.classes[0]} against {line.classes[1]}" if mixed and line.classes else "")
    return f"at least {short(line.at_least)}" if line.at_least else line.why or "no figure"


def command(group: Sequence[Line]) -> str:
    """Return the command that measures these lines, which are of one case and run, again."""
    line = group[0]
    if line.command:
        return line.command
    words = [f"python -m bench.compare {line.case.name} --runs {line.runs[0]}"]
    peers = list(dict.fromkeys(x.peer for x in group))
    words.append("--peers " + " ".join(peers))
    if line.runs[1] != line.runs[0]:
        words.append(f"--peer-runs {line.runs[1]}")
    switches = list(dict.fromkeys(x.switches for x in group))
    if switches != ["exact"]:
        words.append("--lossy " + " ".join(switches))
    return " ".join(words)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def compared(folder: Path = RESULTS, files: Sequence[str] = ("generate", "offload", "compare")) -> list[Line]:
    """Return the lines of the table that is made from these files of bench/results."""
    every = [line for record in records(*files, folder=folder) for line in lines_of(record)]
    return [line for line in latest(every) if not line.case.name.startswith("smoke")]
