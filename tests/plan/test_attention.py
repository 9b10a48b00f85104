"""plan.rates: attention and products of formats without a table, by shape, measured or derived by the stated rules."""

from dataclasses import replace

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan import rates
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.profile import unit
from flexengine.plan.rates import Attention, Rates, assumed, derived
from flexengine.plan.sizes import LayerPages
from flexengine.plan.workload import Workload
from flexengine.schedule.batches import split_prompt
from flexengine.schedule.pages import Pool

MATRIX = TensorFact("w", 64 * 64, 2, 2)
MODEL = ModelFacts(((MATRIX,),), (), MATRIX, None, 64, 64, 64, heads=32, kv_heads=4, head_dim=64, itemsize=4)
MACHINE = Hardware(
    name="m", kind="cuda", device_bytes=None, host_bytes=None, disk_bytes=None,
    links=dict.fromkeys(("disk_read", "disk_write", "h2d", "d2h"), 10000000000.0), checkpoint_read=1e9,
    products={"float16": ((1, 1e11), (100, 5e12))}, prompt_attention=((128, 1e12), (1024, 4e12)),
    decode_attention=((64, 1e10), (512, 1e11)), elementwise=1e11, host_attention=1e10,
)  # fmt: skip
BYTES = 2 * 4 * 64 * 4  # K and V of a token in one layer, fp32


def test_decode_attention_is_limited_by_memory_or_by_the_work_of_all_queries_of_a_group() -> None:
    elements = 2 * 4 * 64
    for flops, group in ((1e15, 8), (1e10, 8), (1e10, 1)):
        model = replace(MODEL, heads=4 * group)
        seconds = float(Attention(model, replace(MACHINE, vector_flops=flops)).decode(5120, 512))
        assert seconds == pytest.approx(5120 * max(BYTES / 1e11, elements * 2 * group / flops))


def test_encoded_elements_are_dequantized_once_for_all_queries_of_a_group() -> None:
    kept = 300  # bytes of a token
    model = replace(MODEL, kv_kept=kept, kv_pieces=3, kv_form="int4")
    found = Attention(model, replace(MACHINE, vector_flops=1e10, host_flops=2e9))
    assert float(found.decode(100, 512)) == pytest.approx(100 * 512 * (2 * 8 + 4) / 1e10)
    assert float(found.decode(100, 512, "host")) == pytest.approx(100 * 512 * (2 * 8 + 4) / 2e9)


def test_measured_tables_count_for_their_own_shape_alone() -> None:
    tables = {"decode": ((512.0, 5e9),), "prompt": ((128.0, 3e9),), "continued": ((512.0, 2e9),), "call": ((1.0, 0.5),),
              "host": ((512.0, 1e9),)}  # fmt: skip
    machine = replace(MACHINE, attention={MODEL.attention_signature(): tables})
    found = Attention(MODEL, machine)
    flop = 4 * 32 * 64 * 1000
    assert float(found.decode(1000, 512)) == pytest.approx(1000 * BYTES / 5e9)
    assert float(found.decode(1000, 512, "host")) == pytest.approx(1000 * BYTES / 1e9)
    assert (float(found.prompt(1000, 128)), float(found.prompt(1000, 512, "continued"))) == (flop / 3e9, flop / 2e9)
    assert Rates.of(MODEL, machine).calls == 0.5
    for other in (replace(MODEL, heads=16), replace(MODEL, head_dim=128), replace(MODEL, kv_form="int8"),
                  replace(MODEL, windows=(256,)), replace(MODEL, softcap=50.0)):  # fmt: skip
        window = other.windows[0] if other.windows else None
        assert Attention(other, machine, window).measured == {}
    assert Attention(replace(MODEL, kv_heads=8, heads=64), machine).measured == tables  # the same group and width


def test_products_without_a_table_follow_from_a_plain_one() -> None:
    plain = ((1.0, 1e11), (100.0, 5e12))  # 1e11 bytes per second, as 2 bytes are 2 FLOP
    found = derived(plain, 2, 0.5625, True, 4e12)
    for rows, rate in found:
        assert rate == pytest.approx(2 * rows / (0.5625 / 1e11 + 4 / 4e12 + 2 * rows / 5e12))
    assert derived(plain, 2, 4.0, False, 0.0)[0][1] == pytest.approx(2 / (4 / 1e11 + 2 / 5e12))
    assert derived(((1.0, 1e12),), 2, 0.5, True, 0.0) == ((1.0, 1e12),)


def test_a_format_takes_its_own_table_or_that_of_its_exact_form() -> None:
    def head(form: str, tables: dict[str, float]) -> float:
        matrix = replace(MATRIX, form=form, encoded=3000)
        model = replace(MODEL, layers=((matrix,),), embedding=matrix)
        return float(Rates.of(model, replace(MACHINE, products=tables)).one_layer(0, 1.0))

    both = {"float16": 1e12, "int4": 1e9, "int4 by int8": 1e10}
    assert head("int4 by int8", both) < head("int4", both) < 10 * head("int4 by int8", both) + 1
    assert head("int4 by bf16", both) == head("int4", both)
    with pytest.raises(InvalidInput, match="has products of int8 only; add a table for int4"):
        head("int4", {"int8": 1e9})


def test_pairs_of_continued_pieces_are_those_of_all_pieces_but_the_first() -> None:
    sizes = {(700, 3): 2, (90, 2): 1, (256, 1): 1}
    found = unit(Workload(sizes), 256, (LayerPages(1.0, Pool(0, 16), Pool(0, 16)),), 0.0, windows=[100])
    for window in (None, 100):
        pieces = [(p, times) for (n, _), times in sizes.items() for p in split_prompt(0, 0, n, 256)]
        every = sum(p.pairs(window) * times for p, times in pieces)
        late = sum(p.pairs(window) * times for p, times in pieces if p.start)
        assert found.pairs[window] * 4 == pytest.approx(every)
        assert found.late[window] * 4 == pytest.approx(late)


def test_hardware_refuses_attention_tables_that_mean_nothing() -> None:
    with pytest.raises(InvalidInput, match="attention 'x' has \\['speed'\\]; it may have decode, host"):
        replace(MACHINE, attention={"x": {"speed": ((1.0, 1.0),)}})
    assert Hardware.from_json(replace(MACHINE, attention={"x": {"call": ((1.0, 1e-4),)}}).to_json(), "file")


def test_the_fastest_plain_format_says_most() -> None:
    """A machine that multiplies fp32 faster than 16 bits derives 4 bits from fp32."""
    fp32, half = ((1.0, 1e9), (512.0, 1.4e11)), ((1.0, 1e9), (512.0, 1.7e10))
    hardware = replace(assumed("cpu", Capacity(1 << 34, None, 1 << 40, True, False)),
                       products={"float32": fp32, "float16": half})  # fmt: skip
    tensor = TensorFact("w", 4096 * 4096, 2, 2, encoded=4096 * 4096 // 2, form="int4")
    assert rates._products(hardware, tensor) == derived(fp32, 4, 0.5, True, hardware.vector_flops)
