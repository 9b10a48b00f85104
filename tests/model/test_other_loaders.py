"""Bugs that other loaders of quantised files had, each with the tests that would find it here."""

import numpy as np
import pytest

from flexengine.model.gguf_header import GgufTensor
from flexengine.model.gguf_names import undone
from tests.helpers.named_tests import check_tests
from tests.helpers.tiny_gguf import Q

PLACES, GGUF, SCHEMES = "tests/model/test_gguf_places.py", "tests/model/test_gguf.py", "tests/model/quantised"
# By issue or pull request: the tests. Paths are followed by names of functions, and these by a case of theirs.
BUGS: dict[str, tuple[str, ...]] = {
    "rows of q and k stay permuted (transformers #31766)": (
        f"{GGUF}::test_gguf_gives_back_the_model_it_was_made_from[llama]",
        f"{PLACES}::test_tokens_are_those_of_transformers_wherever_weights_lie[llama]",
    ),
    "zero points of GPTQ v1 and v2 (vllm #26343, #26092, #38966)": (
        f"{SCHEMES}/test_schemes.py::test_the_version_of_gptq_s_zero_points_is_read_from_symmetric_files",
    ),
    "1 is added to norms twice or never (vllm #31464, #26189, #14753, #15480, mold #1078)": (
        "tests/model/test_other_loaders.py::test_norms_are_stored_plus_1_by_some_converters",
        f"{PLACES}::test_families_that_transformers_does_not_read[gemma]",
    ),
    "a quantised embedding is read as floats (vllm #30424, #12836)": (
        f"{SCHEMES}/test_schemes.py::test_damaged_and_ambiguous_checkpoints_are_refused",
        f"{PLACES}::test_tokens_are_those_of_transformers_wherever_weights_lie[llama]",
        f"{PLACES}::test_tokens_are_those_of_transformers_wherever_weights_lie[llama-untied]",
    ),
    "the scale of a matrix in NVFP4 divides or multiplies (modular #6600)": (
        f"{SCHEMES}/test_schemes.py::test_a_scale_of_a_matrix_divides_or_multiplies_by_its_name",
    ),
    "ragged blocks of FP8 (llm-compressor #1817, compressed-tensors #547, transformers #36026)": (
        "tests/codec/test_scaled.py::test_decodes_as_the_format_is_defined[fp8-24x40]",
        f"{SCHEMES}/test_tokens.py::test_tokens_are_those_of_transformers_wherever_weights_lie[fp8 blocks]",
    ),
    "several types in a fused matrix (vllm-gguf-plugin #107, vllm #5191, #35019)": (
        f"{PLACES}::test_experts_whose_halves_have_two_formats",
    ),
    "lists of modules are compared by parts of names (vllm #9887, #9894)": (
        f"{SCHEMES}/test_schemes.py::test_lists_of_modules_name_them_whole",
    ),
    "the first group of a config is taken for all modules (ROCmFPX #79)": (
        f"{SCHEMES}/test_schemes.py::test_groups_of_other_classes_and_of_activations_are_not_taken_for_those_of_matrices",
        f"{SCHEMES}/test_tokens.py::test_tokens_are_those_of_transformers_wherever_weights_lie[compressed groups]",
    ),
    "blocks with NaN scales (llama.cpp #8661, #11764, #12439, #20460)": (
        f"{PLACES}::test_numbers_that_are_not_finite_are_refused_with_their_place[Q4_1]",
        f"{PLACES}::test_blocks_that_are_not_finite_are_found[q4_k]",
    ),
    "type 39, MXFP4, is unknown (hermes-agent #116681)": (
        f"{PLACES}::test_tokens_with_every_type[mxfp4]",
        f"{GGUF}::test_what_the_package_cannot_decode_is_refused",
    ),
    "RoPE: a default base, scaling that is dropped (aprender #2148, mobius #458)": (
        "tests/model/test_gguf_config.py::test_a_file_without_a_base_of_rope_has_that_of_llama_cpp",
        f"{GGUF}::test_llama3_rope_is_carried_over",
        f"{GGUF}::test_what_transformers_would_drop_or_invent_is_refused",
    ),
    "columns that are no whole blocks of 64 (bitsandbytes #1884, #565, #1828)": (
        "tests/codec/test_flat_blocks.py::test_decodes_as_bitsandbytes_defines[2100]",
        f"{SCHEMES}/test_tokens.py::test_tokens_are_those_of_transformers_wherever_weights_lie[nf4]",
        f"{SCHEMES}/test_tokens.py::test_tokens_are_those_of_transformers_wherever_weights_lie[fp4 nested]",
    ),
    "gpt-oss as GGUF: alternating gates, names of experts, biases (transformers #43366)": (
        "tests/model/test_gguf_moved.py::test_gpt_oss_from_the_bytes_of_the_published_checkpoint",
        f"{PLACES}::test_families_that_transformers_does_not_read[gpt_oss]",
    ),
    "models in several files (vllm-gguf-plugin #103)": (f"{PLACES}::test_a_model_in_several_files",),
}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_has_its_tests(bug: str) -> None:
    check_tests(BUGS[bug])


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3", "nemotron", "gemma3n", "gemma4", "qwen3"])
def test_norms_are_stored_plus_1_by_some_converters(architecture: str) -> None:
    """As `norm_shift` of llama.cpp's convert_hf_to_gguf.py says; all else is as it was."""
    stored = np.array([0.5, 1.25, 3], np.float32)
    shift = 1 if architecture in ("gemma", "gemma2", "gemma3", "nemotron") else 0
    for name in ("blk.1.attn_norm.weight", "blk.1.attn_q_norm.weight", "output_norm.weight", "blk.1.attn_q.bias"):
        expected = stored - shift if "norm" in name else stored
        assert np.array_equal(undone(architecture, None, [GgufTensor(name, Q.F32, (3,), 0, 12)], [stored]), expected)
