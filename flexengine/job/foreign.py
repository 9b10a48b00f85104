"""Sampling fields of a row, and request fields of vLLM, OpenAI, transformers, llama.cpp and SGLang that are not read.
The latter would change the prompt or the sampling, so a row with one is looked at by `job.foreign_values`."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
from flexengine.records import DEPTH, as_whole, unwrapped

OVERRIDES = tuple(f.name for f in fields(SamplingParams))
VARIABLES, TOOLS = "chat_template_kwargs", "tools"
CHAT_ONLY = {VARIABLES: None, "add_generation_prompt": True, "continue_final_message": False}  # by their defaults
# Names of other programs by the name here. Without the field of this name they are refused; beside it they are data.
_RENAMED = {
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_length max_gen_toks max_tokens_to_sample"
    " n_predict num_predict max_tokens_to_generate max_decode_steps",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repeat_penalty rep_pen",
    "stop": "stop_sequences stop_sequence stop_strings stop_words stop_words_list end_sequences until",
    "stop_token_ids": "eos_token_id",
    "bad_words": "bad_words_ids",
    "logit_bias": "sequence_bias",
    "logprobs": "top_logprobs top_logprobs_num n_probs",
    "n": "num_return_sequences num_completions",
    "seed": "sampling_seed random_seed sampler_seed",
}
# Fields by the value, as JSON, that asks for nothing. Null, "", [] and {} ask for nothing, too.
_NEUTRAL = {
    "false": "echo stream use_beam_search early_stopping include_stop_str_in_output no_stop_trim renormalize_logits"
    " penalize_nl return_logprob return_full_text echo_prompt watermark safe_prompt ban_eos_token token_healing",
    "true": "skip_special_tokens spaces_between_special_tokens add_special_tokens add_bos_token detokenize"
    " include_reasoning separate_reasoning",
    "0": "no_repeat_ngram_size encoder_no_repeat_ngram_size min_length mirostat dynatemp_range xtc_probability top_a"
    " dry_multiplier epsilon_cutoff eta_cutoff diversity_penalty penalty_alpha smoothing_factor n_keep num_keep"
    " prompt_logprobs beam_search_diversity_rate",
    "1": "num_beams beam_width num_beam_groups length_penalty typical_p tfs_z guidance_scale"
    " encoder_repetition_penalty",
    "-1": "repeat_last_n reasoning_budget truncate_prompt_tokens top_n_sigma",
    "null": "allowed_token_ids guided_json guided_regex guided_choice guided_grammar guided_decoding structural_tag"
    " structured_outputs json_schema ebnf grammar regex stop_regex logits_processors custom_logit_processor samplers"
    " suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id forced_decoder_ids sampler_order"
    " exponential_decay_length_penalty watermarking_config negative_prompt_ids suffix functions multi_modal_data"
    " image_data images videos mm_processor_kwargs lora_path lora_request prompt_embeds sampling_params prompt_mode"
    " generation_config extra_body extra_args vllm_xargs truncate thinking_token_budget repetition_detection top_h"
    " top_p_min top_p_decay embedding_bias custom_token_bans banned_tokens force_words_ids sampler_priority",
}
NEUTRALS = {name: json.loads(value) for value, names in _NEUTRAL.items() for name in names.split()}
OF_SYSTEM = ("system", "system_prompt", "system_instruction", "systemInstruction", "instructions")  # see _has_system
OF_CHATS = ("documents", "functions", "images", "reasoning", "think", "thinking", "verbosity", "videos", *OF_SYSTEM)
OF_TEMPLATES = {"enable_thinking", "reasoning_effort", "thinking_budget", "chat_template", *OF_CHATS} - NEUTRALS.keys()
NAMES_HERE = {name: ours for ours, names in _RENAMED.items() for name in names.split()}
# Objects of options, in which Ollama, Gemini, lm-evaluation-harness and inference servers of Hugging Face read them.
OF_OPTIONS = ("options", "parameters", "generationConfig", "gen_kwargs", "generation_kwargs")
FOREIGN = frozenset({"do_sample", "best_of", *NAMES_HERE, *NEUTRALS, *OF_TEMPLATES, *OF_OPTIONS})  # all of these fields


def own_sampling(request: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a row: `defaults`, and its own fields. In all formats 8.0 is the whole number
    8, and top_k -1 is 0, all tokens, as in vLLM."""
    own = {name: whole(request[name]) for name in OVERRIDES if request.get(name) is not None}
    if own.get("logprobs") is False:  # as chats of OpenAI have it
        del own["logprobs"]
    if own.get("top_k") == -1:
        own["top_k"] = 0
    if defaults.chat_template_kwargs and isinstance(variables := own.get(VARIABLES), Mapping):
        own[VARIABLES] = {**defaults.chat_template_kwargs, **variables}
    if own.get("add_generation_prompt") is True and own.get("continue_final_message") is True:
        raise InvalidInput("add_generation_prompt and continue_final_message are both true; leave one out")
    return replace(defaults, **own) if own else defaults


def whole(value: Any, depth: int = DEPTH) -> Any:
    """Return the value with floats that are whole numbers as int, also those in a list: pandas writes 8 as 8.0. Numbers
    and arrays of numpy or torch become Python's. Lists in lists are taken as they are from a depth on."""
    value = unwrapped(value)
    if isinstance(value, list | tuple) and depth:
        return [whole(each, depth - 1) for each in value]
    return as_whole(value)


def check_format(request: Mapping[str, Any]) -> None:
    """Raise InvalidInput if `response_format` asks for another format than text."""
    wanted = request.get("response_format")
    named = wanted.get("type") if isinstance(wanted, Mapping) else wanted  # other texts and kinds are data
    if (isinstance(wanted, Mapping) and named != "text") or str(named).startswith("json"):
        raise InvalidInput(f'response_format is {shown(wanted)}; only {{"type": "text"}} is supported: remove it')
