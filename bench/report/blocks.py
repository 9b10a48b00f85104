"""The blocks of docs/benchmarks.md that are made from records, in Markdown: one function per block."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from bench.harness import Record
from bench.report.devices import devices_block
from bench.report.flash import flash_block
from bench.report.lines import (
    MODELS,
    RESULTS,
    Line,
    case_text,
    command,
    compared,
    peer_text,
    ratio_text,
    records,
    short,
    spread,
    table,
)
from bench.report.uses import uses_block

# Switches by heading of the README's table. Of several, the first one that was measured.
CLASSES = {
    "fp32, exact": ("exact",),
    "bf16": ("compute=bf16,cache=bf16",),
    "4 bits, int8": ("weights=int4,compute=int8,cache=int8", "weights=int4,compute=int8"),
}


def compare_block(folder: Path = RESULTS) -> str:
    """Return the table of comparisons, and the commands under it."""
    return _comparisons(compared(folder))


def avx2_block(folder: Path = RESULTS) -> str:
    """Return the same for a CPU without AVX-512."""
    return _comparisons(compared(folder, ("compare_avx2",)))


def _comparisons(lines: Sequence[Line]) -> str:
    head = ("case", "switches", "flexengine tok/s", "peer", "peer tok/s", "ratio", "rows equal", "of the bound", "day")
    rows = [
        (
            case_text(x), "none" if x.switches == "exact" else f"`{x.switches}`", spread(x.ours), peer_text(x),
            spread(x.theirs), ratio_text(x), f"{x.equal[0]} of {x.equal[1]}" if x.equal else "",
            spread(x.share, " %", 100), x.time[:10],
        )
        for x in lines
    ]  # fmt: skip
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.case.name, line.time), []).append(line)
    commands = [command(group) for group in groups.values()]
    listed = "\n".join(dict.fromkeys(commands))
    return f"{table(head, rows)}\n\nCommands:\n\n<!-- not run: hours -->\n```sh\n{listed}\n```"


def bounds_block(folder: Path = RESULTS) -> str:
    """Return the README's table: rates and shares of the bound, by case and class of numbers."""
    found: dict[str, dict[str, Line]] = {}
    for line in sorted(compared(folder), key=lambda line: (line.case.name, line.time)):
        if line.share is not None and line.ours is not None:
            found.setdefault(case_text(line), {})[line.switches] = line
    rows = [(case, *(_with_share(lines, names) for names in CLASSES.values())) for case, lines in found.items()]
    return table(("case", *CLASSES), [row for row in rows if any(row[1:])])


def _with_share(lines: dict[str, Line], names: Sequence[str]) -> str:
    """Return rate and share of the bound with the first of these switches that was measured."""
    line = next((lines[name] for name in names if name in lines), None)
    if line is None or line.ours is None or line.share is None:
        return ""
    return f"{short(line.ours['median'])} ({100 * line.share['median']:.0f} %)"


def attention_block(folder: Path = RESULTS) -> str:
    """Return the tables of decode attention by cache format, and of prompts by length."""
    newest = {record["case"]["name"]: record for record in records("attention", folder=folder)}
    decode = [record for record in newest.values() if "kinds" in record]
    prompts = [record for record in newest.values() if "lengths" in record]
    first = decode[0]["case"]
    head = (f"{first['sequences']} sequences of {first['tokens']} tokens, heads of {first['dim']}", "cache",
            "GB/s of cache", "of a plain read's rate", "of the bound",
            "tokens/s to torch's fp32 attention")  # fmt: skip
    rows = [
        (heads_of(record), kind, short(x["gb_s"]), f"{100 * x['share']:.0f} %", percent(x.get("bound")),
         short(x["to_sdpa"]))
        for record in decode for kind, x in record["kinds"].items() if "share" in x
    ]  # fmt: skip
    parts = [table(head, rows)]
    if prompts:
        lengths = [str(n) for n in prompts[0]["case"]["tokens"]]
        rates = [
            (heads_of(record), *(f"{x['gflop_s']:.0f} ({percent(x['share'])})" for x in record["lengths"].values()))
            for record in prompts
        ]
        parts += [bound_text(prompts[-1]), table(("prompt of tokens", *lengths), rates)]
    return "\n\n".join((*parts, "Command: `python -m bench.kernels.attention`"))


