"""Lamina's tables: their figures by formulas, and that every far one has a reason."""

import pytest

from bench.papers import lamina
from bench.papers.tables import PaperTable
from bench.simulate import simulate
from flexengine.schedule.tasks import Op


@pytest.fixture(scope="module")
def tables() -> dict[str, PaperTable]:
    return {name: make() for name, make in lamina.TABLES.items()}


def figures(table: PaperTable) -> dict[str, float]:
    return {figure.name: figure.ours for figure in table.figures}


@pytest.mark.slow
def test_every_far_figure_has_a_reason(tables: dict[str, PaperTable]) -> None:
    for name, table in tables.items():
        assert table.name == name
        assert len(figures(table)) == len(table.figures), "names of figures are unique"
        assert not [figure.name for figure in table.figures if figure.unexplained]
        assert not [figure.name for figure in table.figures if figure.why and not figure.published]


@pytest.mark.parametrize(("name", "billions"), [("13B", 13.0), ("33B", 32.5), ("65B", 65.3)])
def test_models_have_their_sizes(name: str, billions: float) -> None:
    facts = lamina.llama(name)
    assert sum(t.elements for t in facts.tensors) / 1e9 == pytest.approx(billions, rel=0.01)
    assert facts.kv_token == 2 * 2 * lamina.SHAPES[name][0]


def test_lengths_of_the_trace() -> None:
    trace = lamina.trace()
    assert trace.count == lamina.NUMBER
    assert max(p + n for p, n in trace.sizes) <= lamina.CONTEXT
    prompts = sum(p * times for (p, _), times in trace.sizes.items()) / trace.count
    outputs = sum(n * times for (_, n), times in trace.sizes.items()) / trace.count
    assert prompts == pytest.approx(lamina.PROMPT, rel=0.05)
    assert 0.85 * lamina.OUTPUT < outputs < lamina.OUTPUT  # long ones are cut


def test_orders_follow_the_formula() -> None:
    found = figures(lamina.orders())
    for n in (2, 3, 4, 5, 8):
        assert found[f"rotational / fixed, n = {n}, throughput"] == pytest.approx(n / (n - 1))
        assert found[f"fixed, n = {n}, pool busy"] == pytest.approx((n - 1) / n)


def test_bandwidths_follow_the_formula() -> None:
    """2 e d L / N bytes per FLOP of products, at the law's rate."""
    found = figures(lamina.bandwidth())
    rate = 1 / (1 / (0.85 * 1.555e12 * 128) + 1 / (0.7 * 312e12))
    assert found["13B on 1, block 128"] * 1e9 == pytest.approx(2 * 2 * 5120 * 40 * rate / 13.016e9, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_pieces_overlap(count: int) -> None:
    """Products, then a pipeline of three lanes: all stages of one piece, and the longest of the others."""
    seconds = {Op.COMPUTE: 7.0, Op.SEND: 2.0, Op.ATTEND: 3.0, Op.FETCH: 1.0}
    found = simulate(lamina.pieces(count), lambda task: seconds[task.op]).seconds
    assert found == pytest.approx(7 + 2 + 3 + 1 + (count - 1) * 3)


@pytest.mark.slow
def test_pools_hold_more_sequences(tables: dict[str, PaperTable]) -> None:
    """A device alone holds the KV cache that fits beside 26 GB of weights; paged, so a little less."""
    found = figures(tables["lamina-batches"])
    mean = sum((p + n / 2) * times for (p, n), times in lamina.trace().sizes.items()) / lamina.NUMBER
    assert found["13B on 1 alone, sequences"] < (36e9 - 26e9) / (mean * 819_200)
    alive = [found[f"13B on 1, {count} memory devices, sequences"] for count in lamina.POOLS]
    assert alive == sorted(alive)
    assert found["13B on 1 alone, sequences"] < alive[0]
