"""Experts on demand: greedy tokens, and bytes of experts counted from the choices of transformers' own routers."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexengine import Engine, Policy, SamplingParams
from flexengine.lossy import Lossy
from flexengine.plan import neurons as neuron_plan
from tests.helpers.families import reference

HIDDEN, INNER, LAYERS, NEW = 64, 48, 3, 6
_COMMON = dict(
    vocab_size=601, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2, eos_token_id=2,
)  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {  # with as many experts, and active ones, as the models have
    "mixtral-8x7b": ("Mixtral", dict(intermediate_size=INNER, num_local_experts=8, num_experts_per_tok=2), 8, 2),
    "qwen3-30b-a3b": ("Qwen3Moe", dict(intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=128,
                                       num_experts_per_tok=8, head_dim=32, norm_topk_prob=True), 128, 8),
    "gpt-oss-20b": ("GptOss", dict(intermediate_size=INNER, num_local_experts=32, num_experts_per_tok=4, head_dim=32,
                                   sliding_window=9), 32, 4),
}  # fmt: skip
MATRICES = {"experts.gate_up_proj": 2 * INNER * HIDDEN, "experts.down_proj": INNER * HIDDEN}  # elements of one expert
FP32 = 4


class Mixture:
    """A checkpoint, what transformers generates with it, and which experts its routers choose meanwhile."""

    def __init__(self, name: str, directory: Path) -> None:
        kind, own, self.experts, self.active = SHAPES[name]
        config = getattr(transformers, f"{kind}Config")(**(_COMMON | own))
        torch.manual_seed(len(name))
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.directory = directory
        self.model.save_pretrained(directory)
        self.others = sum(p.numel() for n, p in self.model.named_parameters()
                          if ".layers." in n and not n.endswith(tuple(MATRICES)))  # fmt: skip

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        return reference(self.model, prompts, NEW)

    @torch.no_grad()
    def chosen(self, tokens: list[int]) -> list[list[set[int]]]:
        """Return the experts of every layer and token of one sequence: [layer][token]."""
        logits = self.model(torch.tensor([tokens]), output_router_logits=True).router_logits
        assert len(logits) == LAYERS
        return [[set(row.topk(self.active).indices.tolist()) for row in layer] for layer in logits]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Mixture] = {}

    def get(name: str) -> Mixture:
        if name not in made:
            made[name] = Mixture(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 601, (n,), generator=generator).tolist() for n in lengths]


def union(known: Mixture, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Return, by sweep of a block of all prompts, its tokens and the number of experts that they chose in each layer.
    In the last one, only tokens with logits choose: of a prompt, the last."""
    choices = [known.chosen(p + a[:-1]) for p, a in zip(prompts, answers, strict=True)]
    for n in range(NEW):
        spans = [range(len(p)) if n == 0 else range(len(p) + n - 1, len(p) + n) for p in prompts]
        layers = [len(set().union(*(c[j][t] for c, span in zip(choices, spans, strict=True)
                                    for t in (span if j < LAYERS - 1 else span[-1:]))))
                  for j in range(LAYERS)]  # fmt: skip
        yield sum(map(len, spans)), layers


def expected_bytes(known: Mixture, prompts: list[list[int]], answers: list[list[int]], most: int, ahead: int) -> int:
    """Return the bytes of experts that a job loads whose weights are all on one tier.

    most: tokens up to which a sweep loads chosen experts only; ahead: units that the sweep before loads, as its own.
    """
    total, before = 0, True
    for n, (tokens, layers) in enumerate(union(known, prompts, answers)):
        whole = tokens > most
        for j, chosen in enumerate(layers):
            loaded_whole = before if n and j < ahead else whole
            total += (known.experts if loaded_whole else chosen) * sum(MATRICES.values()) * FP32
        before = whole
    return total