def sweeps_block(folder: Path = RESULTS) -> str:
    """Return the table of the parts of a decode sweep."""
    found = {x["lossy"]: x for x in records("kernels", folder=folder) if x["bench"] == "kernels.sweeps"}
    if not found:
        return "Not recorded yet."
    case, parts = (next(iter(found.values()))[key] for key in ("case", "prompts"))
    rows = [("none" if name == "exact" else f"`{name}`", phase, *(short(x[phase][part]) for part in parts))
            for name, x in found.items() for phase in ("prompts", "sweep")]  # fmt: skip
    text = f"Milliseconds of all prompts and of a decode sweep, {case['rows']} rows with {case['prompt']} tokens each."
    command = f"python -m bench.kernels.sweeps --lossy {' '.join(found)} --out kernels.jsonl"
    return f"{text}\n\n{table(('switches', 'of', *parts), rows)}\n\nCommand: `{command}`"


def formats_block(folder: Path = RESULTS) -> str:
    """Return the table of products with block types of GGUF files."""
    found = records("formats", folder=folder)
    if not found:
        return "Not recorded yet."
    (n, k), rates = found[-1]["case"]["shape"], found[-1]["rates"]
    kinds = next(iter(rates.values()))
    rows = [(f"`{kind}`", *(short(of[kind]) for of in rates.values())) for kind in kinds]
    text = f"GOP/s of one core, of a matrix [{n}, {k}], by the dtype of activations and the rows of a batch."
    command = "Command: `python -m bench.kernels.blocks --out formats.jsonl`"
    return f"{text}\n\n{table(('format', *rates), rows)}\n\n{command}"


def bound_text(record: Record) -> str:
    """Return the explanation of decode attention's bound and of the prompts' figures."""
    return (
        "The bound is the longer of two times: of a plain read of the cache, and of the products at the peak of"
        f" {record['peak_gflop_s']:.0f} GFLOP/s that this machine ({record['simd']} bits wide, {record['threads']}"
        " threads) showed in the same run. Prompts: GFLOP/s by tokens, and their share of that peak."
    )


def percent(share: float | None) -> str:
    """Return a share as text; "" if it was not recorded."""
    return "" if share is None else f"{100 * share:.0f} %"


def heads_of(record: Record) -> str:
    """Return the heads of a record of bench.kernels.attention as text."""
    case = record["case"]
    return f"{case['heads']} heads, {case['kv_heads']} of KV"


def _chosen(record: Record) -> str:
    """Return a note if a policy was compared with itself: the ratio then shows how much the machine varies."""
    chosen = [run["policy"] for run in record["auto"]]
    return ", which it chose itself" if all(policy == record["best_policy"] for policy in chosen) else ""


def plan_block(folder: Path = RESULTS) -> str:
    """Return the table of the planner: its policy against the best of a grid, and predicted against measured
    seconds."""
    found = records("plan", folder=folder)
    rows = [
        (
            f"{x['case']['name']}: {MODELS[x['case']['model']]} on `{x['case']['machine']['device']}`",
            f"auto against the best of {x['tried']} policies{_chosen(x)}", spread(x["ratio"]),
            f"{100 * x['prediction_error']['median']:.0f} % ({x['prediction_error']['runs']} runs)",
            f"{100 * x['prediction_error']['worst']:.0f} %", str(x["auto_failed"]),
        )
        for x in found if x["part"] == "auto"
    ]  # fmt: skip
    titles = {
        "error": "two models, two machines, three workloads",
        "held-out": "formats and shapes of attention, windows, experts, encoded weights, little memory",
        "first": "the same, each planned as a machine's first job",
    }
    for part, title in titles.items():
        for error in [x for x in found if x["part"] == part][-1:]:
            off = error["prediction_error"]
            mean = f", mean {100 * off['mean']:+.0f} %" if "mean" in off else ""
            rows.append((title, "given policies", "", f"{100 * off['median']:.0f} % ({off['runs']} runs){mean}",
                         f"{100 * off['worst']:.0f} %", str(error["failed"])))  # fmt: skip
    head = ("case", "policies", "rate to the best", "predicted to measured, median", "worst", "failed")
    commands = ", ".join(f"`python -m bench.plan {part} --model-dir DIR`" for part in ("auto", *titles))
    return table(head, rows) + f"\n\nCommands: {commands}"


