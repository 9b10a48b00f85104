"""Checkpoints that bring their own Python code: it is computed as it stands, like the models of `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexengine import Engine, SamplingParams
from tests.helpers.families import NEW, reference
from tests.helpers.native_layers import changed

# LLaMA's modules, by their names and classes, with an attention of its own. FORWARD changes what projections return.
CODE = """
from transformers.models.llama import modeling_llama as llama

class OwnConfig(llama.LlamaConfig):
    model_type = "own"

class OwnAttention(llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        changed = lambda x: FORWARD
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projected = (changed(f(hidden_states)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.view(shape).transpose(1, 2) for x in projected)
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = past_key_values if past_key_values is not None else kwargs.pop("cache", None)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = llama.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, llama.eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

class OwnForCausalLM(llama.LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, number)
        self.post_init()
"""


@pytest.mark.parametrize("forward", ["x.clamp(-2, 2)", "x * (1 + 0.3 * self.layer_idx)"])
def test_tokens_are_those_of_transformers(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: str
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    # transformers registers the class for the whole process; other tests list what is registered.
    monkeypatch.setattr(transformers.MODEL_FOR_CAUSAL_LM_MAPPING, "_extra_content", {})
    known = families("llama")
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    model = changed(known.directory, tmp_path / f"own{len(forward)}", "Own", auto_map=code)
    (model / "modeling_own.py").write_text(CODE.replace("FORWARD", forward))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, dtype=torch.float32)
    expected = reference(theirs.eval(), known.prompts)
    assert expected != known.expected  # the change matters
    with Engine(model, device="cpu", trust_remote_code=True) as engine:
        found = engine.generate(known.rows, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [result.token_ids for result in found] == expected
