"""Chosen values: with topk, what a cache off the device sends are all keys, and values when a layer has chosen them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.kernels import Kernels, load
from flexengine.kernels.cuda import CudaKernels
from flexengine.kernels.reference import ReferenceKernels
from flexengine.plan import layout as plan_layout
from flexengine.plan import sizes
from flexengine.tier.base import Region
from flexengine.worker.on_demand import Values
from tests.helpers.families import FAMILIES, NEW, make_checkpoint, prompts_of
from tests.helpers.held import held

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
HOMES = {"device": (1, 0, 0), "host": (0, 1, 0), "disk": (0, 0, 1), "spread": (0.4, 0.3, 0.3)}
LONG = (530, 300, 17)  # prompt lengths; pages of encoded keys and values are long


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest pages that a disk can write, and several bufferfuls of chosen values."""
    monkeypatch.setattr(sizes, "EXTENT", 4096)
    monkeypatch.setattr(plan_layout, "CHOSEN", 8192)


@pytest.fixture(autouse=True)
def hollow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill values that are not chosen with NaN instead of another sequence's data. Yield the numbers of filled
    pages."""
    filled, real = list[int](), Values.bring

    def bring(self: Values, chosen: Any, closed: Any, home: str, pool: Region, buffer: Region, shape: Any) -> None:
        page = 2 * shape.kv_heads * shape.size
        room = Region(buffer.place, buffer.start, buffer.nbytes // page * page, torch.uint8)
        pages = self.machine.device.view(room).view(-1, 2, page // 2)
        for places, tokens in zip(closed.buffer_pages.tolist(), closed.tokens.tolist(), strict=True):
            full = -(-tokens // shape.page_tokens)
            inside = sorted(set(places[:full]) - {places[full]})  # the page being filled may lie where an older one did
            pages[inside, 1] = 255  # also as a scale and as a minimum
            filled.append(len(inside))
        real(self, chosen, closed, home, pool, buffer, shape)

    monkeypatch.setattr(Values, "bring", bring)
    return filled


@pytest.fixture(scope="module", params=[4, 2], ids=["heads alone", "heads in pairs"])
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA for long prompts."""
    directory: Path = tmp_path_factory.mktemp("long")
    more = dict(FAMILIES["llama"][1], num_key_value_heads=request.param, max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "long", ("Llama", more))
        make_checkpoint("long", directory)
    return directory