def scales(folder: Path = RESULTS) -> dict[str, Record]:
    """Return the latest record of each part of bench.scale."""
    return {record["case"]["name"]: record for record in records("scale", folder=folder)}


def rows_block(folder: Path = RESULTS) -> str:
    """Return the table of time and memory by number of rows."""
    line = scales(folder).get("rows")
    if line is None:
        return "Not recorded yet."
    points = line["points"]
    slopes = [(b["seconds"] - a["seconds"]) / (b["rows"] - a["rows"]) for a, b in pairwise(points)]
    further = ["", *(f"{1e3 * slope:.2f}" for slope in slopes)]
    rows = [(f"{x['rows']:,}", short(x["seconds"]), ms, f"{x['peak_rss'] / 1e6:.0f}")
            for x, ms in zip(points, further, strict=True)]  # fmt: skip
    command = f"python -m bench.scale --parts rows --rows {' '.join(str(x['rows']) for x in points)}"
    return table(("rows", "seconds", "ms per further row", "peak MB"), rows) + f"\n\nCommand: `{command}`"


def scale_block(folder: Path = RESULTS) -> str:
    """Return the table of the cost of a row, a prompt token, a layer and a gpu_batch, and of the memory of a long
    job."""
    rows = []
    for name, line in scales(folder).items():
        if "per" in line:
            law, xs = line["seconds"], [p.get("rows", p.get("x")) for p in line["points"]]
            rows.append((name, f"{xs[0]:,} to {xs[-1]:,}",
                         f"{1e3 * law['b']:.3g} ± {1e3 * law['error']:.1g} ms per {line['per']}",
                         f"{line['rss']['b']:.3g} ± {line['rss']['error']:.1g} bytes" if "rss" in line else "",
                         f"`python -m bench.scale --parts {name}`"))  # fmt: skip
        elif name == "soak":
            most = {what: high for what, (_, high) in line["ranges"].items()}
            grown = f"{', '.join(line['grown'])} grown" if line["grown"] else "nothing grown after the first quarter"
            rows.append((name, f"{line['rows']:,} rows", f"{short(line['seconds'])} s",
                         f"at most {most['rss'] / 1e6:.0f} MB, {most['fds']} open files, {most['threads']} threads;"
                         f" {grown}", f"`python -m bench.scale --soak {line['rows']}`"))  # fmt: skip
    return table(("what grows", "from, to", "time", "memory", "command"), rows) if rows else "Not recorded yet."


RESIDENT = {
    "least in a cgroup": "a long prompt, the least memory that is accepted, in a cgroup of that and a tenth",
    "least": "a long prompt, the least memory that is accepted",
    "more": "a long prompt, a quarter more",
    "jobs in a cgroup": "12 jobs on one engine, in a cgroup of what they were given and a tenth",
    "jobs": "12 jobs on one engine",
    "states in a cgroup": "48 of 96 sequences with states, what their plan takes, in a cgroup of that and a tenth",
    "states": "48 of 96 sequences with states, what their plan takes",
}


def resident_block(folder: Path = RESULTS) -> str:
    """Return the table of the process's growth relative to its memory budget."""
    newest = {x["case"]: x for x in records("resident", folder=folder) if not x["quick"]}
    groups: dict[str, list[Record]] = {name: [] for name in RESIDENT}
    for case, record in newest.items():
        size = record["kind"] if record["kind"] != "prompts" else "more" if " of the least" in case else "least"
        groups[size + " in a cgroup" * ("in a cgroup" in case)].append(record)
    rows = [
        (RESIDENT[name], f"{len(group)}", f"{statistics.median(grown):.2f}", f"{max(grown):.2f}",
         f"{sum(bool(x['wrong']) for x in group)}")
        for name, group in groups.items() if (grown := [x["over"] for x in group if x["over"] is not None])
    ]  # fmt: skip
    head = ("jobs", "cases", "growth to what was given, median", "worst", "failed")
    kinds = " ".join(kind for kind in ("prompts", "jobs", "states") if any(x["kind"] == kind for x in newest.values()))
    return table(head, rows) + f"\n\nCommand: `python -m bench.resident {kinds}`"


