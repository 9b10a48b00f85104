"""Hardware: what is accepted, what a refusal says, `at`; the shipped machines, models and published policies."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.hardware import Capacity, Hardware, Table, at
from flexengine.policy import Policy

SHIPPED = Path(__file__).parents[2] / "policies"
GPU: dict[str, Any] = dict(
    name="small", kind="cuda", device_bytes=10**9, host_bytes=4 * 10**9, disk_bytes=None,
    links={"disk_read": [[4096, 1e8], [2**20, 1e9]], "disk_write": 5e8, "h2d": 1e10, "d2h": 1e10},
    checkpoint_read=1e9, products={"float16": [[1, 1e11], [64, 4e12]]}, prompt_attention=1e12,
    decode_attention=[[64, 5e10], [512, 1e11]], elementwise=1e11, host_attention=8e9, cell_seconds=1e-4,
    crosstalk={"device": {"h2d": 0.25}}, layers={"layer a": [[1, 1e-3], [64, 2e-3]]}, heads={"a": [[1, 1e-3]]},
)  # fmt: skip
CPU: dict[str, Any] = dict(GPU, kind="cpu", host_bytes=None, links={"disk_read": 1e9, "disk_write": 5e8, "h2d": 5e9})


# Round trip.


@pytest.mark.parametrize("values", [GPU, CPU, dict(GPU, kind="sim")])
def test_round_trip(values: dict[str, Any], tmp_path: Path) -> None:
    hardware = Hardware.from_json(values, "here")
    text = json.dumps(hardware.to_json())
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert Hardware.load(path) == Hardware.from_json(json.loads(text), "there") == hardware
    assert json.dumps(Hardware.load(path).to_json()) == text


def test_every_field_reaches_the_record() -> None:
    hardware = Hardware.from_json(GPU, "here")
    assert set(hardware.to_json()) > set(GPU)
    assert hardware.links["disk_read"] == ((4096.0, 1e8), (2.0**20, 1e9))
    assert hardware.links["h2d"] == ((1.0, 1e10),)  # a plain number holds everywhere
    assert (hardware.elementwise, hardware.crosstalk) == (1e11, {"device": {"h2d": 0.25}})
    assert hardware.layers["layer a"] == ((1.0, 1e-3), (64.0, 2e-3))
    assert (hardware.task_seconds, hardware.measured) == (0.0, False)
    assert replace(hardware, measured=True, name="other").to_json() == dict(
        hardware.to_json(), measured=True, name="other"
    )


def test_capacity_by_kind() -> None:
    assert Hardware.from_json(GPU, "").capacity == Capacity(10**9, 4 * 10**9, None, shared=False, staged=True)
    assert Hardware.from_json(CPU, "").capacity == Capacity(10**9, None, None, shared=True, staged=False)


# Interpolation.


def test_at_follows_a_power_law() -> None:
    def law(x: float) -> float:
        return 3.0 * math.exp(0.7 * math.log(x))

    table = tuple((x, law(x)) for x in (2.0, 50.0, 4096.0))
    for x in (2, 2.5, 7, 49.9, 50, 51, 300, 4095, 4096):
        assert at(table, x) == pytest.approx(law(x), rel=1e-12)
    assert at(table, math.sqrt(2 * 50)) == pytest.approx(math.sqrt(law(2) * law(50)))


@pytest.mark.parametrize("x", [1e-300, 0.5, 1.0, 1.999])
def test_at_is_constant_below(x: float) -> None:
    assert at(((2.0, 5.0), (8.0, 7.0)), x) == 5.0


def test_at_is_constant_above_and_monotone_between() -> None:
    table = ((2.0, 5.0), (8.0, 7.0), (9.0, 1.0))
    assert at(table, 9.001) == at(table, 1e300) == 1.0
    assert at(((4.0, 6.0),), 1) == at(((4.0, 6.0),), 4) == at(((4.0, 6.0),), 100) == 6.0
    rising = [at(table, 2 + 0.06 * i) for i in range(101)]
    assert rising == sorted(rising)
    assert all(5.0 <= y <= 7.0 + 1e-12 for y in rising)


def test_link_seconds() -> None:
    hardware = Hardware.from_json(GPU, "")
    assert hardware.link_seconds("h2d", 3e10, 2**20) == pytest.approx(3.0)
    assert hardware.link_seconds("disk_read", 1e9, 4096) == pytest.approx(10.0)
    assert hardware.link_seconds("disk_read", 1e9, 0) == pytest.approx(10.0)
    assert hardware.link_seconds("disk_read", 1e9, 65536) == pytest.approx(1 / math.sqrt(0.1))  # halfway in log x


# Refusals: each names the field and shows the value.

_TABLES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "checkpoint_read": lambda v: {"checkpoint_read": v},
    "prompt_attention": lambda v: {"prompt_attention": v},
    "decode_attention": lambda v: {"decode_attention": v},
    "links d2h": lambda v: {"links": dict(GPU["links"], d2h=v)},
    "products float16": lambda v: {"products": {"float16": v}},
    "layers some": lambda v: {"layers": {"some": v}},
    "heads some": lambda v: {"heads": {"some": v}},
    "fused some": lambda v: {"fused": {"some": v}},
}


@pytest.mark.parametrize("name", _TABLES)
@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "is 0; it must be a positive"), (-2.5, "is -2.5; it must be a positive"),
     (True, "is true; it must be a positive number"),
     (float("nan"), "is nan; it must be a positive"), (float("inf"), "is inf; it must be a positive"),
     ("1e9", "is '1e9'; it must be a list of points"), (None, "is null; it must be a list of points"),
     ([], "is []; it must be a list of points"), ({"1": 2}, 'is {"1": 2}; it must be a list of points'),
     ([1, 2], "holds 1; it must hold points"), ([[1, 2, 3]], "holds [1, 2, 3]; it must hold points"),
     (["12"], "holds '12'; it must hold points"), ([[1, 0]], "is 0; it must be a positive"),
     ([[-1, 5]], "is -1; it must be a positive"), ([[1, "5"]], "is '5'; it must be a positive"),
     ([[2, 5], [2, 6]], "x must rise"), ([[2, 5], [1, 6]], "is [[2, 5], [1, 6]]; x must rise")],
)  # fmt: skip
def test_tables_are_refused(name: str, value: Any, shown: str) -> None:
    _refuses(dict(GPU, **_TABLES[name](value)), name, shown)


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes", "elementwise", "host_attention",
                                  "cell_seconds", "task_seconds", "sweep_seconds", "sequence_seconds"])  # fmt: skip
@pytest.mark.parametrize(("value", "shown"), [(-1, "-1"), ("16GB", "'16GB'"), (True, "true"), (float("nan"), "nan"),
                                              ([1], "[1]"), (-math.inf, "-inf")])  # fmt: skip
def test_numbers_are_refused(name: str, value: Any, shown: str) -> None:
    _refuses(dict(GPU, **{name: value}), f"{name} is {shown}")


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes", "elementwise"])
def test_nothing_at_all_is_refused(name: str) -> None:
    _refuses(dict(GPU, **{name: 0}), f"{name} is 0; it must be a positive number")


@pytest.mark.parametrize("name", ["links", "products", "layers", "fused", "heads", "crosstalk"])
@pytest.mark.parametrize("value", [None, [], 3, "x"])
def test_objects_are_refused(name: str, value: Any) -> None:
    _refuses(dict(GPU, **{name: value}), f"{name} is {'null' if value is None else repr(value)}; it must be an object")


@pytest.mark.parametrize("name", [None, 3, "a\ud800", "two\nlines"])
def test_names_are_refused(name: Any) -> None:
    _refuses(dict(GPU, name=name), f"name is {'null' if name is None else repr(name)}", "printable text")


@pytest.mark.parametrize("kind", ["gpu", "CUDA", "", None, ["cpu"]])
def test_kinds_are_refused(kind: Any) -> None:
    shown = repr(kind) if isinstance(kind, str) else json.dumps(kind)
    _refuses(dict(GPU, kind=kind), f"kind is {shown}; it must be one of cpu, cuda, sim")


@pytest.mark.parametrize(
    ("crosstalk", "shown"),
    [({"gpu": {"h2d": 0.1}}, "crosstalk 'gpu' 'h2d' is 0.1"), ({"h2d": {"ram": 0.1}}, "crosstalk 'h2d' 'ram' is 0.1"),
     ({"h2d": {"device": 2.5}}, "is 2.5; it must be a number from"),
     ({"h2d": {"device": -0.1}}, "is -0.1; it must be a number from"),
     ({"h2d": {"device": "a"}}, "crosstalk h2d device is 'a'; it must be a number from"),
     ({"h2d": 0.5}, "crosstalk h2d is 0.5; it must be an object")],
)  # fmt: skip
def test_crosstalk_is_refused(crosstalk: Any, shown: str) -> None:
    _refuses(dict(GPU, crosstalk=crosstalk), shown)


@pytest.mark.parametrize("lane", ["disk_read", "disk_write", "h2d", "d2h"])
def test_missing_links_are_refused(lane: str) -> None:
    links = {name: table for name, table in GPU["links"].items() if name != lane}
    _refuses(dict(GPU, links=links), "small has no links", f"['{lane}']")
    if lane == "d2h":
        Hardware.from_json(dict(CPU, links=links), "")  # RAM is the device tier
    else:
        _refuses(dict(CPU, links=links), f"['{lane}']")


def test_host_bytes_of_a_cpu_are_refused() -> None:
    _refuses(dict(CPU, host_bytes=10), "kind cpu has host_bytes", "set host_bytes to null")


def test_missing_and_unknown_fields_are_refused() -> None:
    without = {k: v for k, v in GPU.items() if k not in ("products", "kind")}
    _refuses(without, "lacks fields ['kind', 'products']")
    _refuses(dict(GPU, elementwize=1.0), "unknown fields ['elementwize']", "'elementwise'")
    with pytest.raises(InvalidInput, match=r"^here has unknown fields"):  # the name once
        Hardware.from_json(dict(GPU, elementwize=1.0), "here")
    others: tuple[object, ...] = (None, [], 3, "text")
    for value in others:
        with pytest.raises(InvalidInput, match=r"here is (null|\[\]|3|'text'); it must be an object of fields"):
            Hardware.from_json(value, "here")


def test_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    broken = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[1]", json.dumps(dict(GPU, kind="tpu")).encode()]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(InvalidInput) as caught:
            Hardware.load(path)
        assert f"hardware file {path}" in str(caught.value)
    with pytest.raises(InvalidInput, match=r"none\.json"):
        Hardware.load(tmp_path / "none.json")
    with pytest.raises(InvalidInput):
        Hardware.load(tmp_path)


def _refuses(values: dict[str, Any], *parts: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Hardware.from_json(values, "machine.json")
    for part in ("machine.json", *parts):
        assert part in str(caught.value)


# Shipped machines against their data sheets.


class Sheet(NamedTuple):
    """memory: bytes per second of the device's memory; flop: peak of its 16-bit products; device, host: bytes built
    in; bus: bytes per second of PCIe, one way, before its protocol; integers, vector: peak of products of 8-bit
    integers and of fp32 outside tensor cores."""

    memory: float
    flop: float
    device: int
    host: float
    bus: float
    integers: float
    vector: float


# Bytes of an element.
SIZES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0625, "int4": 0.5625, "int3": 0.4375, "int2": 0.375}
SHEETS = {
    "t4-16gb_208gb_ssd": Sheet(320e9, 65e12, 2**34, 208 * 2**30, 15.75e9, 130e12, 8.1e12),
    "rtx3090-24gb_128gb": Sheet(936e9, 71e12, 24 * 2**30, 128 * 2**30, 31.5e9, 284e12, 35.6e12),
    "h100-80gb_512gb": Sheet(3350e9, 989e12, 80 * 2**30, 512 * 2**30, 63e9, 1979e12, 67e12),
    # AVX-512 at 2.5 GHz: 2 cores x 2 units x 16 numbers x 2; DDR4 as it was measured
    "cpu-2core_24gb": Sheet(25e9, 2 * 2 * 16 * 2 * 2.5e9, 24 * 2**30, 24 * 2**30, math.inf, 0.0, 160e9),
}


def shipped(name: str) -> Hardware:
    return Hardware.load(SHIPPED / "hardware" / f"{name}.json")


def test_all_shipped_files_are_known() -> None:
    assert {p.stem for p in (SHIPPED / "hardware").iterdir()} == set(SHEETS)
    assert all(p.suffix == ".json" for p in (SHIPPED / "hardware").iterdir())


@pytest.mark.parametrize("name", SHEETS)
def test_shipped_capacities(name: str) -> None:
    hardware, sheet = shipped(name), SHEETS[name]
    assert hardware.name == name
    assert not hardware.measured
    assert hardware.device_bytes is not None
    assert 0.85 * sheet.device < hardware.device_bytes < sheet.device
    assert hardware.disk_bytes is not None
    if not hardware.shared:
        assert hardware.host_bytes is not None
        assert 0.8 * sheet.host < hardware.host_bytes < sheet.host


@pytest.mark.parametrize("name", SHEETS)
def test_shipped_links(name: str) -> None:
    hardware, sheet = shipped(name), SHEETS[name]
    assert all(rises(table) for table in (*hardware.links.values(), hardware.checkpoint_read))
    for transfer in (4096, 2**16, 2**18, 2**20, 2**24, 2**28):
        rate = {lane: at(table, transfer) for lane, table in hardware.links.items()}
        link = min(rate["h2d"], rate.get("d2h", math.inf))
        assert max(rate["disk_read"], rate["disk_write"]) <= link <= min(sheet.bus, sheet.memory)
    assert top(hardware.links["disk_write"]) < top(hardware.links["disk_read"])
    assert top(hardware.checkpoint_read) == pytest.approx(top(hardware.links["disk_read"]), rel=0.02)  # one disk


@pytest.mark.parametrize("name", SHEETS)
def test_shipped_compute(name: str) -> None:
    hardware, sheet = shipped(name), SHEETS[name]
    for dtype, table in hardware.products.items():
        assert rises(table), dtype
        size = SIZES[dtype.split(" by ")[0]]
        for rows in (1, 2, 4, 16):  # every weight is read once, for two operations a row
            assert at(table, rows) <= 2 * rows * sheet.memory / size
        assert top(table) <= (sheet.integers if "by int8" in dtype else sheet.flop)
    most = max(top(table) for table in hardware.products.values())
    assert 0 < hardware.vector_flops <= sheet.vector
    assert rises(hardware.prompt_attention)
    assert top(hardware.prompt_attention) < most
    assert rises(hardware.decode_attention)
    assert top(hardware.decode_attention) < sheet.memory
    assert hardware.elementwise < sheet.memory
    assert hardware.host_attention < hardware.decode_attention[0][1]
    assert 1e-5 < hardware.cell_seconds < 2e-3
    assert 1e-5 < hardware.task_seconds < 1e-3


# Seconds per element beside reading and multiplying, and FLOP per second of many rows by 8-bit activations.
ENCODED = {"h100-80gb_512gb": (1.1e-12, 4.7e-12, 121e12), "rtx3090-24gb_128gb": (2.1e-12, 8.8e-12, 17.4e12)}


@pytest.mark.parametrize("name", ENCODED)
def test_shipped_encoded_products_follow_the_stated_rule(name: str) -> None:
    hardware, (decoding, rounding, most) = shipped(name), ENCODED[name]
    plain = hardware.products["float16"]
    bandwidth = plain[0][1]  # a 16-bit weight is two bytes and two operations a row
    for form, rate, peak in (("", decoding, top(plain)), (" by int8", rounding, most)):
        for bits, rows in itertools.product(("int8", "int4"), (1, 16, 256, 16384)):
            each = SIZES[bits] / bandwidth + rate + 2 * rows / peak
            assert at(hardware.products[bits + form], rows) == pytest.approx(2 * rows / each, rel=0.04), (form, rows)


def test_encoded_products_of_an_h100_are_those_recorded_on_an_h200() -> None:
    """Both have one chip; its kernels for codes are limited by computing. The first run of bench.gpu.kernels."""
    lines = (SHIPPED.parent / "bench" / "results" / "gpu.jsonl").read_text().splitlines()
    products = [record for record in map(json.loads, lines) if "product" in record][:5]
    for record in products:
        for form, name in (("int4", "int4"), ("int4 by int8", "int4, int8")):
            rate = at(shipped("h100-80gb_512gb").products[form], record["rows"])
            assert rate == pytest.approx(1e12 * record["tflop_s"][name], rel=0.45), (form, record["rows"])


def test_encoded_products_before_ampere_are_those_of_torch_in_fp32() -> None:
    """`kernels.cuda.CudaKernels.product` uses Triton from compute capability 8.0 on; a T4 has 7.5."""
    hardware, sheet = shipped("t4-16gb_208gb_ssd"), SHEETS["t4-16gb_208gb_ssd"]
    for form, size in (("int8", 1.0625), ("int4", 0.5625), ("int3", 0.4375), ("int2", 0.375)):
        for rows in (1, 16, 256, 16384):
            each = size / hardware.products["float16"][0][1] + 50 / hardware.elementwise + 4 * rows / sheet.vector
            assert at(hardware.products[form], rows) == pytest.approx(2 * rows / each, rel=0.02), (form, rows)
        assert f"{form} by int8" not in hardware.products


def rises(table: Table) -> bool:
    return all(a[1] <= b[1] for a, b in itertools.pairwise(table))


def top(table: Table) -> float:
    return table[-1][1]


# The T4 file against what FlexGen published for 512 tokens in, 32 out (docs/machines.md has the arithmetic).


class Opt(NamedTuple):
    hidden: int
    layers: int
    heads: int

    @property
    def weights(self) -> int:
        """Parameters that a token is multiplied by, without the output projection."""
        return 12 * self.hidden**2 * self.layers

    @property
    def parameters(self) -> int:
        """All, the output projection tied to the embedding."""
        biases = self.layers * (4 + 4 + 1 + 4) * self.hidden  # q k v o, two norms, the FFN's two
        return self.weights + biases + (50272 + 2050 + 2) * self.hidden


OPT = {"1.3b": Opt(2048, 24, 32), "6.7b": Opt(4096, 32, 32), "13b": Opt(5120, 40, 40), "30b": Opt(7168, 48, 56),
       "66b": Opt(9216, 64, 72), "175b": Opt(12288, 96, 96)}  # fmt: skip


def test_t4_prefill_takes_the_published_time() -> None:
    """OPT-175B's breakdown: 2220 s of compute for 256 prompts of 512 tokens, 32 at a time."""
    t4, opt = shipped("t4-16gb_208gb_ssd"), OPT["175b"]
    products = 2 * opt.weights * 256 * 512 / at(t4.products["float16"], 32 * 512)
    pairs = 256 * 512 * 513 / 2
    attention = 4 * opt.hidden * opt.layers * pairs / at(t4.prompt_attention, 512)
    assert products + attention == pytest.approx(2220, rel=0.05)


