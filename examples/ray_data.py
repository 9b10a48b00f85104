"""Run all prompt files of a directory on a pool of Ray actors, one engine each.

    pip install "flexengine[ray]"
    python examples/ray_data.py INPUT_DIR OUTPUT_DIR [--model M] [--actors N] [--max-tokens N]

INPUT_DIR: .jsonl and .parquet files, rows as for `flexengine run`. OUTPUT_DIR becomes a directory of Parquet files with
one row per input row, in no particular order:

    source, line   the file's name, and where in it the row starts (from 1)
    index          the row's number among all rows of all files, files in the order of their names; with `seed` it
                   determines sampling noise, so results do not depend on actors, batches or retries
    input          the row's fields as JSON
    and the columns that `Engine.__call__` adds. `error` says why a row, readable or not, has no result.

Restarting: start it again with the same arguments. Ray repeats the tasks of actors and nodes that are lost, so a row
may be computed more than once, but it is written once: a repeated write replaces its file. Everything is written to
OUTPUT_DIR.part, which takes the name OUTPUT_DIR after every row was found in it exactly once. A finished OUTPUT_DIR is
left as it is; an OUTPUT_DIR.part that a killed run left is removed, and its work is done again. Changes in INPUT_DIR
are not noticed: name another OUTPUT_DIR. Do not run two jobs with one OUTPUT_DIR at the same time.

On a cluster (RAY_ADDRESS) all paths must lead to the same files on every node. Several actors on one node share its
memory: limit the memory of each (--device-mem, which is RAM without a GPU, and --host-mem). A call to the engine ends
with its longest row, so a batch should have many more rows than the engine computes at once.
"""

import argparse
import json
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import ray

from flexengine import Engine, SamplingParams
from flexengine.job.inputs import InputRows
from flexengine.job.rows import Row

STEP = 2048  # rows of a task: what is done again if its actor is lost
BATCH = 256  # rows of a call
_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()
ASKED = pa.schema(
    dict(prompt=_TEXT, messages=_TEXT, prompt_token_ids=pa.list_(_INT), max_tokens=_INT, temperature=_FLOAT, seed=_INT,
         ignore_eos=pa.bool_(), top_k=_INT, top_p=_FLOAT, min_p=_FLOAT, repetition_penalty=_FLOAT,
         presence_penalty=_FLOAT, frequency_penalty=_FLOAT, stop=pa.list_(_TEXT), stop_token_ids=pa.list_(_INT),
         n=_INT, logprobs=_INT)
)  # fmt: skip
ABOUT = dict(source=_TEXT, line=_INT, index=_INT, input=_TEXT, unreadable=_TEXT)
SCHEMA = pa.schema([*map(pa.field, ABOUT, ABOUT.values()), *ASKED])


class Counts(NamedTuple):
    """InputRows of an output directory, and how many of them have an error."""

    rows: int
    failed: int


def main() -> None:
    args = arguments()
    if args.output.exists():
        print(f"{args.output} is there already: {in_words(count(args.output))}")
        return
    files = sorted(p for p in args.input.iterdir() if p.suffix in (".jsonl", ".parquet"))
    lengths = [sum(1 for _ in InputRows(path)) for path in files]
    if not sum(lengths):
        raise SystemExit(f"{args.input} holds no .jsonl or .parquet file with rows")
    part = args.output.with_name(args.output.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    ray.init()
    answers(args, files, lengths).write_parquet(str(part))
    check(part, sum(lengths))
    os.rename(part, args.output)
    print(f"{args.output}: {in_words(count(args.output))}, from {len(files)} files")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all prompt files of a directory with Ray Data.")
    parser.add_argument("input", type=lambda text: Path(text).resolve(), metavar="INPUT_DIR")
    parser.add_argument("output", type=lambda text: Path(text).resolve(), metavar="OUTPUT_DIR")
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: the demo model)")
    parser.add_argument("--actors", type=int, default=1, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=SamplingParams().max_tokens, metavar="N")
    parser.add_argument("--device-mem", metavar="SIZE", help="of each actor, such as 16G (default: what is free)")
    parser.add_argument("--host-mem", metavar="SIZE", help="of each actor on a GPU (default: what is free)")
    return parser.parse_args()