FAULTS = {
    "kills": "SIGKILL, SIGTERM and SIGINT at random moments",
    "crashes": "SIGKILL before, within and after every call that changes a file",
    "protocol": "the n-th read, write, fsync, rename ... of input, output and journal fails, for every n",
    "journal": "journals cut at every byte, and with flipped bits",
    "engine": "the n-th call on offload directory or checkpoint fails or kills, the n-th allocation fails",
    "prepared": "the n-th call fails or kills while weights are prepared",
    "disks": "file systems that are full or read-only",
    "shared": "pairs of jobs on one offload directory or one output",
    "memory": "models in less memory than they need: `--device-mem` and cgroups, five sizes each",
    "input": "mutated input lines",
    "files": "models with damaged safetensors, index, config or GGUF, drawn by hypothesis",
    "bits": "flipped bits in weights, found by `--verify`",
}  # fmt: skip


def faults_block(folder: Path = RESULTS) -> str:
    """Return the table of the fault campaign, from the latest full record of every kind."""
    newest = {(x["part"], x["kind"]): x for x in records("faults", folder=folder) if not x["quick"]}
    rows = []
    for part, what in FAULTS.items():
        kinds = [record for (name, _), record in newest.items() if name == part]
        if kinds:
            if missing := [x["kind"] for x in kinds if not x["tried"]]:
                what += f"; not allowed there: {', '.join(missing)}"
            sums = [sum(x[name] for x in kinds) for name in ("tried", "survived", "lost", "repeated")]
            rows.append((what, *(f"{n:,}" for n in sums), max(x["time"] for x in kinds)[:10], f"`{part}`"))
    totals = [sum(int(row[i].replace(",", "")) for row in rows) for i in range(1, 5)]
    rows.append(("all", *(f"{n:,}" for n in totals), "", ""))
    head = ("what goes wrong", "tried", "survived", "rows lost", "rows run again", "day", "part")
    command = "python -m bench.models llama-tiny DIR && python -m bench.faults DIR --only PART"
    return table(head, rows) + f"\n\nCommand: `{command}`"


def published_block(folder: Path = RESULTS) -> str:
    """Return the table of FlexGen's policies on a simulated accelerator, the latest record of each."""
    newest = {x["case"]["name"]: x for x in records("published", folder=folder)}
    rows = []
    for name, x in newest.items():
        used = [f"{x['peak_bytes'][tier] / 1e6:,.0f} of {x['limits'][tier] / 1e6:,.0f}" for tier in ("device", "host")]
        rows.append((
            f"`{name}`", f"{x['layers']}", f"{x['sequences']} x ({x['tokens'][0]} in, {x['tokens'][1]} out)", *used,
            f"{x['peak_bytes']['disk'] / 1e6:,.0f}", f"{x['sweeps']}",
            f"{short(x['predicted_seconds'])}, {short(x['seconds'])}", f"{x['rows_equal']} of {x['rows_checked']}",
            x["time"][:10],
        ))  # fmt: skip
    head = ("policy", "layers", "block", "device, MB", "host, MB", "disk, MB", "sweeps", "predicted, taken s",
            "rows equal", "day")  # fmt: skip
    return table(head, rows) + "\n\nCommand: `python -m bench.published --out published.jsonl`"


BLOCKS: dict[str, Callable[[], str]] = {
    "compare": compare_block, "compare on AVX2": avx2_block, "attention": attention_block, "sweeps": sweeps_block,
    "formats": formats_block,
    "plan": plan_block, "rows": rows_block, "faults": faults_block, "scale": scale_block, "resident": resident_block,
    "uses": uses_block, "devices": devices_block, "flash": flash_block, "published": published_block,
}  # fmt: skip
README_BLOCKS: dict[str, Callable[[], str]] = {"bounds": bounds_block}
