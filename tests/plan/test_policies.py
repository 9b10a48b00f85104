"""docs/machines.md on FlexGen's machine: its commands are run, and its tables compared with their output."""

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from flexengine import shipped
from flexengine.lossy import Lossy
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.commands import plan as command
from flexengine.worker.open_model import open_model

ROOT = Path(__file__).parents[2]
# The paper's table of 512 tokens in and 32 out, without and with compression.
PUBLISHED = {"OPT-6.7B": 25.26, "OPT-30B": 7.32, "OPT-175B": 0.69,
             "OPT-6.7B, 4 bits": 29.12, "OPT-30B, 4 bits": 8.38, "OPT-175B, 4 bits": 1.12}  # fmt: skip
NAMES = tuple(PUBLISHED)
PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8").partition("## Chosen by flexengine")[2]
COMMANDS = dict(zip(NAMES, re.findall(r"^flexengine plan (.+)$", PAGE, re.M), strict=True))
# FlexGen's benchmark suite: gpu_batch size and number, splits, and whether the CPU attends.
SUITE = {
    "OPT-6.7B": (2, 1, (1, 0, 0), (1, 0, 0), (1, 0, 0), False),
    "OPT-30B": (48, 3, (0.2, 0.8, 0), (0, 1, 0), (0, 1, 0), True),
    "OPT-175B": (32, 8, (0, 0.5, 0.5), (0, 0, 1), (0, 1, 0), True),
    "OPT-6.7B, 4 bits": (72, 1, (1, 0, 0), (1, 0, 0), (1, 0, 0), False),
    "OPT-30B, 4 bits": (64, 8, (0, 1, 0), (0, 1, 0), (0, 1, 0), False),
    "OPT-175B, 4 bits": (48, 3, (0, 1, 0), (0, 1, 0), (0, 1, 0), False),
}
T4 = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))


@cache
def table() -> dict[str, list[str]]:
    """Rows of the table of chosen policies, by their first cell; the heading's is empty."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    heading = next(line for line in PAGE.splitlines() if line[:1] == "|")
    assert tuple(cell.strip() for cell in heading.split("|")[2:-1]) == NAMES
    return {first: rest for first, *rest in rows}


def cell(row: str, name: str) -> str:
    return table()[row][NAMES.index(name)]


def said(row: str, name: str) -> list[float]:
    """The numbers of a cell."""
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", cell(row, name))]


@cache
def answers(name: str) -> list[dict[str, Any]]:
    """What a column's command prints: the chosen policy and the published one."""
    with redirect_stdout(StringIO()) as out:
        assert command.main([*COMMANDS[name].split(), "--json"]) == 0
    policies: list[dict[str, Any]] = json.loads(out.getvalue())["policies"]
    return policies


def options(name: str) -> Iterator[tuple[str, str]]:
    words = COMMANDS[name].split()
    yield from zip(words[1::2], words[2::2], strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_ask_for_flexgens_jobs(name: str) -> None:
    given = dict(options(name))
    model = name.split(",")[0].lower()
    assert COMMANDS[name].split()[0] == model
    assert (given["--prompt-tokens"], given["--max-tokens"]) == ("512", "32")
    policy = Policy.load(shipped.find("policies", given["--compare"]))
    assert int(given["--rows"]) % policy.block_size == 0
    switches = {key for key in given if key in ("--weights", "--cache", "--compute", "--sparse-attention")}
    narrow = {"--cache"} if "30B" in name else {"--weights", "--cache"}  # FlexGen compressed no weights of 30B
    assert switches == (narrow if "4 bits" in name else set())
    assert said("published result, tok/s", name) == [PUBLISHED[name]]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_what_the_commands_print(name: str) -> None:
    """Both predictions, and the chosen policy, which is no worse than the published one on the same rows."""
    auto, published = answers(name)
    assert said("published policy, predicted", name)[0] == pytest.approx(published["tok_s"], rel=0.01)
    assert auto["tok_s"] >= 0.99 * published["tok_s"]
    assert said("chosen policy, predicted", name)[0] == pytest.approx(auto["tok_s"], rel=0.01)
    p = Policy(**auto["policy"])
    shape = cell("chosen policy: gpu_batch x number, schedule", name)
    assert shape == f"{p.gpu_batch_size} x {p.num_gpu_batches}, {p.schedule}"
    splits = {"weights on GPU / CPU / disk": p.weights, "KV cache": p.cache, "activations": p.activations}
    for row, split in splits.items():
        assert said(row, name) == pytest.approx([100 * share for share in split], abs=0.06)
    assert cell("attention on the CPU", name) == ("yes" if p.delegates else "no")
    assert cell("slowest lane", name) == auto["bottleneck"]


@pytest.mark.parametrize("name", NAMES)
def test_published_policies_fit_as_given(name: str) -> None:
    """FlexGen's splits, block shapes and attention on the CPU, on its machine, with the whole block alive."""
    given = dict(options(name))
    policy = Policy.load(shipped.find("policies", given["--compare"]))
    shape = (policy.gpu_batch_size, policy.num_gpu_batches, policy.weights, policy.cache, policy.activations)
    assert (*shape, policy.delegates) == SUITE[name]
    lossy = Lossy(given.get("--weights"), cache=given.get("--cache"))
    facts = open_model(
        shipped.find("models", name.split(",")[0].lower()), None, "cuda", weights=False, lossy=lossy
    ).facts
    layout = lay_out(facts, policy, Workload({(512, 32): policy.block_size}), T4.capacity)
    assert all(layout.total(tier) <= limit for tier, limit in T4.capacity.limits.items() if limit is not None)
    held = {tier: pools[0].pages * pools[0].page_tokens for tier, pools in layout.pools.items()}
    assert sum(held.values()) >= (512 + 31) * policy.block_size or "4 bits" in name


@pytest.mark.parametrize("name", NAMES[:3])
def test_published_policies_are_predicted_within_a_factor_of_two(name: str) -> None:
    """In 16 bits, where both compute alike."""
    policy = Policy.load(shipped.find("policies", dict(options(name))["--compare"]))
    facts = open_model(shipped.find("models", name.lower()), None, "cuda", weights=False).facts
    work = Workload({(512, 32): policy.block_size})
    predicted = Cost(facts, T4, work).predict(lay_out(facts, policy, work, T4.capacity)).tok_s
    assert PUBLISHED[name] / 2 <= predicted <= 2 * PUBLISHED[name]