def answers(args: argparse.Namespace, files: list[Path], lengths: list[int]) -> Any:
    """Return the dataset of all output rows."""
    parts = [
        {"path": str(path), "first": sum(lengths[:i]), "start": start}
        for i, path in enumerate(files)
        for start in range(0, lengths[i], STEP)
    ]
    has = ray.cluster_resources()
    # An actor has as many threads as CPUs. One CPU is left to the tasks that write, without which all would wait.
    cpus = max(1, int(has["CPU"] - 1) // args.actors)
    return (
        ray.data.from_items(parts, override_num_blocks=len(parts))
        .map_batches(read, batch_size=1, batch_format="pyarrow")
        .map_batches(
            Engine,
            batch_size=BATCH,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=args.actors),
            num_cpus=cpus,
            num_gpus=1 if has.get("GPU") else None,
            fn_constructor_kwargs={"model": args.model, "device_mem": args.device_mem, "host_mem": args.host_mem},
            fn_kwargs={"params": SamplingParams(max_tokens=args.max_tokens), "row_options": True},
        )
        .map_batches(finished, batch_format="pyarrow")
    )


def read(parts: pa.Table) -> pa.Table:
    """Return STEP rows of a file as a table of SCHEMA.

    Args:
        parts: one row: `path` of the file, `first`: index of the file's first row, `start`: first row to read.
    """
    (part,) = parts.to_pylist()
    path, start = Path(part["path"]), part["start"]
    with InputRows(path) as rows:
        found = [about(row, path.name, part["first"]) for row in islice(rows, start, start + STEP)]
    return pa.Table.from_pylist(found, SCHEMA)


def about(row: Row, source: str, first: int) -> dict[str, Any]:
    """Return a row's cells. A row that does not fit the columns, or is no JSON, has `unreadable`."""
    cells: dict[str, Any] = dict(source=source, line=row.line, index=first + row.index, unreadable=row.error)
    try:
        cells["input"] = json.dumps(row.fields)
        return cells if row.error else {**cells, **pa.Table.from_pylist([asked(row.request)], ASKED).to_pylist()[0]}
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
        return {**cells, "unreadable": f"{row.place}: has a field of the wrong type: {error}"}


def asked(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the engine reads, in the form of their columns."""
    found = {name: request[name] for name in ASKED.names if request.get(name) is not None}
    if "messages" in found:
        found["messages"] = json.dumps(found["messages"])
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    return found


def finished(answered: pa.Table) -> pa.Table:
    """Return the output's columns. A row that could not be read has no prompt, so its error is the reader's, not the
    engine's."""
    error = pc.coalesce(answered["unreadable"], answered["error"])
    answered = answered.set_column(answered.schema.get_field_index("error"), "error", error)
    return answered.drop_columns(
        [name for name in ("unreadable", "input_logprobs", *ASKED.names) if name != "logprobs"]
    )


def check(directory: Path, rows: int) -> None:
    """Exit with a message unless the rows of a directory are numbered 0 to rows - 1, each once."""
    found = sorted(pa.dataset.dataset(directory).to_table(columns=["index"])["index"].to_pylist())
    if found != list(range(rows)):
        raise SystemExit(f"{directory} holds {len(found)} rows, {len(set(found))} of them different, of {rows}")


def count(directory: Path) -> Counts:
    """Return the counts of an output directory."""
    errors = pa.dataset.dataset(directory).to_table(columns=["error"])["error"]
    return Counts(len(errors), len(errors) - errors.null_count)


def in_words(counts: Counts) -> str:
    """Return counts as text."""
    return f"{counts.rows} rows, {counts.rows - counts.failed} done, {counts.failed} failed"


if __name__ == "__main__":
    main()
