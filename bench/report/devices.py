"""The block of docs/benchmarks.md about several devices: pipelines, attention workers, staggered pipelines, fleets,
cluster plans, the loader of weights."""

from collections.abc import Iterator
from pathlib import Path

from bench.harness import Record
from bench.report.lines import RESULTS, records, short, table

Row = tuple[str, str, str, str]  # run, figures, results, day
COMMANDS = ("python -m bench.pipeline", "python -m bench.workers --out workers.jsonl",
            "python -m bench.workers.siege --out workers.jsonl",
            "chrt -f 10 python -m bench.stagger --out stagger.jsonl", "python -m bench.fleet",
            "python -m bench.cluster --out cluster.jsonl", "python -m bench.loader --out loader.jsonl")  # fmt: skip


def devices_block(folder: Path = RESULTS) -> str:
    """Return the table of runs, and the commands under it."""
    rows = [row for part in (_pipelines, _workers, _staggered, _fleets, _regressions, _loader) for row in part(folder)]
    if not rows:
        return "Not recorded yet."
    listed = "\n".join(COMMANDS)
    return (f"{table(('run', 'figures', 'results', 'day'), rows)}\n\nCommands:\n\n<!-- not run: hours -->\n```sh\n"
            f"{listed}\n```")  # fmt: skip


def _newest(bench: str, folder: Path) -> dict[str, Record]:
    """Return the latest record of each case."""
    return {line["case"]["name"]: line for line in records(bench, folder=folder)}


def _pipelines(folder: Path) -> Iterator[Row]:
    found = _newest("pipeline", folder)
    if line := found.get("decode"):
        case, rates = line["case"], line["decode_tok_s"]
        yield (f"{case['stages']} stages, each with memory for {case['layers'] // case['stages']} of {case['layers']}"
               " layers, beside one process with the memory of one of them",
               f"{short(rates['stages'])} to {short(rates['one process'])} decode tok/s: {short(line['ratio'])}x",
               _tokens(line), line["time"][:10])  # fmt: skip
    if line := found.get("simulated"):
        yield (f"{line['case']['stages']} stages that stream all weights, beside virtual time",
               f"{short(line['seconds'])} s, simulated {short(line['simulated_seconds'])} s", _tokens(line),
               line["time"][:10])  # fmt: skip
    if line := found.get("unequal"):
        seconds, told = line["seconds"], line["predicted_job_seconds"]
        counts = ", ".join(f"{end - first}" for first, end in line["layers_by_stage"]["planned"])
        yield (f"{line['case']['stages']} stages of a model with a large head, {counts} layers as planned, beside even"
               " ones, under the same block, links throttled",
               f"{short(seconds['planned'])} s (predicted: {short(told['planned'])}), even {short(seconds['even'])} s"
               f" ({short(told['even'])}): {short(line['ratio'])}x", _tokens(line), line["time"][:10])  # fmt: skip
    if line := found.get("grid"):
        yield (f"{len(line['stages'])} numbers of stages x {len(line['policies'])} policies x"
               f" {' and '.join(line['launchers'])}", f"{line['runs']} runs of {line['rows']} rows",
               "all bytes equal" if line["same"] else f"{len(line['different'])} runs differ",
               line["time"][:10])  # fmt: skip
    if line := found.get("kills"):
        yield (f"SIGKILL of each of {line['case']['stages']} stages, at random moments, and the same command again",
               f"{line['kills']} kills; the command ended after {short(line['slowest_end_seconds'])} s at most",
               "the bytes of one process" if line["same"] else "different", line["time"][:10])  # fmt: skip


