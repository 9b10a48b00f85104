"""Attention workers in a plan: bytes, bandwidths and waits by formulas, the paper's table and the virtual clock."""

from dataclasses import replace
from typing import Any

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.workload import Workload
from flexengine.policy import HEADS, REQUESTS, TOKENS, Policy
from flexengine.shell.explain import text as explain
from flexengine.shell.explain.links import WorkerLinks, least_bandwidth, price_words, token_bytes, worker_words
from flexengine.shell.explain.stagger import as_json
from flexengine.shell.explain.whatif import changes, helps
from tests.helpers.explained import GPU, model
from tests.helpers.plans import both

WORK = Workload({(192, 65): 32})  # all enter in the first sweep, and 64 sweeps decode; caches end with whole pages
POLICY = Policy(4, 8, cache={"workers": 1}, prefill_tokens=192)  # type: ignore[arg-type]


def machine(rate: float = 1e12, link: float = 1e12, asking: float = 0.0, **more: Any) -> Hardware:
    """Return a machine with two workers. rate: bytes of KV per second of each; link: bytes per second."""
    return replace(GPU, device_bytes=1 << 30, workers=(1 << 30,) * 2, links={**GPU.links, "h2d": 1e12, "d2h": 1e12},
                   worker_attention={"worker1": rate, "worker2": rate}, worker_seconds=asking,
                   worker_links={"worker1": link, "worker2": link}, **more)  # fmt: skip


