"""States beside keys and values in a plan: their bytes on each link and tier, written out."""

from dataclasses import replace

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan import sizes
from flexengine.plan.facts import NO_ATTENTION, ModelFacts
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.records import words
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.plans import DEVICE, FLAT, HOST, opt, predicted

RECORD, LAYERS, HIDDEN = 528 * 4096, 8, 4096  # 2.16 MB
ENDLESS = Capacity(None, None, None, shared=False, staged=True)


def hybrid(attends: tuple[int, ...] = (3, 7), both: tuple[int, ...] = ()) -> ModelFacts:
    """A model whose layers have attention, a state, or both."""
    windows = tuple(None if j in (*attends, *both) else NO_ATTENTION for j in range(LAYERS))
    states = tuple(0 if j in attends else RECORD for j in range(LAYERS))
    return replace(opt(LAYERS, HIDDEN, 32, vocabulary=8192), windows=windows, states=states, grain=64)


@pytest.mark.parametrize(("attends", "both"), [((3, 7), ()), ((), (0, 1, 2)), ((), ())])
@pytest.mark.parametrize("disk", [0.0, 1.0])
def test_bytes_of_records(attends: tuple[int, ...], both: tuple[int, ...], disk: float) -> None:
    """Each decode step loads and stores the record of each layer with a state, also in RAM, and each piece of a prompt
    but the first; keys and values are those of layers with attention."""
    s, n, b, piece, page = 512, 20, 32, 128, 16
    model = hybrid(attends, both)
    policy = Policy(16, 2, DEVICE, (0.0, 1 - disk, disk), DEVICE, 2, "zigzag", prefill_tokens=piece)
    told = predicted(model, Workload({(s, n): b}), policy)
    records = b * RECORD * sum(nbytes > 0 for nbytes in model.states)
    kv = 2 * 2 * HIDDEN * b * len(model.attended)

    def paged(tokens: int) -> int:
        return -(-tokens // page) * page

    pieces = s // piece
    loaded = kv * (sum(paged(s + i - 1) for i in range(1, n)) + sum(i * piece for i in range(pieces)))
    written = kv * (s + (page * (n - 1) if disk else n - 1))
    records_in, records_out = records * (n - 1 + pieces - 1), records * (n - 1 + pieces)
    assert told.busy.get("h2d", 0.0) == pytest.approx((loaded + records_in) / 1e10, rel=1e-6)
    assert told.busy.get("d2h", 0.0) == pytest.approx((written + records_out) / 8e9, rel=1e-6)
    if disk:
        assert told.busy["disk_write"] == pytest.approx((written + records_out) / 1e9, rel=1e-6)


def test_tiers_book_a_record_for_each_sequence() -> None:
    model, work = hybrid(both=(0,)), Workload({(100, 20): 12})
    layout = lay_out(model, Policy(4, 3, cache=HOST), work, ENDLESS)
    keys = 2 * 2 * HIDDEN * 16 * -(-119 // 16)  # whole pages of the longest sequence
    layers = {"keys": 3, "states": 6}
    assert layout.account["host"]["KV cache"] == 12 * (layers["keys"] * keys + layers["states"] * RECORD)
    assert layout.beside == 4 * keys  # layer 0 has both: records follow the pages of a gpu_batch
    assert layout.cache_buffer == 4 * (keys + RECORD)
    assert layout.policy.prefill_tokens == 2048
    assert lay_out(model, Policy(4, 3, prefill_tokens=100), work, ENDLESS).policy.prefill_tokens == 128
    assert lay_out(model, Policy(4, 3, prefill_tokens=200), work, ENDLESS).policy.prefill_tokens == 192
    assert words(model) == [
        "            each sequence has 13.0 MB of states, in 6 of 8 layers; they are kept and moved with its KV cache"
    ]


def test_decode_steps_move_the_temporary_tensors_of_modules() -> None:
    plain, work, policy = hybrid(), Workload({(100, 20): 12}), Policy(4, 3)
    told = [predicted(replace(plain, mixing=(0, 0, 0, 1, n)), work, policy, FLAT).busy["device"] for n in (0, 10**7)]
    assert told[1] - told[0] == pytest.approx(12 * 19 * 6 * 2 * 10**7 / FLAT.elementwise)


def test_scores_with_added_numbers_take_seconds() -> None:
    """Five tensors of scores are read and written, and cached keys and values are read or written three times."""
    plain, work, policy = hybrid(tuple(range(LAYERS))), Workload({(100, 20): 12}), Policy(12, 1)
    told = [predicted(replace(plain, added=n), work, policy, FLAT).busy["device"] for n in (0, 64)]
    cached, pairs = 12 * sum(range(100, 119)), 12 * 100 * 101 / 2
    moved = 2 * 5 * 4 * plain.heads * (cached + pairs) + 3 * 2 * HIDDEN * plain.itemsize * cached
    assert told[1] - told[0] == pytest.approx(LAYERS * moved / FLAT.elementwise, rel=0.02)


def test_few_records_limit_the_block() -> None:
    """Memory for states is shared out like that for pages: a tier that has room for half of the records has half of the
    sequences, and the forecast of the job has as many sweeps as that takes."""
    model, work = hybrid(), Workload({(100, 20): 12})
    whole = lay_out(model, Policy(12, 1), work, ENDLESS)
    cache, rest = whole.account["device"]["KV cache"], whole.total("device")
    half = replace(ENDLESS, device=rest - cache // 2)
    layout = lay_out(model, Policy(12, 1), work, half)
    pages = [pool.pages for pool in layout.pools["device"]]
    assert [type(n) for n in pages] == [int, int]
    assert 5 <= pages[1] <= 6
    assert layout.room("device") == pytest.approx(whole.room("device") / 2, rel=0.1)


def test_delegation_is_refused() -> None:
    workers = replace(ENDLESS, workers=(1 << 30,))
    for policy, capacity in ((Policy(4, 2, cache=HOST, delegate="host"), ENDLESS), (Policy(4, 2), workers)):
        with pytest.raises(InvalidInput, match="it keeps states beside keys and values"):
            lay_out(hybrid(), policy, Workload({(100, 20): 12}), capacity)


def test_chosen_values_are_those_of_layers_with_attention() -> None:
    """Two of eight layers save a quarter of the bytes, and take a quarter of the seconds of choosing."""
    work, policy = Workload({(2000, 20): 32}), Policy(16, 2, cache=HOST, prefill_tokens=2048)
    saved = []
    for model in (hybrid(), hybrid(tuple(range(LAYERS)))):
        whole, chosen = (predicted(replace(model, topk=topk), work, policy, FLAT).busy for topk in (None, 0.1))
        saved.append([whole[lane] - chosen[lane] for lane in ("h2d", "device")])
    assert saved[1][0] > 0 > saved[1][1]
    assert [4 * part for part in saved[0]] == pytest.approx(saved[1])


@pytest.mark.parametrize("top", [64, 400])
def test_attention_reads_the_keys_that_are_chosen(top: int) -> None:
    """Seconds rise with their number, not with the length of rows: chosen K and V are read and written to gather them,
    and read by attention."""
    s, n, b, layers = 512, 20, 32, 4
    model, policy = opt(layers, 1024, 16, 4096), Policy(16, 2)
    few, more = (
        predicted(replace(model, choosing=(number, 4, 32)), Workload({(s, n): b}), policy, FLAT).busy["device"]
        for number in (top, top + 50)
    )
    kv, steps = model.kv_token, b * (n - 1)
    pairs = b * sum(min(q + 1, top + 50) - min(q + 1, top) for q in range(s))
    attended = steps * 50 * kv / FLAT.decode_attention[0][1] + pairs * 4 * 1024 / FLAT.prompt_attention[0][1]
    gathered = 50 * kv * (2 * steps + 3 * b * s) / FLAT.elementwise
    assert more - few == pytest.approx(layers * (attended + gathered), rel=1e-6)


def test_paused_passes_hold_a_choice_only_if_later_layers_see_it() -> None:
    """The numbers of 64 keys for each token, and its own."""
    model, work, policy = replace(opt(4, 1024, 16, 4096), choosing=(64, 4, 32)), Workload({(100, 20): 12}), Policy(4, 3)
    alone, kept = (sizes.paused(each, policy, work) for each in (model, replace(model, inherits=frozenset({2, 3}))))
    assert 0 <= kept - alone - sizes.sweep_tokens(policy, work) * (4 * 64 + 8) < sizes.ALIGN
