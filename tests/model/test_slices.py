"""Slices between attentions: bytes by the paper's formulas, and kept tensors by destroying each live one in turn."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexengine import kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.model.build import build
from flexengine.model.forward import Attend, Forward, Head, Inputs, Layer, Logits, Rows, pausing_layers
from flexengine.model.skeleton import Skeleton
from flexengine.model.slices import Slices, slices_of
from tests.helpers.families import FAMILIES
from tests.helpers.tiny_models import HEAD_DIM, HEADS, HIDDEN, LAYERS, tiny_config

GROUPED = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "gpt-oss")
UNGROUPED = ("opt", "opt-350m", "gpt2", "gpt-neox")


def config_of(family: str) -> Any:
    """Return the tiny config of a family of tests.helpers.families, or of a model type."""
    if family in FAMILIES:
        kind, values = FAMILIES[family]
        return getattr(transformers, f"{kind}Config")(**values)
    return tiny_config(type(transformers.AutoConfig.for_model(family)))


@torch.no_grad()
def skeleton_of(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Skeleton:
    config.save_pretrained(folder)
    return build(folder, dtype)


def totals(slices: Slices) -> tuple[int, int]:
    """Return the bytes of a token that all layers move, and the most that one layer keeps."""
    return (sum(part.nbytes for cut in slices.cuts for part in (*cut.sent, cut.fetched)),
            max(sum(part.nbytes for part in cut.kept) for cut in slices.cuts))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*GROUPED, *UNGROUPED])
def test_bytes_are_those_of_the_paper(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """4 e d L, or (2 + 2/G) e d L, cross the link, and one residual tensor of e h bytes is kept."""
    config = config_of(family)
    d = HEADS * (getattr(config, "head_dim", None) or HIDDEN // HEADS)
    group = 2 if family in GROUPED else 1
    slices = slices_of(skeleton_of(config, tmp_path, dtype))
    assert totals(slices) == ((2 + 2 / group) * dtype.itemsize * d * LAYERS, dtype.itemsize * HIDDEN)
    assert {tuple(part.name for part in cut.kept) for cut in slices.cuts} == {("hidden states",)}
    assert len(slices.cuts) == LAYERS


def test_heads_of_one_kv_head(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=8,
                                      num_key_value_heads=1, intermediate_size=96, vocab_size=99)  # fmt: skip
    assert totals(slices_of(skeleton_of(config, tmp_path))) == ((2 + 2 / 8) * 4 * 64 * 3, 4 * 64)


@pytest.mark.parametrize(("family", "other"), [("gptj", "ln_1"), ("cohere", "input_layernorm"),
                                               ("phi", "input_layernorm")])  # fmt: skip
def test_parallel_blocks_keep_their_normalized_input(family: str, other: str, tmp_path: Path) -> None:
    """Their MLP, which runs after attention, reads what q, k and v were made from."""
    slices = slices_of(skeleton_of(config_of(family), tmp_path))
    assert {tuple(part.name for part in cut.kept) for cut in slices.cuts} == {("hidden states", other)}
    assert totals(slices)[1] == 2 * 4 * HIDDEN


def test_layers_of_several_shapes(tmp_path: Path) -> None:
    """Gemma 4: layers with full attention have wider heads, of 512; inputs of all later layers are kept."""
    config = config_of("gemma4_text")
    slices = slices_of(skeleton_of(config, tmp_path))
    dims = [HEAD_DIM if kind == "sliding_attention" else 512 for kind in config.layer_types]
    assert [cut.sent[0].shape for cut in slices.cuts] == [(HEADS, dim) for dim in dims]
    width = config.hidden_size_per_layer_input
    assert [sum(part.nbytes for part in cut.kept) for cut in slices.cuts] == [
        4 * (HIDDEN + n * width) for n in range(LAYERS, 0, -1)
    ]


def test_windows_and_tables(tmp_path: Path) -> None:
    slices = slices_of(skeleton_of(config_of("gemma2"), tmp_path))
    assert [cut.window for cut in slices.cuts] == [9, None, 9, None]
    assert [part.nbytes for part in slices.tables] == [4 * HEAD_DIM] * 2  # cos and sin
    assert slices_of(skeleton_of(config_of("opt"), tmp_path)).tables == ()


def test_the_model_is_as_before(tmp_path: Path) -> None:
    skeleton = skeleton_of(config_of("llama"), tmp_path)
    before = {name: buffer.clone() for name, buffer in skeleton.model.named_buffers() if not buffer.is_meta}
    assert slices_of(skeleton) == slices_of(skeleton)
    after = dict(skeleton.model.named_buffers())
    assert before
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


# Every live tensor destroyed in turn.


class Real:
    """A tiny model with weights, whose pass overwrites one live tensor at the attention of layer 1."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(3)
        config = config_of(family)
        self.skeleton = skeleton_of(config, folder)
        self.slices = slices_of(self.skeleton)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        weights = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for group in (*self.skeleton.layers, self.skeleton.others):
            for name, slot in group.items():
                slot.bind(torch.nn.Parameter(weights[name].detach(), requires_grad=False))
        for layer in pausing_layers(self.skeleton.model):
            layer.native = None  # slices are those of modules; native layers keep copies of GPT-J's cosines and sines
        self.prompt = torch.randint(3, 600, (1, 5))

    @torch.no_grad()
    def logits(self, destroyed: int | None) -> tuple[torch.Tensor, list[int]]:
        """Return the logits, and the bytes of a token of each live memory. destroyed: number of the one to lose."""
        skeleton, count = self.skeleton, self.prompt.shape[1]
        before = {id(x): x for x in gc.get_objects() if isinstance(x, torch.Tensor)}
        inputs = Inputs(self.prompt, torch.arange(count)[None], torch.arange(count))
        forward, answer, sizes = Forward(skeleton.model, inputs, skeleton.invariance), None, list[int]()
        while not isinstance(event := forward.resume(answer), Logits):
            if isinstance(event, Rows):
                answer = self.model.get_input_embeddings().weight, event.ids
            elif isinstance(event, Layer):
                answer = event.hidden
            elif isinstance(event, Attend):
                q, k, v = (x.transpose(1, 2).contiguous() for x in (event.q, event.k, event.v))
                answer = kernels.load().attend_prompt(
                    q, k, v, AttentionOptions(event.scale, softcap=event.softcap, sinks=event.sinks)
                )
                if event.layer == 1:
                    sizes = overwrite([answer, q, k, v, *vars(inputs).values(), *before.values()], destroyed, count)
            elif isinstance(event, Head):
                head = self.model.get_output_embeddings()
                answer = head.weight, head.bias, None
        return event.values, sizes


def overwrite(spared: list[Any], destroyed: int | None, count: int) -> list[int]:
    """Overwrite one live memory. Return the bytes of a token of all of them, in the order of their tensors."""
    gc.collect()
    known = {x.untyped_storage()._cdata for x in spared if isinstance(x, torch.Tensor)}
    live = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_meta:
            live.setdefault(x.untyped_storage()._cdata, x)
    memories = [x for key, x in live.items() if key not in known and x.numel()]
    if destroyed is not None:
        memory = memories[destroyed]
        flat = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage())  # type: ignore[call-overload]
        flat.fill_(torch.nan)
    return [x.untyped_storage().nbytes() // count for x in memories]


@pytest.mark.parametrize("family", ["llama", "opt", "gptj", "cohere"])
def test_only_kept_tensors_and_tables_are_read_again(family: str, tmp_path: Path) -> None:
    real = Real(family, tmp_path)
    gc.disable()
    try:
        expected, sizes = real.logits(None)
        matter = [n for i, n in enumerate(sizes) if not torch.equal(real.logits(i)[0], expected)]
    finally:
        gc.enable()
    parts = (*real.slices.cuts[1].kept, *real.slices.tables)
    assert sorted(matter) == sorted(part.nbytes for part in parts)
