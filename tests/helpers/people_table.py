"""Makes the table "What people run" of docs/models.md: each model's config, published form, and smallest machines.

python -m tests.helpers.people_table [NAME ...] [--write docs/models.md]

No weights are needed: sizes are those of modules on the meta device, with matrices in the published format.
"""

import argparse
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flexengine import shipped
from flexengine.codec.forms import WeightFormat, make_form
from flexengine.errors import FlexError
from flexengine.model.checkpoint import ByteRange
from flexengine.model.encoding import forms
from flexengine.plan.facts import NO_ATTENTION
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.min_memory import OVERHEAD, smallest
from flexengine.plan.search import search
from flexengine.plan.too_little import least_bytes
from flexengine.plan.workload import Workload
from flexengine.worker.open_model import OpenModel, open_model
from tests.helpers.people import INT4, MXFP4, PEOPLE, WORDS, Person

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLE = "## What people run"
CPU, GPU = "cpu-2core_24gb", "t4-16gb_208gb_ssd"
ROWS, PROMPT, NEW = 64, 512, 64
HEAD = (
    "| model | parameters | published as | checkpoint | state of a sequence | KV of a token"
    f" | least RAM, CPU | tokens/s: least, {CPU} | least GPU, RAM | tokens/s: least GPU, {GPU} |"
)
ABOUT = f"""\
{TITLE}

Made by `python -m tests.helpers.people_table --write docs/models.md` from published configs, or the defaults of
transformers' class where these are the model's, without weights. Parameters and bytes are those of the text model, with
matrices in the published form. State and KV are in the caches of a GPU, in bf16 (states of scans in fp32), of a token
that all layers keep; on a CPU that computes in fp32, KV has twice the bytes. *Least* is the smallest memory, beside
what Python and torch take, with which the planner finds a plan for {ROWS} rows of {PROMPT} prompt tokens and {NEW}
generated ones, and a disk for the checkpoint: the RAM of a machine like [{CPU}](machines.md); the memory of a GPU like
that of [{GPU}](machines.md) with all of that machine's RAM, and the RAM beside all of its GPU. Tokens/s are predicted,
with the least RAM or GPU memory, and with all that the file says.

{HEAD}
|---|---|---|---|---|---|---|---|---|---|
"""


class Machine(NamedTuple):
    """The least memory of a machine, and predicted tokens/s with it, and with that of the shipped file (0: no plan)."""

    least: int
    other: int  # least RAM beside a GPU with the file's memory; 0 on a CPU
    slow: float
    fast: float


def opened(name: str, folder: Path, kind: str) -> OpenModel:
    """Return a model without weights, whose matrices have the published format."""
    person = PEOPLE[name]
    fields = dict(person.fields)
    fields.pop("quantization_config", None)  # formats are given below
    (folder / "config.json").write_text(json.dumps(config_of(person) | fields))
    model = open_model(str(folder), None, kind, weights=False)
    if person.form:
        _encode(model, person.form)
    return model


def config_of(person: Person) -> dict[str, Any]:
    """Return the defaults of the model's config class, in bf16."""
    from transformers import AutoConfig

    if not person.kind:
        return {"dtype": "bfloat16"}
    config = AutoConfig.for_model(person.kind, **person.fields)
    return {**config.to_dict(), "dtype": "bfloat16"}


def _encode(model: OpenModel, form: str) -> None:
    """Give the matrices of layers a format; MXFP4 and packed INT4 those of experts only. Routers are never encoded."""
    edges = {model.skeleton.embedding[0], model.skeleton.head[0]}
    for name, plain in forms(model.skeleton, "int8").items():
        if name in edges or (form in (MXFP4, INT4) and not plain.count):
            continue
        packed = make_form(form, plain.packed.rows, plain.packed.columns)
        made = WeightFormat(packed, plain.count, plain.transposed)
        stored = model.locations[name]
        model.locations[name] = replace(stored, form=made, runs=(ByteRange(Path(), 0, made.nbytes),))
    model.use(model.lossy)


