"""Cluster files: what they hold, and refusals that name the device, the value and the remedy."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.cases import decoder
from flexengine import shipped
from flexengine.errors import InvalidInput
from flexengine.plan.cluster.devices import HandRates, MachineRates, Profiled
from flexengine.plan.cluster.file import from_json, load, load_harm
from flexengine.plan.cluster.job import assumed_harm

LINK = {"bandwidth": 1e9, "latency": 1e-4}
FAST = {"memory": "8GiB", "flops": 1e13, "bandwidth": 1e11}
FILE: dict[str, Any] = {
    "name": "two",
    "types": {"fast": FAST, "slow": {"memory": 4e9, "flops": {"exact": 1e12, "int8": 2e12}, "bandwidth": 5e10,
                                     "host_memory": "16GB", "host_link": 1e10, "layer_seconds": 1e-4}},
    "devices": [{"type": "fast", "count": 2, "node": "a"}, {"name": "z", "type": "slow", "node": "b", "memory": 6e9}],
    "links": {"within": {"bandwidth": 1e11}, "between": LINK, "pairs": [{"devices": ["fast-1", "z"], "bandwidth": 7}]},
}  # fmt: skip


def changed(**values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FILE), **values}


def test_fields() -> None:
    found = from_json(FILE, "file")
    assert [d.name for d in found.devices] == ["fast-1", "fast-2", "z"]
    assert found.types == ("fast", "slow")
    one, two, slow = found.devices
    assert (one.memory, slow.memory, slow.host_memory, slow.host_link) == (8 << 30, 6 * 10**9, 16 * 10**9, 1e10)
    assert (one.offloads, slow.offloads) == (False, True)
    assert found.link(one, two).seconds(1e11) == pytest.approx(1.0)
    assert found.link(two, slow).seconds(1e9) == pytest.approx(1.0001)
    assert found.link(slow, one).bandwidth == 7
    assert isinstance(slow.latency, HandRates)
    model = decoder("m", 2, 1024, 4096, 1000)
    elements = 4 * 1024**2 + 2 * 1024 * 4096
    seconds = slow.latency.layer(model, 0, "int8", "prefill", 4, 100)
    assert seconds == pytest.approx(2 * elements * 400 / 2e12 + 4 * 5050 * 4 * 1024 / 1e12 + 1e-4)
    decoding = slow.latency.layer(model, 0, None, "decode", 4, 100)
    assert decoding == pytest.approx((2 * elements + 8 * 1024 + 400 * 4096) / 5e10 + 1e-4)
    assert slow.latency.layer(model, 0, "int4", "decode", 4, 100) == float("inf")


def test_a_hardware_file_gives_memory_host_and_rates() -> None:
    values = {"devices": [{"name": "a", "hardware": "t4-16gb_208gb_ssd"}]}
    found = from_json(values, "file", lambda name: shipped.find_file("hardware", name)).devices[0]
    assert isinstance(found.latency, MachineRates)
    assert (found.memory, found.host_memory, found.kind) == (15_400_000_000, 200_000_000_000, "cuda")
    assert found.host_link == 1.37e10


def profile(**values: Any) -> list[dict[str, Any]]:
    points = []
    for form, factor in (("exact", 1.0), ("int4", 0.5)):
        for batch in (1, 2, 4, 8):
            for tokens in (64, 256, 512):
                points += [
                    {"format": form, "phase": "prefill", "batch": batch, "tokens": tokens,
                     "seconds": factor * (1e-3 + 2e-6 * batch * tokens + 1e-9 * batch * tokens**2)},
                    {"format": form, "phase": "decode", "batch": batch, "tokens": tokens,
                     "seconds": factor * (1e-3 + 1e-5 * batch + 1e-8 * batch * tokens)},
                ]  # fmt: skip
    return [point | values for point in points]


def test_a_profile_is_fitted() -> None:
    found = from_json({"devices": [{"name": "a", "memory": 1e9, "profile": profile(), "head_seconds": 0.25}]}, "file")
    latency = found.devices[0].latency
    assert isinstance(latency, Profiled)
    model = decoder("m", 2, 64, 256, 100)
    assert latency.layer(model, 0, None, "prefill", 3, 384) == pytest.approx(1e-3 + 2e-6 * 1152 + 1e-9 * 3 * 384**2)
    assert latency.layer(model, 0, "int4", "decode", 7, 768) == pytest.approx(0.5 * (1e-3 + 7e-5 + 1e-8 * 7 * 768))
    assert latency.layer(model, 0, "int8", "decode", 7, 768) == float("inf")
    assert latency.head(model, 8) == 0.25


A = {"name": "a", "memory": 1e9, "flops": 1e12, "bandwidth": 1e10}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(speed=1), "has unknown fields ['speed']; it takes ['devices', 'links', 'name', 'types']"),
        (changed(devices=[]), "devices is []; it must be a list of at least one device"),
        (changed(devices=[{"name": "a", "flops": 1e12, "bandwidth": 1e10}]), "device a has no memory; give the bytes"),
        (changed(devices=[{"name": "a", "memory": 1e9}]), "device a has no rates; give one of hardware"),
        (changed(devices=[{"type": "huge"}]), "device huge: type is 'huge'; types has fast, slow"),
        (changed(devices=[{}]), "device 1: type is null; give the device a name or a type"),
        (changed(devices=[A | {"vram": 3}]), "device a has unknown fields ['vram']"),
        (changed(devices=[A, A]), "two devices a; give each a name of its own"),
        (changed(devices=[A | {"hardware": "x"}]), "device a has hardware and flops; give one of"),
        (changed(devices=[A | {"head_seconds": 1}]), "head_seconds, which goes with profile, but its rates are flops"),
        (changed(devices=[A | {"memory": -1}]), "device a: memory is -1; it must be at least one byte"),
        (changed(devices=[A | {"memory": "many"}]), "device a: memory is 'many'; it must be a number of bytes"),
        (changed(devices=[A | {"flops": 0}]), "device a: flops is 0; it must be a positive"),
        (changed(devices=[A | {"flops": {"int5": 1}}]), "flops has ['int5']; formats are exact, int8, int4, int3"),
        (changed(devices=[A | {"flops": {}}]), "flops is empty"),
        (changed(devices=[{"name": "a", "memory": 1, "flops": 1e9}]), "has flops, but no bandwidth"),
        (changed(devices=[A | {"host_memory": 1e9}]), "has host_memory, but no host_link"),
        (changed(devices=[A | {"host_link": 1e9}]), "has host_link, but no host_memory"),
        (changed(devices=[A | {"kind": "tpu"}]), "kind is 'tpu'; it must be one of cpu, cuda, sim"),
        (changed(devices=[A | {"count": 0}]), "count is 0; it must be a whole number of at least 1"),
        (changed(devices=[A | {"count": 65}]), "count is 65"),
        (changed(devices=[A | {"count": 60}, A | {"name": "b", "count": 60}]), "has 120 devices; there may be 64"),
        (changed(devices=[A | {"node": 3}]), "node is 3; it must be the name of a machine"),
        (changed(types={"fast": FAST | {"speed": 1}}), "type fast has unknown fields ['speed']"),
        ({"devices": [A, A | {"name": "b"}]}, "has 2 devices, but no links"),
        (changed(links={}), "links has neither within nor between"),
        (changed(links={"within": {}}), "links: within lacks fields ['bandwidth']"),
        (changed(links={"within": LINK | {"speed": 1}}), "links: within has unknown fields ['speed']"),
        (changed(links={"within": LINK, "pairs": [LINK | {"devices": ["z", "y"]}]}), "must be two of fast-1, fast-2"),
        (changed(links={"within": LINK, "pairs": [LINK | {"devices": ["z", "z"]}]}), "z\"]; it must be two of"),
        (changed(links={"within": LINK, "pairs": [LINK | {"devices": ends} for ends in (["z", "fast-1"],
                                                                                       ["fast-1", "z"])]}),
         "pair 2: devices is [\"fast-1\", \"z\"], which an earlier pair has"),
        (changed(links={"within": {"bandwidth": "fast"}}), "links: within: bandwidth is 'fast'; it must be a positive"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": []}]}, "profile is []; it must be a list of measured"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": profile()[:4]}]}, "a prefill profile has 2 points"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": profile(phase="decode")}]}, "no prefill of"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": profile(format="fp8")}]},
         "profile[0]: format is 'fp8'; it must be one of exact, int8, int4, int3"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": profile(batch=0.5)}]},
         "profile[0]: batch is 0.5; it must be a number of at least 1"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": profile(tokens=1e-9)}]},
         "profile[0]: tokens is 1e-09; it must"),
        (changed(devices=[{"name": 5}]), "device 1: name is 5; give the device a name or a type"),
        ({"devices": [{"name": "a", "memory": 1e9, "profile": [{"batch": 1}]}]},
         "profile[0] lacks fields ['format', 'phase', 'seconds', 'tokens']"),
    ],
)  # fmt: skip
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        from_json(values, "cluster file c.json")
    assert str(error.value).startswith("cluster file c.json")
    assert message in str(error.value)


def test_shipped_clusters() -> None:
    counts = {}
    for name in shipped.names("clusters"):
        found = load(shipped.find_file("clusters", name))
        assert found.name == name
        counts[int(name.rpartition("-")[2])] = {kind: len(found.of_type(kind)) for kind in found.types}
    assert counts[3] == {"T4": 3, "V100": 1}
    assert counts[7] == {"V100": 4, "A100-40": 4}
    assert [sum(counts[k].values()) for k in range(1, 12)] == [1, 1, 4, 4, 6, 4, 8, 6, 4, 4, 4]


def test_harm_tables(tmp_path: Path) -> None:
    rows = [{"int8": 0.1, "int4": 1.5}, {"exact": 0, "int8": 0, "int4": 2}]
    path = tmp_path / "harm.json"
    path.write_text(json.dumps({"layers": rows}))
    assert load_harm(path, 2, (None, "int8", "int4")).tolist() == [[0, 0.1, 1.5], [0, 0, 2]]
    path.write_text(json.dumps({"layers": [{"exact": None, "int3": None} | row for row in rows]}))  # null: not known
    assert load_harm(path, 2, (None, "int8", "int4")).tolist() == [[0, 0.1, 1.5], [0, 0, 2]]
    with pytest.raises(InvalidInput, match="has no variance; flexengine quality --harm FILE writes a file"):
        load_harm(path, 2, (None, "int8"), "variance")
    path.write_text(json.dumps({"model": "m", "layers": rows, "variance": [{"int8": 5}, {"int8": 6}]}))
    assert load_harm(path, 2, (None, "int8"), "variance").tolist() == [[0, 5], [0, 6]]
    with pytest.raises(InvalidInput, match="variance, layer 0 has no harm of int4"):
        load_harm(path, 2, (None, "int4"), "variance")
    for layers, formats, message in (
        (3, (None,), "has 2 layers, but the model has 3"), (2, (None, "int3"), "layer 0 has no harm of int3"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            load_harm(path, layers, formats)
    for values, message in (({"rows": []}, r"unknown fields \['rows'\]; it takes \['layers'"),
                            ({}, r"lacks fields \['layers'\]"), ({"layers": 1}, "it must be a list with an object"),
                            ({"layers": [1]}, r"layers\[0\] is 1; it must be an object"),
                            ({"layers": [{"int5": 1}]}, r"layer 0 has unknown fields \['int5'\]; it takes \['exact'"),
                            ({"layers": [{"int8": -1}]}, "positive"),
                            ({"layers": [{"int8": True}]}, "must be a positive number")):  # fmt: skip
        path.write_text(json.dumps(values))
        with pytest.raises(InvalidInput, match=message):
            load_harm(path, 1, (None, "int8"))


def test_assumed_harm() -> None:
    table = assumed_harm(decoder("m", 4, 64, 256, 100), (None, "int8", "int4", "int3"))
    assert table.sum(axis=0) == pytest.approx([0, 1 / 256, 1, 4])
