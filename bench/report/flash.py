"""The block of docs/benchmarks.md about neurons on demand: rates of a disk for records, ladder of I/O, predictors."""

from pathlib import Path
from statistics import median

from bench.harness import Record
from bench.report.lines import RESULTS, records, short, table

SHOWN = ("1", "8", "32")  # reads at a time
STEPS = {
    "naive": "all weights", "resident": "attention and the rest stay in memory", "predictor": "only predicted neurons",
    "window": "neurons of the last tokens stay", "bundles": "one read per neuron, not two",
}  # fmt: skip


def flash_block(folder: Path = RESULTS) -> str:
    """Return the tables, each with its command."""
    found = records("flash", folder=folder)
    disk = {line["case"]["kib"]: line for line in found if line["bench"] == "flash.disk"}
    ladders = {line["case"]["shape"]: line for line in found if line["bench"] == "flash.ladder"}
    trained = [line for line in found if line["bench"] == "relu_lm"]
    parts = [_disk(disk)] if disk else []
    parts += [_ladder(line) for line in ladders.values()]
    return "\n\n".join(parts + [_trained(line) for line in trained[-1:]]) or "Not recorded yet."


def _disk(by_size: dict[int, Record]) -> str:
    head = ("KiB of a record", *(f"MB/s, {n} at a time" for n in SHOWN),
            *(f"two reads to one, {n} at a time" for n in SHOWN), "day")  # fmt: skip
    rows = [
        (str(kib), *(short(line["rates"][n]) for n in SHOWN), *(short(line["bundled"][n]) for n in SHOWN),
         line["time"][:10])
        for kib, line in sorted(by_size.items())
    ]  # fmt: skip
    return f"{table(head, rows)}\n\nCommand: `python -m bench.flash.disk --out flash.jsonl`"


def _ladder(line: Record) -> str:
    case, steps = line["case"], line["steps"]
    turns = len(steps["naive"]["seconds"])
    head = (f"reads of a token, {case['shape']}", "MB", "MB by arithmetic", "reads", "ms", "least-most ms")
    rows = []
    for name, step in steps.items():
        ms = [1000 * seconds for seconds in step["seconds"]]
        rows.append((STEPS[name], *(short(step[key] / 1e6) for key in ("bytes", "arithmetic")), f"{step['requests']:,}",
                     short(median(ms)), f"{short(min(ms))}-{short(max(ms))}"))  # fmt: skip
    about = (f"The memory has room for {100 * case['share']:.0f} % of the neurons, which is the last {line['window']}"
             f" tokens. {case['layers']} layers were measured, {turns} times each, on"
             f" {line['time'][:10]}.")  # fmt: skip
    command = f"python -m bench.flash.ladder DIR --layers {case['layers']} --turns {turns} --out flash.jsonl"
    return f"{table(head, rows)}\n\n{about}\n\nCommand: `{command}`"


def _trained(line: Record) -> str:
    nll, about = line["nll"], f"{line['parameters'] / 1e6:.1f} M parameters, trained for {line['train_seconds']:.0f} s"
    head = (f"ReLU model of {about}", "active", "predicted", "misses", "false alarms", "nats per token", "more")
    shares = [f"{100 * line[key]:.1f} %" for key in ("active", "predicted", "misses", "false_alarms")]
    rows = [("exact", shares[0], "", "", "", f"{nll['dense']:.4g}", ""),
            ("oracle", shares[0], "", "", "", f"{nll['oracle']:.4g}", short(nll["oracle"] - nll["dense"])),
            ("predictors", *shares, f"{nll['predictor']:.4g}", short(line["nll_more"]))]  # fmt: skip
    return f"{table(head, rows)}\n\nCommand: `python -m bench.flash.relu_lm --out flash.jsonl`"