def _workers(folder: Path) -> Iterator[Row]:
    found = _newest("workers", folder)
    if line := found.get("block"):
        case, rates, decode, plan = (line[k] for k in ("case", "tok_s", "decode_tok_s", "predicted_to_measured"))
        yield (f"{case['workers']} attention workers, contexts of {case['context']:,} tokens, weights from a throttled"
               " disk, beside one process with the memory of one of them",
               f"{short(rates['workers'])} to {short(rates['one process'])} tok/s: {short(line['ratio'])}x; decode"
               f" {short(decode['workers'])} to {short(decode['one process'])}; predicted seconds"
               f" {short(plan['workers'])} and {short(plan['one process'])} of the measured ones",
               _tokens(line), line["time"][:10])  # fmt: skip
    if line := found.get("choice"):
        for name, each in line["cases"].items():
            seconds, used = each["seconds"], all(each["used"])
            yield (f"{name}: without workers, as planned with {line['case']['workers']}, and with workers in any case",
                   f"{short(seconds['alone'])}, {short(seconds['planned'])}, {short(seconds['forced'])} s;"
                   f" the plan {'uses' if used else 'does not use'} workers", _tokens(each),
                   line["time"][:10])  # fmt: skip
    if line := found.get("grid"):
        yield ("1 to 4 attention workers x partitions x cache formats x 3 families, in shared memory and over TCP",
               f"{line['runs']} runs", "tokens equal" if line["same"] else f"{len(line['differ'])} runs differ",
               line["time"][:10])  # fmt: skip
    if line := found.get("kills"):
        yield (f"SIGKILL of one of {line['case']['workers']} attention workers, at random moments",
               f"{line['kills']} kills in {line['runs']} runs", _tokens(line), line["time"][:10])  # fmt: skip
    if line := found.get("strangers"):
        stages = line["of_stages"]
        staged = sum(stages["sent"].values()) - stages["sent"].get("refused", 0)
        yield (f"{sum(line['sent'].values()):,} connections without the secret to an attention worker, and"
               f" {staged:,} to stages, on 2 machines (network namespaces)",
               f"{line['visits']} engines came in meanwhile, after {short(line['slowest_visit'])} s at most; jobs took"
               f" {short(line['seconds_attacked'])} s, {short(line['seconds_quiet'])} s without strangers; the worker"
               f" grew by {line['grown_bytes'] / 1e6:.0f} MB, a stage by {stages['grown_bytes'] / 1e6:.0f} MB; a"
               f" connection got at most {max(line['got'], stages['got'])} bytes",
               "tokens equal" if line["good"] else "faults", line["time"][:10])  # fmt: skip
    yield from _queries_first(folder)


def _staggered(folder: Path) -> Iterator[Row]:
    found = _newest("stagger", folder)
    if line := found.get("sleeping"):
        ratios = [order["ratio"] for point in line["points"] for order in point["orders"].values()]
        gains = line["rotational_to_fixed"]
        (least, low), *_, (most, high) = gains.items()
        yield (f"staggered pipelines of n = {least} to {most} on lanes that sleep: fixed, rotational and interleaved,"
               f" {len(ratios)} pipelines",
               f"periods of {short(min(ratios))} to {short(max(ratios))} of virtual time; rotational to fixed:"
               f" {short(low)}x for n = {least} to {short(high)}x for n = {most}, within"
               f" {100 * line['worst_gain_error']:.1f} % of n / (n - 1)",
               "within 10 %" if line["good"] else "more than 10 % off", line["time"][:10])  # fmt: skip
    if line := found.get("engines"):
        figures = "; ".join(
            f"attention {1e3 * x['attention']:.0f} ms: a layer {1e3 * x['alone']:.0f} ms alone,"
            f" {1e3 * x['both']:.0f} ms beside the other, {short(x['ratio'])} of virtual time" for x in line["points"]
        )  # fmt: skip
        yield ("2 engines on one attention worker, links and attention throttled", figures, _tokens(line),
               line["time"][:10])  # fmt: skip
    if line := found.get("turns"):
        yield _turns(line)


