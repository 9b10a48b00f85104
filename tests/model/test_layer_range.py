"""Ranges of layers: what a part of a model holds, and that it computes what the same layers of the whole compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexengine import kernels
from flexengine.activity import message
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.kernels.base import AttentionOptions
from flexengine.model.build import build
from flexengine.model.forward import Attend, Forward, Head, Inputs, Layer, Logits, Pass, Rows
from flexengine.model.layer_range import use_range
from flexengine.model.skeleton import Skeleton
from flexengine.worker.open_model import open_model
from tests.helpers.listening import listening
from tests.helpers.tiny_models import tiny_config

FAMILIES = ("llama", "llama-tied", "opt", "opt-350m", "gemma2", "gemma3", "gpt2", "bloom", "mixtral", "gpt-oss")


def part(known: Any, first: int, end: int) -> Skeleton:
    """Return the skeleton of some layers with the family's weights."""
    skeleton = build(known.directory, torch.float32)
    use_range(skeleton, (first, end))
    parameters = dict(known.model.named_parameters()) | dict(known.model.named_buffers())
    for group in (*skeleton.layers, skeleton.others):
        for name, slot in group.items():
            slot.bind(torch.nn.Parameter(parameters[name].detach(), requires_grad=False))
    return skeleton


@torch.no_grad()
def computed(skeleton: Skeleton, known: Any, prompt: list[int], entering: torch.Tensor) -> tuple[list[int], Any]:
    """Run one prompt through a part. Return the numbers of its layer pauses, and what comes out."""
    ids, positions = torch.tensor([prompt]), torch.arange(len(prompt))[None]
    forward = Forward(skeleton.model, Inputs(ids, positions, positions[0]), skeleton.invariance)
    paused, answer = list[int](), None
    while not isinstance(event := forward.resume(answer), Logits):
        if isinstance(event, Rows):
            answer = known.model.get_input_embeddings().weight, event.ids
            if skeleton.enters:  # any other rows must do as well
                answer = torch.zeros(1, skeleton.embedding[1][1]), torch.zeros_like(event.ids)
        elif isinstance(event, Layer):
            paused.append(event.index)
            if event.index == len(skeleton.layers):
                forward.end()
                return paused, event.hidden
            answer = entering if event.index == 0 and skeleton.enters else event.hidden
        elif isinstance(event, Attend):
            q, k, v = (x.transpose(1, 2).contiguous() for x in (event.q, event.k, event.v))
            window, width = skeleton.windows[event.layer - skeleton.first], v.shape[-1]
            v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))  # BLOOM's q and k are wider
            out = kernels.load().attend_prompt(
                q, k, v, AttentionOptions(event.scale, window=window, softcap=event.softcap, sinks=event.sinks)
            )
            answer = out[..., :width]
        elif isinstance(event, Head):
            head = known.model.get_output_embeddings()
            answer = head.weight, head.bias, None
    return paused, event.values


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_computes_the_hidden_states_of_transformers(families: Any, family: str) -> None:
    known = families(family)
    prompt = known.prompts[1]
    with torch.no_grad():
        out = known.model(torch.tensor([prompt]), output_hidden_states=True)
    for first, end in ((0, 1), (1, 3), (2, 4), (3, 4), (0, 4)):
        paused, found = computed(part(known, first, end), known, prompt, out.hidden_states[first])
        assert paused == list(range(end - first + (end < 4)))
        expected = out.logits if end == 4 else out.hidden_states[end]
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe"])
def test_parts_want_each_layer_once(families: Any, family: str) -> None:
    known = families(family)
    names = {n: tuple(p.shape) for n, p in known.model.named_parameters()}
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in names else embedding
    for cut in (1, 2, 3):
        first, second = (part(known, *ends).wanted for ends in ((0, cut), (cut, 4)))
        assert first | second == names
        assert (embedding in first, head in first) == (True, head == embedding)
        assert (embedding in second, head in second) == (head == embedding, True)
        layers = [{n for n in wanted if ".layers." in n} for wanted in (first, second)]
        assert not layers[0] & layers[1]
        assert layers[0] == {n for n in names if ".layers." in n and int(n.split(".")[2]) < cut}
    assert part(known, 1, 3).wanted.keys() & {embedding, head} == set()


@pytest.mark.parametrize(
    "layers", [(0, 0), (2, 2), (3, 1), (-1, 2), (0, 5), (4, 5), (0, 1, 2), (0.0, 2), (False, 2), "01", 3, [0, 2]]
)
def test_bad_ranges(families: Any, layers: Any) -> None:
    with pytest.raises(InvalidInput, match=r"layers is .*it must be \(first, last \+ 1\).* 4 layers"):
        open_model(str(families("llama").directory), None, "cpu", layers=layers)


def test_layers_that_read_the_embedding_again_are_refused(tmp_path: Path) -> None:
    """Each layer of Gemma 4 gets a projection of the embedding. A range from the first layer on has it."""
    tiny_config(transformers.Gemma4TextConfig, architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    open_model(str(tmp_path), None, "cpu", weights=False, layers=(0, 2))
    with pytest.raises(UnsupportedModel, match="values of the embedding beside hidden states"):
        open_model(str(tmp_path), None, "cpu", weights=False, layers=(1, 3))


def test_reports_of_a_pass_go_to_the_listener_of_its_caller() -> None:
    """The first pass may begin to compile kernels, which it reports."""

    class Model(torch.nn.Module):
        def forward(self, **_: Any) -> Any:
            message("from the pass")
            return transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(1))

    ids = torch.tensor([[1]])
    with listening() as heard:
        assert isinstance(Forward(Model(), Inputs(ids, ids, ids[0])).resume(), Logits)
        Pass(lambda: message("from a trial of a layer")).switch()
    assert heard.messages == ["from the pass", "from a trial of a layer"]