@pytest.mark.parametrize(("home", "slots"), [("host", 1), ("host", 2), ("disk", 3)])
@pytest.mark.parametrize(("name", "lengths", "shape"), [
    ("mixtral-8x7b", (5, 9), (2, 1)), ("mixtral-8x7b", (5, 9), (1, 2)), ("mixtral-8x7b", (6, 3, 5), (1, 3)),
    ("qwen3-30b-a3b", (3, 2, 4), (3, 1)), ("qwen3-30b-a3b", (3, 2, 4), (1, 3)), ("qwen3-30b-a3b", (9, 17, 5), (2, 2)),
    ("gpt-oss-20b", (9, 2), (1, 2)),
])  # fmt: skip
def test_bytes_of_experts_are_those_of_the_routers_choices(
    mixtures: Any, tmp_path: Path, name: str, lengths: tuple[int, ...], shape: tuple[int, int], home: str, slots: int
) -> None:  # fmt: skip
    known, prompts = mixtures(name), prompts_of(lengths)
    answers = known.answers(prompts)
    split = {"host": (0, 1, 0), "disk": (0, 0, 1)}[home]
    policy = Policy(*shape, weights=split, schedule="zigzag", slots=slots)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=tmp_path) as engine:
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(NEW, ignore_eos=True))
        assert [r.token_ids for r in results] == answers
        moved = engine.summary.bytes
    most = {"mixtral-8x7b": 2, "qwen3-30b-a3b": 10, "gpt-oss-20b": 5}[name]  # 1 - (1 - k / E)^t <= 1 / 2
    head = 601 * HIDDEN
    assert engine.layout is not None
    rest = NEW * FP32 * (known.others + head)
    experts = moved["h2d"] - rest
    ids = [[t for p in prompts for t in p], *([a[i] for a in answers] for i in range(NEW - 1))]
    rows = 0 if home == "disk" else FP32 * HIDDEN * sum(embedded(ids, prompts, answers, policy))
    wanted = expected_bytes(known, prompts, answers, most, ahead=1)
    assert experts - rows == wanted
    every = NEW * LAYERS * known.experts * sum(MATRICES.values()) * FP32
    assert (wanted < every) == (len(prompts) <= most)


def embedded(ids: Any, prompts: list[list[int]], answers: list[list[int]], policy: Policy) -> Iterator[int]:
    """Yield the number of different ids of every gpu_batch."""
    g = policy.gpu_batch_size
    for n in range(NEW):
        for k in range(0, len(prompts), g):
            tokens = [t for p, a in zip(prompts[k : k + g], answers[k : k + g], strict=True)
                      for t in (p if n == 0 else a[n - 1 : n])]  # fmt: skip
            yield len(set(tokens))


# Every sweep loads experts by rows under these: (policy fields, device, overlap).
GRID: list[tuple[dict[str, Any], str, bool]] = [
    (dict(gpu_batch_size=8, num_gpu_batches=1, weights=(0, 0, 1)), "sim", True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0, 1, 0), slots=1), "sim", True),
    (dict(gpu_batch_size=1, num_gpu_batches=5, weights=(0, 0.5, 0.5), slots=3), "sim", True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0.4, 0.3, 0.3), cache=(0, 1, 0), activations=(0, 0, 1)),
     "sim", True),
    (dict(gpu_batch_size=2, num_gpu_batches=2, weights=(0, 0, 1), cache=(0, 0, 1), activations=(0.4, 0.3, 0.3),
          schedule="diagonal", slots=1), "sim", True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0, 1, 0), cache=(0, 1, 0), delegate="host"), "sim", True),
    (dict(gpu_batch_size=1, num_gpu_batches=5, weights=(0, 0.4, 0.6), cache=(0.5, 0.5, 0), delegate="host", slots=3),
     "sim", True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0.3, 0.3, 0.4), activations=(0, 1, 0)), "sim", False),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0, 0, 1), prefill_tokens=7), "cpu", True),
    (dict(gpu_batch_size=3, num_gpu_batches=2, weights=(0.3, 0.3, 0.4), cache=(0.5, 0, 0.5), schedule="row"),
     "cpu", True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
# Policies move rows alike whatever the number of experts: all of them with one shape, every third with each other.
@pytest.mark.parametrize(("name", "case"), [
    (name, case) for i, name in enumerate(SHAPES) for case in range(len(GRID)) if not i or case % 3 == i
])  # fmt: skip
def test_tokens_are_exact_under_every_policy(
    mixtures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: int
) -> None:  # fmt: skip
    monkeypatch.setattr(neuron_plan, "MAX_CHOSEN_SHARE", 1 - 1e-15)
    known, prompts = mixtures(name), prompts_of((5, 9, 1, 17, 8))
    fields, device, overlap = GRID[case]
    answers = known.answers(prompts)
    options = {"device": device, "overlap": overlap, "offload_dir": tmp_path}
    with Engine(known.directory, policy=Policy(**fields), **options) as engine:
        loaded = LoadedRows(engine, monkeypatch)
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(NEW, ignore_eos=True))
        assert [r.token_ids for r in results] == answers
        for tier in ("device", "host", "disk"):
            assert engine.core.machine.tier(tier).ledger.peak >= engine.core.machine.tier(tier).ledger.used
    assert loaded.experts