def rows_of(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": p} for p in prompts_of(601, lengths)]


def run(
    directory: Path, rows: Any, policy: Policy, lossy: Lossy, device: str = "sim", kernels: Kernels | None = None,
    new: int = NEW,
) -> tuple[list[list[int]], dict[str, Any]]:  # fmt: skip
    with Engine(directory, policy=policy, device=device, lossy=lossy) as engine:
        engine.core.kernels = kernels or engine.core.kernels
        results = engine.generate(rows, SamplingParams(max_tokens=new, ignore_eos=True))
        assert [r.error for r in results] == [None] * len(rows)
        for tier in ("device", "host", "disk") if device == "sim" else ():
            booked = engine.layout.account[tier] if engine.layout else {}
            assert engine.core.machine.tier(tier).ledger.peak == sum(booked.values())
        return [r.token_ids for r in results], engine.summary.bytes


class Counting:
    """Does as other kernels do, and counts the chosen tokens in full pages, by kv head: by a sort in float64."""

    def __init__(self, page_tokens: int) -> None:
        self.inner, self.page_tokens, self.chosen = load(), page_tokens, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode_attention(self, q: Any, pool: Any, tables: Any, lengths: Any, options: Any, form: Any) -> Any:
        for i, length in enumerate(lengths.tolist()):
            k, _ = held(pool, tables[i], length, form)
            self._count(q[i].double(), k[:-1].double(), options.topk)
        return self.inner.decode_attention(q, pool, tables, lengths, options, form)

    def _count(self, q: torch.Tensor, k: torch.Tensor, topk: float) -> None:
        scores = torch.einsum("jgd,sjd->jgs", q.view(k.shape[1], -1, q.shape[-1]), k)
        best = scores.sort(dim=2, descending=True, stable=True).indices[..., : int(topk * len(k))]
        full = len(k) // self.page_tokens * self.page_tokens
        self.chosen += sum(len({t for t in head if t < full}) for head in best.flatten(1).tolist())


def ahead(lengths: tuple[int, ...], page_tokens: int, new: int) -> int:
    """Halves of pages, in tokens: keys, and values of the page that is being filled, of every decode step."""
    past = [n for length in lengths for n in range(length, length + new - 1)]
    return sum(-(-n // page_tokens) * page_tokens + page_tokens * (n % page_tokens > 0) for n in past)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lossy"), [
    *((family, Lossy(sparse_attention=0.3)) for family in ("opt", "llama", "mistral", "gemma2", "gpt-oss", "bloom")),
    ("llama", Lossy("int8", cache="int4", sparse_attention=0.3)),
])  # fmt: skip
def test_homes_batches_and_pieces_change_nothing(families: Any, family: str, lossy: Lossy) -> None:
    """Prompts in pieces and decode steps, with whole pages and with pages of chosen values, share a gpu_batch."""
    known, expected = families(family), None
    shapes = {"device": (8, 1, 2), "host": (3, 3, 1), "disk": (3, 3, 2), "spread": (8, 1, 3)}
    for home, (batch, batches, slots) in shapes.items():
        policy = Policy(batch, batches, cache=HOMES[home], slots=slots, prefill_tokens=16)
        found, _ = run(known.directory, known.rows, policy, lossy)
        expected = expected or found
        assert found == expected, home


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "bf16", "int8", "int4", "int2"])
def test_long_prompts(long: Path, cache: str | None, hollow: list[int]) -> None:
    """Several pages of encoded keys and values."""
    rows, lossy = rows_of(LONG), Lossy(cache=cache, sparse_attention=0.1)
    expected, _ = run(long, rows, Policy(4, 1), lossy)
    # Each home and each device with every cache; both pairings of them.
    sim, cpu = ("host", "disk") if cache in (None, "int8", "int2") else ("disk", "host")
    assert run(long, rows, Policy(2, 2, cache=HOMES[sim]), lossy)[0] == expected
    assert run(long, rows, Policy(4, 1, cache=HOMES[cpu]), lossy, "cpu")[0] == expected
    assert max(hollow) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [ReferenceKernels(), CudaKernels()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("cache", [None, "int4"])
def test_other_kernels(long: Path, cache: str | None, kernels: Kernels) -> None:
    rows, lossy = rows_of(LONG), Lossy(cache=cache, sparse_attention=0.1)
    expected, _ = run(long, rows, Policy(4, 1), lossy, new=4)
    for home in ("device", "host"):
        assert run(long, rows, Policy(4, 1, cache=HOMES[home]), lossy, kernels=kernels, new=4)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_bytes(long: Path, cache: str | None, home: str) -> None:
    """Keys, the values of the page being filled, and rows of chosen values: of every layer and decode step."""
    lossy, policy = Lossy(cache=cache, sparse_attention=0.1), Policy(4, 1, cache=HOMES[home], prefill_tokens=4096)
    with Engine(long, policy=policy, device="sim", lossy=lossy) as engine:
        found = [r.token_ids for r in engine.generate(rows_of(LONG), GREEDY)]
        bytes_, layout, model = engine.summary.bytes, engine.layout, engine.facts
    assert layout
    kv, layers, tokens = model.kv_token, len(model.layers), layout.pools[home][0].page_tokens
    count: Any = Counting(tokens)
    assert run(long, rows_of(LONG), replace(policy, cache=HOMES["device"]), lossy, kernels=count)[0] == found
    expected = layers * ahead(LONG, tokens, NEW) * kv // 2 + count.chosen * kv // 2 // model.kv_heads
    step = tokens if home == "disk" else 1  # tokens that a decode step writes: a page to disk, its own to RAM
    written = layers * sum(-(-n // tokens) * tokens + (NEW - 1) * step for n in LONG) * kv
    assert (bytes_["h2d"], bytes_["d2h"]) == (expected, written)
    assert (bytes_["disk_read"], bytes_["disk_write"]) == ((expected, written) if home == "disk" else (0, 0))
    whole = run(long, rows_of(LONG), policy, Lossy(cache=cache))[1]["h2d"]
    if cache is None and model.kv_heads == model.heads:  # pages are short
        assert bytes_["h2d"] / whole == pytest.approx((1 + 0.1) / 2, rel=0.05)


def test_exact_and_delegated_caches_move_as_ever(families: Any) -> None:
    known, policy = families("llama"), Policy(4, 2, cache=HOMES["host"])
    found, bytes_ = run(known.directory, known.rows, policy, Lossy())
    assert found == known.expected
    lossy = Lossy(sparse_attention=0.3)
    with Engine(known.directory, policy=replace(policy, delegate="host"), device="sim", lossy=lossy) as engine:
        delegated = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
        model, layers = engine.facts, len(engine.facts.layers)
        assert engine.summary.bytes["h2d"] == layers * len(known.rows) * (NEW - 1) * model.fetched
    assert run(known.directory, known.rows, policy, Lossy(sparse_attention=0.3))[0] == delegated
    pages = sum(-(-n // 16) for p in known.prompts for n in range(len(p), len(p) + NEW - 1))
    assert bytes_["h2d"] == layers * pages * 16 * model.kv_token
