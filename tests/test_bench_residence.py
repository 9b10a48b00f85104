"""bench.residence: the cases have the shapes that they name, and a run above its memory limit is reported."""

from dataclasses import asdict

from bench.residence import ALLOWED, CASES, line


def test_cases_cover_what_was_promised() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 20
    assert {case.device for case in CASES} == {"cpu", "sim"}
    assert {case.cache for case in CASES} == {None, "bf16", "int8", "int4"}
    assert {case.weights for case in CASES} == {None, "int4"}
    assert {case.heads[0] // case.heads[1] for case in CASES} == {1, 4, 8}
    assert all(2000 <= n <= 8192 for case in CASES for n in case.prompts)


def test_models_have_the_heads_they_should() -> None:
    for case in CASES:
        heads, kv_heads, dim = case.heads
        shapes, config = case.shape.layer_shapes(0), case.shape.config()
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (heads * dim, case.hidden)
        assert shapes["model.layers.0.self_attn.v_proj.weight"] == (kv_heads * dim, case.hidden)
        assert config["head_dim"] == dim
        assert max(case.prompts) < config["max_position_embeddings"]


def test_a_line_says_how_far_a_run_went() -> None:
    run = {"given": 10**8, "memory": 10**8, "growth": 12 * 10**7, "over": 0.2}
    record = {"name": "some", "case": asdict(CASES[0]), "runs": [run, {"failed": "no memory"}], "good": False}
    assert line(record).split(maxsplit=1)[1] == "120 of 100 MB (+20 %); no memory"
    assert ALLOWED == 1.1
