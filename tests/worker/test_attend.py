"""All attenders against a dense softmax in float64; and a job that uses another attender than the host's."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import OutOfMemory
from flexengine.kernels import load
from flexengine.model.forward import Attend, Query
from flexengine.places import STAGED
from flexengine.plan import sizes
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.layout import lay_out
from flexengine.plan.workload import Workload
from flexengine.schedule.batches import Batch
from flexengine.schedule.prefixes import Stem
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.tier.machine import make_machine
from flexengine.worker import attend
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View, packed
from tests.helpers.attenders import PlainAttender
from tests.helpers.attention_workers import thread_workers
from tests.helpers.families import LENGTHS, NEW
from tests.helpers.softmax import dense

ON_HOST: dict[str, Any] = dict(cache=(0, 1, 0), delegate="host")
TENSOR = TensorFact("w", 64, 4, 4)
# Two query heads for each KV head; layers of one head width and of less.
MODEL = ModelFacts(((TENSOR,),) * 3, (), TENSOR, None, 601, 64, 128, 4, 2, 16, 4)
PROMPTS, OUTPUTS = (21, 1, 40, 9, 33), 6  # tokens; five sequences are three gpu_batches


class Case(NamedTuple):
    """Options of attention.

    Attributes:
        windows: by layer; () if all layers see all tokens.
        softcap: None for none.
        sinks: whether scores have sinks.
        narrow: whether layers have one KV head, and heads of 12 elements whose values have 8.
        shared: whether the first two sequences share all tokens of their prompts but the last.
    """

    windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    sinks: bool = False
    narrow: bool = False
    shared: bool = False


CASES = {
    "plain": Case(), "windows": Case((7, None, 19)), "soft cap": Case(softcap=0.5), "sinks": Case(sinks=True),
    "narrow heads": Case(narrow=True), "shared pages": Case(shared=True),
    "short windows": Case((1, 2, None), 0.5, True),
    "all": Case((None, 7, 7), 0.5, True, True, True),
}  # fmt: skip


class Job:
    """A job of random queries, keys and values: prompts are attended on the device, the rest by an attender.

    Args:
        attender: makes the attender.
        fields: of the policy.
        workers: number of attention workers.

    Attributes:
        home: place of the KV cache.
        past: by layer and sequence, K and V of all tokens so far, [tokens, kv_heads, width].
        compared: gpu_batches and layers whose attention was compared.
    """

    def __init__(
        self, case: Case, attender: Callable[..., Attender], directory: Path, fields: dict[str, Any] = ON_HOST,
        workers: int = 0,
    ) -> None:  # fmt: skip
        self.case, self.rng = case, torch.Generator().manual_seed(3)
        model = replace(MODEL, windows=case.windows, softcap=case.softcap)
        self.model, policy = model, Policy(2, 3, schedule="zigzag", **fields)
        workload = Workload.of((n, OUTPUTS) for n in PROMPTS)
        self.machine = make_machine("sim", 1 << 30, 1 << 30, [directory], workers=thread_workers(workers))
        layout = lay_out(model, policy, workload, self.machine.capacity)
        self.cache = Cache(model, layout, self.machine, load(), torch.float32)
        self.before = self.entries()
        self.attender = attender(self.cache, torch.float32)
        self.sweeps, (self.home,) = Sweeps(policy, layout.pools), layout.pools
        self.place = policy.attends(self.home)
        stem = Stem((0,) * (PROMPTS[0] - 1), PROMPTS[0] - 1, None, 2)
        for i, n in enumerate(PROMPTS):
            shared = case.shared and i < 2
            self.sweeps.add(Sequence(i, PROMPTS[0] if shared else n, OUTPUTS, stem if shared else None))
        self.past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.sinks = torch.randn(3, 4, generator=self.rng)
        self.compared = 0

    def entries(self) -> list[dict[str, int]]:
        return [dict(tier.ledger.entries) for tier in (self.machine.device, self.machine.host, *self.machine.workers)]

    def run(self, order: random.Random) -> None:
        """Compute all sweeps. order: of the calls for different gpu_batches."""
        while not self.sweeps.idle:
            batches = self.sweeps.begin(self.cache.claim, self.cache.release)
            self.attender.begin({k: b for k, b in enumerate(batches) if b.attention == self.place})
            views = [self.cache.view(batch) for batch in batches]
            steps = [self._steps(k, *both, order) for k, both in enumerate(zip(batches, views, strict=True))]
            while steps:
                step = steps[0] if self.sweeps.stems else order.choice(steps)  # a stem is computed before its sequences
                if next(step, None) is None:
                    steps.remove(step)
            self.sweeps.advance(batches, set(), self.cache.release)

    def _steps(self, k: int, batch: Batch, view: View, order: random.Random) -> Iterator[int]:
        """Call what computes each layer's attention of a gpu_batch. Yield after each call."""
        for layer in range(len(self.model.layers)):
            event = self._event(layer, batch)
            expected = self._expected(event, batch)
            if batch.attention == "device":
                hops = len(self.machine.routes.load[self.home])
                for hop in range(hops):
                    self.cache.pools.load(layer, self.home, self.cache.tables(view, layer), 0, hop)
                found = self.cache.attend(event, view, self.home, 0)
                for hop in range(hops):
                    self.cache.pools.store(layer, self.home, self.cache.tables(view, layer), 0, hop)
            else:
                yield from self._ask(k, event, batch, view, order)
                self.attender.attend(k, view)
                yield k
                self.attender.fetch(k)
                yield k
                found = self.attender.answer(k)
                self.compared += 1
            assert found.shape == expected.shape
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
            yield k

    def _ask(self, k: int, event: Attend, batch: Batch, view: View, order: random.Random) -> Iterator[int]:
        """Call what sends a question. Yield after each call. The model's tensors may be overwritten after a call that
        copies them."""
        first, nan = batch.queries_first, event._replace(k=event.k * torch.nan, v=event.v * torch.nan)
        self.attender.ask(k, Query(nan) if first else event, view)
        overwrite(event.q, event.sinks, *(() if first else (event.k, event.v)))
        yield k
        self.attender.send(k)
        yield k
        if not first:
            return
        calls = [partial(self._add, k, event, view), partial(self.attender.send, k, added=True)]
        calls.insert(order.randrange(3), partial(self.attender.attend_cached, k))
        for call in calls:
            call()
            yield k

    def _add(self, k: int, event: Attend, view: View) -> None:
        self.attender.add(k, event, view)
        overwrite(event.k, event.v)

    def _event(self, layer: int, batch: Batch) -> Attend:
        heads, width, values = (1, 12, 8) if self.case.narrow else (2, 16, 16)
        q, k, v = (torch.randn(1, n, batch.tokens, w, generator=self.rng)
                   for n, w in ((4, width), (heads, width), (heads, values)))  # fmt: skip
        window = self.case.windows[layer] if self.case.windows else None
        sinks = self.sinks[layer].clone() if self.case.sinks else None
        return Attend(layer, q, k, v, 0.3, window, self.case.softcap, sinks)

    def _expected(self, event: Attend, batch: Batch) -> Tensor:
        """Append K and V to `past`. Return attention [1, tokens, heads, width of values]."""
        q, k, v = (x[0].transpose(0, 1) for x in (event.q, event.k, event.v))
        out, at, options = [], 0, (event.scale, event.window, event.softcap, event.sinks)
        for piece in packed(batch):
            new, key = slice(at, at + piece.count), (event.layer, piece.sequence)
            source = self.sweeps.live[piece.sequence].source if piece.sequence >= 0 else None
            begun = (k[:0], v[:0]) if source is None else self.past[event.layer, source.id]
            old = self.past.get(key, begun)
            self.past[key] = keys, values = torch.cat([old[0], k[new]]), torch.cat([old[1], v[new]])
            assert len(keys) == piece.start + piece.count
            widened = torch.nn.functional.pad(values, (0, q.shape[-1] - values.shape[-1]))
            out.append(dense(q[new], keys, widened, *options)[..., : values.shape[-1]])
            at += piece.count
        return torch.cat(out)[None]