def machine(model: OpenModel, hardware: Hardware) -> Machine:
    """Return the least memory of a machine."""
    workload, facts = Workload({(PROMPT, NEW): ROWS}), model.facts
    hardware = replace(hardware, disk_bytes=None)
    shared = hardware.capacity.shared
    policies = smallest(512 if shared else 2048, hardware.capacity)

    def least(capacity: Capacity, tier: str) -> int:
        return least_bytes(facts, policies, workload, capacity, tier) or 0

    def rate(changed: Hardware) -> float:
        try:
            best = search(facts, changed, workload).best
        except FlexError:
            return 0.0
        return best.tokens / (best.seconds + best.load_seconds)

    device = least(hardware.capacity, "device") + (OVERHEAD if shared else 0)
    host = 0 if shared else least(hardware.capacity, "host")
    return Machine(device, host, rate(replace(hardware, device_bytes=device)), rate(hardware))


def row(name: str) -> tuple[str, ...]:
    """Return the cells of a model."""
    machines, cells = list[Machine](), tuple[str, ...]()
    for kind, file in (("cpu", CPU), ("cuda", GPU)):
        with tempfile.TemporaryDirectory() as folder:
            model = opened(name, Path(folder), kind)
        machines.append(machine(model, Hardware.load(shipped.find_file("hardware", file))))
        facts = model.facts
    attended = sum(window != NO_ATTENTION for window in facts.windows) if facts.windows else len(facts.layers)
    tables = sum(t.nbytes for t in facts.tables)
    parameters = (sum(t.elements for t in facts.tensors) + tables / 2) / 1e9
    stored = facts.stored_bytes + tables
    cells = (
        f"{parameters:.3g}B",
        WORDS[PEOPLE[name].form],
        size(stored),
        size(sum(facts.states)) if facts.states else "-",
        size(attended * facts.kv_token) if attended else "-",
    )
    cpu, gpu = machines
    return (name, *cells, size(cpu.least), rates(cpu), f"{size(gpu.least)}, {size(gpu.other)}", rates(gpu))


def size(nbytes: float) -> str:
    """Return bytes with a unit, three digits."""
    for unit, by in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= by:
            return f"{nbytes / by:.3g} {unit}" if nbytes < 999 * by else f"{nbytes / by:,.0f} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def rates(found: Machine) -> str:
    """Return both rates; "-" for a machine whose memory is less than the least."""
    return ", ".join(f"{float(f'{rate:.2g}'):g}" if rate else "-" for rate in (found.slow, found.fast))


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the section of docs/models.md."""
    return ABOUT + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def section(page: str) -> str:
    """Return the section of a docs/models.md; "" if it has none."""
    found = re.search(rf"^{re.escape(TITLE)}\n.*?(?=^## |\Z)", page, re.M | re.S)
    return found[0].rstrip("\n") + "\n" if found else ""


def listed(page: str) -> list[tuple[str, ...]]:
    """Return the rows of the section of a docs/models.md."""
    return [tuple(line.strip("| ").split(" | ")) for line in re.findall(r"^\| .* \|$", section(page), re.M)[1:]]


def with_section(page: str, text: str) -> str:
    """Return a docs/models.md with this section in place of its own, before the lists of architectures."""
    rest = page.replace(section(page).rstrip("\n") + "\n\n", "") if section(page) else page
    return rest.replace("## exact\n", f"{text.rstrip(chr(10))}\n\n## exact\n", 1) if text else rest


def main() -> int:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PEOPLE, []], metavar="NAME", help="default: all")
    parser.add_argument("--write", type=Path, help="page whose section is written")
    options = parser.parse_args()
    known = {cells[0]: cells for cells in listed(PAGE.read_text(encoding="utf-8"))}
    for name in options.names or PEOPLE:
        known[name] = row(name)
        print(" | ".join(known[name]), flush=True)
        if options.write:
            page = options.write.read_text(encoding="utf-8")
            rows = [known[name] for name in PEOPLE if name in known]
            options.write.write_text(with_section(page, table(rows)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