def test_t4_decode_takes_the_published_time() -> None:
    """OPT-6.7B on the GPU: 38.3 tokens per second of decoding, 2 at a time."""
    t4, opt = shipped("t4-16gb_208gb_ssd"), OPT["6.7b"]
    weights = opt.weights + 50272 * opt.hidden
    products = 2 * weights * 2 / at(t4.products["float16"], 2)
    cached = 2 * 528 * 4 * opt.hidden * opt.layers / at(t4.decode_attention, 528)
    assert products + cached + opt.layers * t4.cell_seconds == pytest.approx(2 / 38.3, rel=0.15)


def test_t4_host_attention_takes_the_published_time() -> None:
    """OPT-30B: 11.52 tokens per second of decoding, 144 at a time, nearly all of it CPU attention."""
    t4, opt = shipped("t4-16gb_208gb_ssd"), OPT["30b"]
    cached = 144 * 528 * 4 * opt.hidden * opt.layers
    assert cached / t4.host_attention == pytest.approx(144 / 11.52, rel=0.15)


# Model configs and published policies.


@pytest.mark.parametrize("name", OPT)
def test_model_configs(name: str) -> None:
    """As transformers reads them, and of the size their name says."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(SHIPPED / "models" / f"opt-{name}")
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    assert shape == OPT[name]
    assert (config.ffn_dim, config.word_embed_proj_dim) == (4 * config.hidden_size, config.hidden_size)
    assert config.dtype == torch.float16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == OPT[name].parameters
    assert OPT[name].parameters == pytest.approx(float(name[:-1]) * 1e9, rel=0.015)


@pytest.mark.parametrize(
    ("name", "percent", "shape"),
    [("6.7b", (100, 0, 100, 0, 100, 0), (2, 1)), ("30b", (20, 80, 0, 100, 0, 100), (48, 3)),
     ("175b", (0, 50, 0, 0, 0, 100), (32, 8))],
)  # fmt: skip
def test_published_policies(name: str, percent: tuple[int, ...], shape: tuple[int, int]) -> None:
    """FlexGen's --percent: weights, cache and activations on GPU and CPU; the rest is on disk."""
    policy = Policy.load(SHIPPED / "published" / f"opt-{name}.json")
    splits = [(g / 100, c / 100, 1 - (g + c) / 100) for g, c in zip(percent[::2], percent[1::2], strict=True)]
    assert [policy.weights, policy.cache, policy.activations] == splits
    assert (policy.gpu_batch_size, policy.num_gpu_batches) == shape
    assert (policy.schedule, policy.slots) == ("zigzag", 2)