def _turns(line: Record) -> Row:
    case, orders = line["case"], line["points"]
    figures = "; ".join(f"{x['order']}, {x['batches']} gpu_batches: {1e3 * x['period']:.0f} ms" for x in orders)
    ratio = f"rotational to fixed: {line['rotational_to_fixed']:.3f}x of {line['ideal']:.3g}x"
    return (f"one job on {case['engines']} engines that take turns, links, slices ({1e3 * case['slice']:.0f} ms) and"
            f" attention ({1e3 * case['attention']:.0f} ms) throttled: a layer of all gpu_batches",
            f"{figures}; {ratio}", _tokens(line), line["time"][:10])  # fmt: skip


def _queries_first(folder: Path) -> Iterator[Row]:
    lines = {line["case"]["of"]: line for line in records("workers", folder=folder)
             if line["case"]["name"] == "queries"}  # fmt: skip
    ways = {"slowed": "device and worker that take given seconds", "computed": "one thread each for device and worker"}
    for line in lines.values():
        case, (plain, first) = line["case"], (line["sides"][side] for side in ("without", "first"))
        heads, batches, seconds = case["heads"] // case["kv_heads"], case["batches"], line["sweep_seconds"]
        clock = f"; in virtual time {100 * line['virtual_saved']:.1f} %" if "virtual_saved" in line else ""
        busy = ", ".join(f"{words} {100 * first['busy'][lane]:.0f} and {100 * plain['busy'][lane]:.0f} %"
                         for lane, words in (("device", "device"), ("worker1", "worker")))  # fmt: skip
        saved = f"{100 * line['saved']:.1f} % saved{clock}; busy: {busy}"
        yield (f"queries first and not, {heads} query head{'s' * (heads > 1)} per KV head, gpu_batches in flight:"
               f" {batches}; {ways[case['kind']]}",
               f"{short(1e3 * seconds['first'])} to {short(1e3 * seconds['without'])} ms per decode sweep:"
               f" {saved}", _tokens(line), line["time"][:10])  # fmt: skip


def _tokens(line: Record) -> str:
    return "tokens equal" if line["same"] else "tokens differ"


def _fleets(folder: Path) -> Iterator[Row]:
    names = {"actors": "3 actors on Ray, of which 2 are killed", "command": "3 actors on Ray, the command killed",
             "stages": "2 groups of 2 stages on Ray; a first stage, a second stage and an owner killed"}  # fmt: skip
    for name, line in _newest("fleet", folder).items():
        yield (names[name], f"{line['kills']} kills, {line['case']['rows']} rows, {line['runs']} runs of the command",
               ("each row once, " if line["once"] else "rows missing or twice, ")
               + ("the bytes of one process" if line["same"] else "other bytes"), line["time"][:10])  # fmt: skip


def _regressions(folder: Path) -> Iterator[Row]:
    for line in records("cluster", folder=folder):
        if line["part"] != "regressions":
            continue
        for form, phases in line["formats"].items():
            figures = "; ".join(f"{phase}: {100 * x['mean']:.1f} % mean, {100 * x['most']:.1f} % most"
                                for phase, x in phases.items())  # fmt: skip
            yield (f"seconds of a layer of {line['hidden']} on unseen shapes, {form}", f"error {figures}", "",
                   line["time"][:10])  # fmt: skip


def _loader(folder: Path) -> Iterator[Row]:
    newest = {(line["case"]["model"], line["case"]["weights"]): line for line in records("loader", folder=folder)}
    for (model, weights), line in newest.items():
        yield (f"reading, encoding and writing {model} as {weights}",
               f"{short(line['overlapped'])} s overlapped, {short(line['ratio'])} of the slowest step"
               f" ({line['slowest']}), {short(line['ratio_to_least'])} of the least possible seconds,"
               f" {short(line['sum'])} s one after another; {short(line['cores_used'])} of"
               f" {line['machine']['cores']} cores used; memory of {short(line['peak_in_largest'])} of the largest"
               " parameter",
               "; ".join(line["wrong"]) or "files equal", line["time"][:10])  # fmt: skip
