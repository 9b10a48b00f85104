"""The block of docs/benchmarks.md about neurons and experts on demand: rates of a disk for records, ladder of I/O, jobs
with and without flash mode, predictors, guesses of experts."""

from pathlib import Path
from statistics import fmean, median

from bench.harness import Record
from bench.report.lines import RESULTS, records, short, table

SHOWN = ("1", "8", "32")  # reads at a time
STEPS = {
    "naive": "all weights", "resident": "attention and the rest stay in memory", "predictor": "only predicted neurons",
    "window": "neurons of the last tokens stay", "bundles": "one read per neuron, not two",
}  # fmt: skip
SIDES = {
    "whole": "all experts of a layer", "slots": "chosen experts, which do not stay", "flash": "flash",
    "guessing": "flash, with early reads",
}  # fmt: skip


def flash_block(folder: Path = RESULTS) -> str:
    """Return the tables, each with its command."""
    found = records("flash", folder=folder)
    disk = {line["case"]["kib"]: line for line in found if line["bench"] == "flash.disk"}
    ladders = {line["case"]["shape"]: line for line in found if line["bench"] == "flash.ladder"}
    trained = [line for line in found if line["bench"] == "relu_lm"]
    jobs = {tuple(line["case"].values()): line for line in found if "token_seconds" in line}
    experts = {tuple(line["case"].values()): line for line in found if line["bench"] == "flash_experts"}
    guessed = [line for line in found if line["bench"] == "moe_lm"]
    parts = [_disk(disk)] if disk else []
    parts += [_ladder(line) for line in ladders.values()]
    parts += [_jobs(list(jobs.values()))] if jobs else []
    parts += [_trained(line) for line in trained[-1:]]
    parts += [_experts(list(experts.values()))] if experts else []
    return "\n\n".join(parts + [_guessed(line) for line in guessed[-1:]]) or "Not recorded yet."


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


def _jobs(lines: list[Record]) -> str:
    head = ("shape", "memory", "rows", "side", "seconds of a decoded token", "job, s", "predicted, s", "tokens equal")
    rows = [
        (line["case"]["shape"], f"{line['case']['memory'] / 1e9:.2f} GB", str(line["case"]["rows"]), side,
         *(short(line[name][side]) for name in ("token_seconds", "job_seconds", "predicted_seconds")),
         "yes" if line["tokens_equal"] else "no")
        for line in _sorted(lines) for side in line["token_seconds"]
    ]  # fmt: skip
    return f"{table(head, rows)}\n\nCommand: `python -m bench.flash DIR --out flash.jsonl`"


def _experts(lines: list[Record]) -> str:
    head = ("shape", "memory", "rows", "side", "MB of a sweep", "seconds of a sweep", "tokens equal")
    rows = [
        (line["case"]["shape"], f"{line['case']['memory'] / 1e9:.2f} GB", str(line["case"]["rows"]), SIDES[side],
         short(line["sweep_bytes"][side] / 1e6), short(line["sweep_seconds"][side]),
         "yes" if line["tokens_equal"] else "no")
        for line in _sorted(lines) for side in line["sweep_seconds"]
    ]  # fmt: skip
    return f"{table(head, rows)}\n\nCommand: `python -m bench.flash.experts DIR --out flash.jsonl`"


def _sorted(lines: list[Record]) -> list[Record]:
    """Return the records by shape and number of rows."""
    return sorted(lines, key=lambda line: (line["case"]["shape"], line["case"]["rows"]))


def _guessed(line: Record) -> str:
    head = (f"mixture of {line['parameters'] / 1e6:.1f} M parameters", "mean", *(f"layer {j + 1}" for j in
            range(len(line["hit_rates"]))))  # fmt: skip
    names = {"hit_rates": "named by the layer before", "repeated": "chosen by the token before"}
    rows = [(text, *(f"{100 * share:.0f} %" for share in (fmean(line[name]), *line[name])))
            for name, text in names.items()]  # fmt: skip
    return f"{table(head, rows)}\n\nCommand: `python -m bench.flash.moe_lm --out flash.jsonl`"
