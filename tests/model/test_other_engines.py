"""Bugs that other engines had with states beside keys and values, each with the tests that would find it here."""

import pytest

from tests.helpers.named_tests import check_tests

HYBRIDS, CHOSEN, KERNELS = "tests/e2e/test_hybrids.py", "tests/e2e/test_chosen_keys.py", "tests/kernels/test_states.py"
GRAIN = "tests/schedule/test_grain.py"
# By issue or pull request: the tests.
BUGS: dict[str, tuple[str, ...]] = {
    "a prompt of one token reads the state of a request that has ended (vllm #32118, #56524, #35219)": (
        f"{HYBRIDS}::test_a_record_is_not_read_before_it_is_written",
    ),
    "what was preempted goes on from its old state (vllm-metal #488)": (
        f"{HYBRIDS}::test_a_job_that_broke_off_goes_on",
        "tests/schedule/test_sweeps.py::test_records_change_in_place",
    ),
    "a tail of one token after a checkpoint (sglang #29633)": (
        f"{GRAIN}::test_pieces_end_on_the_grid_and_have_more_than_one_token",
        f"{HYBRIDS}::test_shared_prefixes[qwen3_next]",
    ),
    "padding of tails advances the state (vllm #55178)": (
        "tests/model/test_state_kernels.py::test_packed_pieces_are_those_of_each_sequence_alone",
        f"{HYBRIDS}::test_a_row_does_not_depend_on_its_batch[mamba2]",
    ),
    "prompts that are cut in the middle of a chunk (TensorRT-LLM #6334, vllm #38561, #54993, sglang #13100)": (
        f"{HYBRIDS}::test_prompts_in_pieces[mamba2]",
        f"{HYBRIDS}::test_calls_of_kernels_do_not_change_bits[granitemoehybrid]",
        f"{KERNELS}::test_pieces_give_the_same_bits",
    ),
    "the delta rule's grid of 64 (vllm #49827)": (
        f"{KERNELS}::test_any_sizes",
        f"{HYBRIDS}::test_prompts_in_pieces[qwen3_next]",
    ),
    "a step and a prompt give other bits (vllm #55524, #55627)": (
        f"{KERNELS}::test_pieces_give_the_same_bits",
        f"{HYBRIDS}::test_calls_of_kernels_do_not_change_bits[qwen3_next]",
    ),
    "a prefix is found, but its state was never saved, or is another one's (vllm #53084, #55601)": (
        f"{GRAIN}::test_stems_end_at_multiples_of_the_grain",
        f"{HYBRIDS}::test_shared_prefixes[falcon_h1]",
        "tests/worker/test_states.py::test_a_record_is_that_of_the_source",
    ),
    "prefixes are never found, and nothing says so (vllm #45238, #51250, #54504)": (
        f"{HYBRIDS}::test_shared_prefixes[granitemoehybrid]",
    ),
    "offload moves pages of attention only, or refuses (vllm #36463, #36636, #38230, LMCache #2845)": (
        f"{HYBRIDS}::test_bytes_of_states[disk]",
        f"{HYBRIDS}::test_tokens_are_those_of_transformers",
    ),
    "host memory for states is booked twice (sglang #29034)": (
        f"{HYBRIDS}::test_the_layout_books_records",
        "tests/plan/test_records.py::test_tiers_book_a_record_for_each_sequence",
    ),
    "offload forgets the keys of the indexer (sglang #39698, LMCache #5002)": (
        f"{CHOSEN}::test_pages_have_columns_for_keys_of_the_indexer",
        f"{CHOSEN}::test_shared_prefixes[deepseek_v32]",
    ),
    "sequences of a batch mix the short convolutions of LFM2 (llama.cpp #29002)": (
        f"{HYBRIDS}::test_a_row_does_not_depend_on_its_batch[lfm2]",
    ),
    "states cannot be cut, so whole prompts are computed again (llama.cpp #20225, #22746, #24055)": (
        f"{HYBRIDS}::test_shared_prefixes[xlstm]",
        f"{HYBRIDS}::test_scores[jamba]",
    ),
    "states are summed up in 16 bits (vllm #22928, #39032, #13466)": (f"{HYBRIDS}::test_states_keep_their_dtype",),
    "several tokens with a cache begin from zero (transformers #45513, #46084, #46741)": (
        f"{HYBRIDS}::test_prompts_in_pieces[jamba]",
        f"{HYBRIDS}::test_prompts_in_pieces[qwen3_next]",
    ),
    "a step clamps other time steps than a prompt (transformers #48989)": (
        f"{HYBRIDS}::test_prompts_in_pieces[zamba2]",
        f"{GRAIN}::test_pieces_end_on_the_grid_and_have_more_than_one_token",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_has_its_tests(bug: str) -> None:
    check_tests(BUGS[bug])