def grouped(group: int) -> ModelFacts:
    return replace(model(), kv_heads=8 // group)


# The paper's minimum bandwidth (section 3.2, table of GB/s) and the utilisations that it implies.
A100, BLOCKS = 312e12, (128, 256, 512, 1024)
PAPER = [
    ("13B", 1, 5120, 40, 13.0e9, (0.25, 0.41, 0.46, 0.51), (4.90, 8.12, 9.08, 10.06)),
    ("33B", 2, 6656, 60, 32.5e9, (0.19, None, None, 0.41), (5.94, 9.31, 11.56, 12.53)),
    ("65B", 4, 8192, 80, 65.2e9, (0.15, None, None, 0.32), (7.55, 11.78, 13.92, 15.90)),
]


@pytest.mark.parametrize(("name", "gpus", "d", "layers", "parameters", "used", "table"), PAPER)
def test_the_table_of_the_paper(
    name: str, gpus: int, d: int, layers: int, parameters: float, used: Any, table: Any
) -> None:  # fmt: skip
    """Products of a step take 2 N B FLOP. The utilisations have two digits, so 4 % of error."""
    for block, share, gigabytes in zip(BLOCKS, used, table, strict=True):
        if share is not None:
            step = 2 * parameters * block / (share * gpus * A100)
            found = least_bandwidth(4 * 2 * d, layers, block, step)
            assert found == pytest.approx(2 * 2 * d * layers * share * gpus * A100 / parameters)
            assert found / 1e9 == pytest.approx(gigabytes, rel=0.04), name


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_of_a_token(group: int, workers: int) -> None:
    """docs/attention-workers.md: (2 + 2/G) e d, and of tokens (n + 2/G) e d down and n (e d + 4 h) up."""
    ed, h = 2 * 1024, 8
    for partition in (REQUESTS, HEADS):
        assert token_bytes(grouped(group), partition, workers) == (2 + 2 / group) * ed
    down, up = (workers + 2 / group) * ed, workers * (ed + 4 * h)
    assert token_bytes(grouped(group), TOKENS, workers) == down + up


def run(hardware: Hardware, policy: Policy = POLICY, group: int = 1) -> tuple[WorkerLinks, Prediction, float]:
    """Return the links, the prediction, and the share of the decode sweeps in which the device of the clock works."""
    facts = grouped(group)
    prediction, forecast = both(facts, hardware, WORK, policy)
    begins = min(start for task, start, _ in forecast.spans if task.cell.sweep == 1)
    spans = [(start, end) for task, start, end in forecast.spans if task.lane == "device" and start >= begins]
    links = WorkerLinks.of(facts, hardware, prediction)
    assert links is not None
    return links, prediction, sum(end - start for start, end in spans) / (forecast.seconds - begins)


@pytest.mark.parametrize("group", [1, 4])
def test_numbers_of_a_sweep(group: int) -> None:
    """32 sequences decode in every sweep, 16 at each worker, 4 in a gpu_batch."""
    rate, link, asking = 1e10, 5e8, 1e-4
    links, prediction, _ = run(machine(rate, link, asking), group=group)
    ed, kv = 2 * 1024, 2 * 2 * 1024 // group
    step = prediction.lanes["decode"]["device"]
    assert links.least == pytest.approx((2 + 2 / group) * ed * 32 * 8 / step)
    assert links.moving == pytest.approx((2 + 2 / group) * ed * 16 / link)
    attended = 16 * kv * (192 + 64 / 2 + 0.5) / rate  # with its own token, the mean of 193 to 256 tokens
    assert links.attending == pytest.approx(attended + 4 * asking, rel=0.01)
    assert links.away == pytest.approx((links.moving + links.attending) / 4)
    assert links.batches == pytest.approx(8)
    assert links.meanwhile == pytest.approx(step / 8 * 7 / 8)


CASES = [
    ("fast", machine(), POLICY, "products", True),
    ("slow link", machine(link=2e7), POLICY, "transfers", False),
    ("slow attention", machine(rate=2e8), POLICY, "attention", False),
    ("one gpu_batch", machine(5e10, 1e10), replace(POLICY, gpu_batch_size=32, num_gpu_batches=1, partition=HEADS),
     "products", False),
    ("slow answers", machine(asking=7e-4), replace(POLICY, gpu_batch_size=16, num_gpu_batches=2), "products", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hardware", "policy", "longest", "hides"), CASES, ids=[case[0] for case in CASES])
def test_what_hides(name: str, hardware: Hardware, policy: Policy, longest: str, hides: bool) -> None:
    """If the link hides, the device of the virtual clock works all the time; else it waits."""
    links, prediction, works = run(hardware, policy)
    assert (links.longest, links.hides) == (longest, hides)
    assert (works > 0.97) == hides, works
    verdict = worker_words(model(), hardware, WORK, prediction)[3]
    assert ("the link hides" in verdict) == hides
    assert ("the link does not hide" in verdict) == (longest == "transfers")


@pytest.mark.parametrize("partition", [REQUESTS, HEADS, TOKENS])
def test_all_workers_of_a_team_count(partition: str) -> None:
    links, _, _ = run(machine(), replace(POLICY, partition=partition))
    assert (links.workers, links.token_bytes) == (2, token_bytes(model(), partition, 2))
    assert links.batches == pytest.approx(8, rel=0.1)


def test_lines_of_the_report() -> None:
    hardware = machine(link=2e9)
    prediction, _ = both(grouped(4), hardware, WORK, POLICY)
    text = explain.report("toy", grouped(4), hardware, WORK, prediction)
    assert "a token moves 5,120 bytes per layer over the links: (2 + 2/G) e d, with e 2, d 1,024, G 4" in text
    assert "a link carries 2.00 GB/s\n" in text
    bare = replace(hardware, links=GPU.links, worker_links={})
    assert "a link carries 1.00 GB/s if as fast as copies to the device\n" in explain.report(
        "toy", grouped(4), bare, WORK, both(grouped(4), bare, WORK, POLICY)[0])  # fmt: skip
    values = as_json(grouped(4), hardware, WORK, prediction)["workers"]
    assert (values["token_bytes"], values["workers"], values["longest"]) == (5120, 2, "products")
    near = replace(POLICY, cache=(1, 0, 0))
    other, _ = both(grouped(4), hardware, WORK, near)
    assert "Workers " not in explain.report("toy", grouped(4), hardware, WORK, other)
    assert as_json(grouped(4), hardware, WORK, other) == {}


def test_decoding_stores_no_pages_at_workers() -> None:
    """Their new keys and values come with the questions; prompts' pages are stored."""
    whole_pages = Workload({(128, 17): 32})
    prediction, forecast = both(model(), machine(link=1e6), whole_pages, replace(POLICY, prefill_tokens=128))
    stored = sum(end - start for task, start, end in forecast.spans if task.lane == "worker1_write")
    assert stored > 0
    assert prediction.busy["worker1_write"] == pytest.approx(stored, rel=0.05)
    assert prediction.lanes["decode"].get("worker1_write", 0.0) == 0.0


# Prices.


def test_tokens_per_unit_of_price() -> None:
    hardware = machine(prices={"device": 3.0, "host": 0.5, "worker1": 0.25, "worker2": 0.25})
    prediction, _ = both(model(), hardware, WORK, POLICY)
    near, _ = both(model(), hardware, WORK, replace(POLICY, cache=(1, 0, 0)))
    (line,) = price_words(model(), hardware, WORK, prediction)
    first, second = (part.split(" tok/s")[0].split()[-1] for part in line.split(";"))
    assert float(first.replace(",", "")) == pytest.approx(prediction.tok_s / 4.0, rel=0.01)
    assert float(second.replace(",", "")) == pytest.approx(near.tok_s / 3.5, rel=0.2)  # or the host's is faster
    assert "(places cost 4.00)" in line
    assert "without workers (places cost 3.50)" in line
    assert price_words(model(), machine(), WORK, prediction) == []
    assert Cost(model(), hardware, WORK).hardware.price(works=True) == 4.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": {"tape": 1}}, "prices has 'tape'; it may have device, host, disk, disk2, worker1, and so on"),
        ({"prices": {"device": -1}}, "prices device is -1; it must be a positive"),
        ({"prices": [1]}, "prices is [1]; it must be an object"),
        ({"links": {**GPU.links, "worker3_send": 1e9}}, "has links ['worker3_send']"),
    ],
)
def test_refused_hardware(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        replace(machine(), **change)
    assert message in str(error.value)


def test_a_nearly_full_worker_is_one_of_the_memories_that_may_grow() -> None:
    _, prediction, _ = run(machine())
    full = replace(machine(), workers=(prediction.layout.total("worker1"), 1 << 30))
    labels = [change.label for change in changes(model(), full, prediction)]
    assert [label.split()[-2] for label in labels if label.endswith(" space")] == ["worker1"]
    assert helps(model(), full, WORK, prediction, budget=0.0) is not None