def overwrite(*tensors: Tensor | None) -> None:
    for x in tensors:
        if x is not None:
            x.fill_(torch.nan)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pages of 16 tokens, so that sequences have several."""
    monkeypatch.setattr(sizes, "EXTENT", 4096)


class Conformance:
    """Tests that every attender must pass. A subclass sets `attender`."""

    attender: Callable[..., Attender]
    fields: ClassVar[dict[str, Any]] = ON_HOST
    workers = 0

    def job(self, case: str, directory: Path) -> Job:
        return Job(CASES[case], type(self).attender, directory, self.fields, self.workers)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_attention_is_a_softmax_over_all_tokens_seen(self, case: str, seed: int, tmp_path: Path) -> None:
        """Calls for different gpu_batches overlap in any order, and questions are copies."""
        job = self.job(case, tmp_path)
        job.run(random.Random(seed))
        assert job.compared >= 3 * 3 * (OUTPUTS - 1)  # layers, gpu_batches, decode steps
        job.attender.close()
        assert job.entries() == job.before
        job.cache.close()
        job.machine.close()
        assert all(not tier.ledger.used for tier in job.machine.tiers.values())

    def test_close_frees_all_memory_before_the_first_sweep_too(self, tmp_path: Path) -> None:
        job = self.job("plain", tmp_path)
        job.attender.close()
        assert job.entries() == job.before
        job.machine.close()


class TestHost(Conformance):
    attender = staticmethod(attend.attender_of("host"))

    def test_memory_is_what_the_layout_books_or_none(self, tmp_path: Path) -> None:
        job = Job(CASES["plain"], self.attender, tmp_path)
        booked = job.cache.layout.account
        added = [{what: n for what, n in after.items() if what not in before}
                 for before, after in zip(job.before, job.entries(), strict=True)]  # fmt: skip
        assert added == [{what: n for what, n in booked[tier].items() if what.startswith("delegation")}
                         for tier in ("device", "host")]  # fmt: skip
        job.attender.close()
        job.machine.host.ledger.capacity = job.machine.host.ledger.used + 1
        with pytest.raises(OutOfMemory):
            self.attender(job.cache, torch.float32)
        assert job.entries() == job.before


class TestPlain(Conformance):
    attender = PlainAttender


class TestWorker(Conformance):
    attender = staticmethod(attend.attender_of("worker1"))
    fields: ClassVar[dict[str, Any]] = dict(cache={"workers": 1})
    workers = 1


class TestWorkersByHeads(TestWorker):
    fields: ClassVar[dict[str, Any]] = dict(cache={"workers": 1}, partition="heads")
    workers = 2


class TestWorkersByTokens(TestWorker):
    fields: ClassVar[dict[str, Any]] = dict(cache={"workers": 1}, partition="tokens")
    workers = 3


class TestQueriesFirst(TestWorker):
    fields: ClassVar[dict[str, Any]] = dict(TestWorker.fields, queries_first=True)


class TestQueriesFirstByHeads(TestWorkersByHeads):
    fields: ClassVar[dict[str, Any]] = dict(TestWorkersByHeads.fields, queries_first=True)


class TestQueriesFirstByTokens(TestWorkersByTokens):
    fields: ClassVar[dict[str, Any]] = dict(TestWorkersByTokens.fields, queries_first=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_job_runs_with_an_attender_at_another_place(
    families: Any, monkeypatch: pytest.MonkeyPatch, family: str, overlap: bool
) -> None:
    """The place is an entry of ATTENDERS, its lanes are in the routes, and a policy names it. No other code does."""
    made = list[PlainAttender]()

    def make(place: str, *args: Any) -> PlainAttender:
        made.append(PlainAttender(*args))
        return made[-1]

    def attends(policy: Policy, cache_home: str) -> str:
        return "beside" if policy.delegates and cache_home == "host" else "device"

    monkeypatch.setitem(attend.ATTENDERS, "beside", make)
    monkeypatch.setitem(STAGED.attend, "beside", ("out", "cpu beside", "back"))
    monkeypatch.setattr(Policy, "attends", attends)
    known = families(family)
    policy = Policy(2, 4, cache=(0, 0.7, 0.3), weights=(0.4, 0.3, 0.3), delegate="host")
    with Engine(known.directory, policy=policy, device="sim", overlap=overlap) as engine:
        results = engine.generate(known.rows, SamplingParams(max_tokens=NEW, ignore_eos=True))
        assert [r.error for r in results] == [None] * len(LENGTHS)
        assert [r.token_ids for r in results] == known.expected
        busy = engine.summary.busy
    assert min(busy[lane] for lane in ("out", "cpu beside", "back")) > 0
    assert "cpu" not in busy
    (attender,) = made
    assert attender.answered >= 4 * (NEW - 1)  # layers, sweeps
