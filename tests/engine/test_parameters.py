"""Sampling parameters of a whole job that the model cannot use: one error before the job, not one per row."""

from typing import Any

import pytest

from flexengine import Engine, SamplingParams
from flexengine.errors import InvalidInput


def test_a_stop_token_that_the_model_lacks(families: Any) -> None:
    family = families("llama")
    with Engine(str(family.directory), device="cpu") as engine:
        with pytest.raises(InvalidInput, match=r"holds 601, but the model has 601 tokens.*from 0 to 600"):
            engine.generate(family.rows, SamplingParams(stop_token_ids=(3, 601)))
        with pytest.raises(InvalidInput, match="the checkpoint has no tokenizer"):
            engine.generate(family.rows, SamplingParams(stop=("x",)))
        # A row's own parameters refuse this row only.
        rows = [{**family.rows[0], "stop_token_ids": [601]}, {**family.rows[1], "stop_token_ids": [600]}]
        bad, good = engine.generate(rows, SamplingParams(max_tokens=2))
        assert bad.error == "prompt 0: stop_token_ids holds 601; token ids lie in [0, 601)"
        assert good.error is None