class LoadedRows:
    """Counts the experts that were loaded by rows, by layer."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        from flexengine.worker.weights import Weights

        self.experts: dict[int, int] = {}
        load = Weights.load_rows

        def counting(weights: Weights, unit: int, slot: int, home: str, hop: int, names: Any, rows: Any) -> None:
            self.experts[unit] = self.experts.get(unit, 0) + len(rows)
            load(weights, unit, slot, home, hop, names, rows)

        monkeypatch.setattr(Weights, "load_rows", counting)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b"])
@pytest.mark.parametrize("weights", ["int8", "int4", "int3"])
def test_encoded_experts_come_alone_too(
    mixtures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weights: str
) -> None:  # fmt: skip
    """The same tokens as with whole layers. One sequence chooses `active` experts a layer and token."""
    known, prompts = mixtures(name), prompts_of((9,))
    policy = Policy(1, 1, weights=(0, 0, 1), schedule="zigzag")
    found: list[tuple[list[list[int]], int]] = []
    counts: list[dict[int, int]] = []
    for limit in (0.0, 0.5):
        monkeypatch.setattr(neuron_plan, "MAX_CHOSEN_SHARE", limit)
        with Engine(known.directory, policy=policy, device="cpu", offload_dir=tmp_path, lossy=Lossy(weights)) as engine:
            rows = LoadedRows(engine, monkeypatch)
            results = engine.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(NEW, ignore_eos=True))
            found.append(([r.token_ids for r in results], engine.summary.bytes["disk_read"]))
            counts.append(dict(rows.experts))
            each = {j: sum(t.encoded // t.experts for t in layer if t.experts)
                    for j, layer in enumerate(engine.facts.layers)}  # fmt: skip
    assert found[0][0] == found[1][0]
    assert not counts[0]
    loaded = counts[1]
    # The first sweep computes the prompt; it loads whole layers, and the first layer of the second sweep with them.
    sweeps = {j: NEW - 1 - (j == 0) for j in range(LAYERS)}
    saved = sum((sweeps[j] * known.experts - loaded[j]) * each[j] for j in range(LAYERS))
    assert found[0][1] - found[1][1] == saved
    assert all(sweeps[j] * known.active == loaded[j] for j in range(LAYERS))


@pytest.mark.parametrize(("split", "lane"), [((0, 1, 0), "h2d"), ((0, 0, 1), "disk_read")])
def test_rows_are_traced_in_the_lane_of_their_tier(mixtures: Any, tmp_path: Path, split: Any, lane: str) -> None:
    """Of the embedding once per sweep and gpu_batch; of experts once per layer besides, but for whole layers."""
    known, prompts, trace = mixtures("mixtral-8x7b"), prompts_of((5, 9)), tmp_path / "trace.json"
    with Engine(known.directory, policy=Policy(1, 2, split, schedule="zigzag"), device="sim", trace=trace) as engine:
        engine.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(NEW, ignore_eos=True))
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [(lanes[e["tid"]], e["args"]["layer"]) for e in events if e["name"] == "load rows" and not e["args"]["hop"]]
    assert {name for name, _ in rows} == {lane}
    # The prompts' sweep loads whole layers, and the first layer of the next sweep.
    wanted = {-1: 2 * NEW, 0: 2 * (NEW - 2), 1: 2 * (NEW - 1), 2: 2 * (NEW - 1)}
    assert Counter(layer for _, layer in rows) == wanted


@pytest.mark.parametrize("split", [(0, 1, 0), (0, 0, 1)])
def test_experts_brought_at_a_pause_equal_the_checkpoints(mixtures: Any, tmp_path: Path, split: Any) -> None:
    """The way of a layer's second mixture of experts, which loads within the device's task."""
    known = mixtures("mixtral-8x7b")
    tensors = known.model.state_dict()
    engine = Engine(known.directory, policy=Policy(1, 1, split), device="sim", offload_dir=tmp_path)
    with engine, torch.no_grad():
        engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(1))
        weights, names = engine.core._weights, [f"model.layers.1.mlp.{matrix}" for matrix in MATRICES]
        assert weights is not None
        assert set(names) <= set(weights.units[1])
        for view in weights._slot_views(1, 0).values():
            view.fill_(-1.0)
        weights.bring_rows(1, 0, names, [0, 3, 4])
        for name, view in weights._slot_views(1, 0).items():
            rows = [0, 3, 4] if name in names else []
            for e in range(len(view)):
                expected = tensors[name][e] if e in rows else torch.full_like(view[e], -1.0)
                assert torch.equal(view[e], expected), (name, e)
