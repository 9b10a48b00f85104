"""Tiny random checkpoints of every family, and what `transformers` generates with them."""

import gc
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Torch reads both when it is imported, and so does every process that a test starts. Workers share the processor: each
# takes its share of the cores, and none spins while another could compute (two threads each on two cores, spinning,
# take five times as long). Tests of what threads do set their number, as two_threads does.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

import torch

_COMMON = dict(vocab_size=601, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=256)
_GATED = dict(_COMMON, intermediate_size=112, num_key_value_heads=2, tie_word_embeddings=False)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", dict(_COMMON, ffn_dim=112, word_embed_proj_dim=64)),
    "opt-350m": ("OPT", dict(_COMMON, ffn_dim=112, word_embed_proj_dim=32, do_layer_norm_before=False)),
    "llama": ("Llama", _GATED),
    "llama-tied": ("Llama", dict(_GATED, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(_GATED, sliding_window=9)),
    "qwen2": ("Qwen2", _GATED),
    "qwen3": ("Qwen3", dict(_GATED, head_dim=32)),
    "gemma2": ("Gemma2", dict(_GATED, head_dim=32, sliding_window=9, query_pre_attn_scalar=24,
                              tie_word_embeddings=True)),
    "gemma3": ("Gemma3Text", dict(_GATED, head_dim=32, sliding_window=9, tie_word_embeddings=True,
                                  layer_types=["sliding_attention", "full_attention"] * 2)),
    "phi3": ("Phi3", dict(_GATED, partial_rotary_factor=0.5, pad_token_id=0, sliding_window=None)),
    "gpt2": ("GPT2", dict(vocab_size=601, n_embd=64, n_layer=4, n_head=4, n_positions=256)),
    "gpt-neox": ("GPTNeoX", dict(_COMMON, intermediate_size=112, rotary_pct=0.5)),
    "olmo2": ("Olmo2", _GATED),
    "mixtral": ("Mixtral", dict(_GATED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": ("Qwen3Moe", dict(_GATED, head_dim=32, num_experts=6, num_experts_per_tok=2,
                                   moe_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=True)),
    "gpt-oss": ("GptOss", dict(_GATED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                               layer_types=["sliding_attention", "full_attention"] * 2)),
    "bloom": ("Bloom", dict(vocab_size=601, hidden_size=64, n_layer=4, n_head=4)),
}  # fmt: skip
LENGTHS = (5, 17, 1, 40, 29, 8, 33, 17)  # ragged prompts
NEW = 6  # tokens generated: caches grow past a page (29), and prompts past the sliding window (5)


def make_checkpoint(family: str, directory: Path, **save: Any) -> Any:
    """A random model of the family, saved; wide enough weights that the greedy tokens vary."""
    import transformers

    kind, values = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**values, init_std=0.2, initializer_range=0.2, eos_token_id=2)
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases that are all ones and zeros would hide that they were dropped
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, **save)
    return model


def prompts_of(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def reference(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy continuations by transformers.generate, one prompt at a time, end-of-sequence ignored."""
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


class Family:
    """One tiny checkpoint with prompts and the reference's answers."""

    def __init__(self, name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.directory = name, directory
        self.model = make_checkpoint(name, directory)
        if dtype != torch.float32:  # stored in 16 bits, computed in fp32
            self.model.to(dtype).save_pretrained(directory)
            self.model = type(self.model).from_pretrained(directory, dtype=torch.float32)
        self.prompts = prompts_of(601)
        self.expected = reference(self.model, self.prompts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": p} for p in self.prompts]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a family when first asked for it: families("llama"), or families("llama", torch.float16) as stored."""
    made: dict[tuple[str, torch.dtype], Family] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Family:
        if (name, dtype) not in made:
            made[name, dtype] = Family(name, tmp_path_factory.mktemp(name), dtype)
        return made[name, dtype]

    return get


# Files whose tests take minutes together, the longest first: a worker that has one of them last ends alone.
LONGEST = ("test_exactness", "test_architectures", "test_demo", "test_cache_kernels", "test_campaign", "test_fused",
           "test_lossy", "test_explain", "test_planning", "test_delegation", "test_invariance", "test_search",
           "test_profile", "test_resume", "test_accounting", "test_topk", "test_bench", "test_recovery")  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --shuffle SEED, which shows whether a file depends on those that ran before it."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files in an order drawn with this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, then those with the most tests; setup.cfg tells xdist to keep to that."""
    tests = Counter(item.path for item in items)
    if (seed := config.getoption("shuffle")) is not None:
        paths = sorted(tests)
        random.Random(seed).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
        return
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(item.path.stem, len(order)), -tests[item.path]))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage need not go through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread. A tiny model gains nothing from more; a busy machine loses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def run_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels and prepared weights of a test run go to a directory of its own. All workers share it, and
    fixtures of any scope: compiling takes half a minute each time."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = tmp_path_factory.getbasetemp().parent / "cache"
        shared.mkdir(exist_ok=True)
    else:
        shared = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(shared))
        yield shared


@pytest.fixture
def sigint() -> Iterator[None]:
    """SIGINT interrupts, as in a terminal, in this process and in those that the test starts.

    A test run in the background of a script starts with SIGINT ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch and the kernels compute in two threads, however many a worker has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are prepared, in a cache of the test's own."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a prepared directory, by its index."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, place in weight_map.items() if place == file}
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors
