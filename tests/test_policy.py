"""Policies, sizes, sampling parameters, assign_tiers(): accepted values, refusals, rounding to whole items."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from flexengine.config import SamplingParams, parse_size
from flexengine.errors import InvalidInput, TooLittle, size_option
from flexengine.plan.hardware import Hardware
from flexengine.policy import Policy
from flexengine.records import read
from flexengine.schedule.place import assign_tiers, place_groups
from flexengine.words import command_words, in_python
from tests.helpers.strategies import RANDOMS


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), (123456, 123456), ("800M", 800_000_000), ("800MB", 800_000_000), ("1.5GB", 1_500_000_000),
     ("16GiB", 16 * 2**30), ("16gib", 16 * 2**30), (" 2 Ki ", 2048), ("0.5k", 500), ("3T", 3 * 10**12),
     ("1TiB", 2**40), ("512B", 512), ("1.5MI", 3 * 2**19)],
)  # fmt: skip
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text, "--device-mem") == size


@pytest.mark.parametrize(
    "text", ["", "M", "-5M", "1.M", "1e9", "10 X", "10GG", "1,000", "GiB16", "1.5.5G", "i", "nan", "infG"]
)
def test_parse_size_refuses(text: Any) -> None:
    with pytest.raises(InvalidInput, match=r"800M, 1\.5GB or 16GiB") as caught:
        parse_size(text, "--host-mem")
    assert f"--host-mem is {text!r}" in str(caught.value)


@pytest.mark.parametrize(("value", "shown"), [(True, "true"), (None, "null")])
def test_parse_size_refuses_other_values(value: Any, shown: str) -> None:
    with pytest.raises(InvalidInput, match=rf"--host-mem is {shown}; it must be a number of bytes"):
        parse_size(value, "--host-mem")


@pytest.mark.parametrize(
    "nbytes", [1, 999, 1001, 12_345, 999_500, 999_999, 2_030_000, 1_234_567_890, 10**12 + 1, 10**16 - 1]
)
def test_a_size_of_a_remedy_can_be_given_and_is_enough(nbytes: int) -> None:
    more, less = size_option(nbytes), size_option(nbytes, up=False)
    assert 0.99 * nbytes - 1 < parse_size(less, "it") <= nbytes <= parse_size(more, "it") < 1.01 * nbytes + 1
    assert len(more) <= len("12.3GB") or nbytes > 10**15
    with command_words():
        assert in_python(f"set --device-mem {more} or more") == f"set --device-mem {more} or more"
    assert in_python(f"set --device-mem {more} or more") == f"set device_mem='{more}' or more"


def test_a_size_that_is_no_value_of_an_option_has_a_space() -> None:
    least = dict.fromkeys(("device", "disk", "disk2"), 1_231_000_000)
    assert str(TooLittle("it", least, least, dict.fromkeys(least, ""))).endswith(
        "; set --device-mem 1.24GB or more and set --offload-dir to a directory with 1.24 GB free"
        " and set --offload-dir (the directory of disk2) to one with 1.24 GB free"
    )


@pytest.mark.parametrize("text", ["0", "0.0G", 0, -7, "99999999T", 10**400, "9" * 5000])
def test_parse_size_refuses_nothing_at_all_and_more_than_any_machine_has(text: str | int) -> None:
    with pytest.raises(InvalidInput, match=r"--device-mem is .*; it must be at least one byte and below 2\*\*60"):
        parse_size(text, "--device-mem")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"temperature": -0.1}, r"temperature is -0.1; it must be 0 \(greedy\) or a positive number"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be 0"),
        ({"temperature": False}, "temperature is False"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"seed": True}, "seed is True"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
    ],
)
def test_sampling_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SamplingParams(**fields)


def test_sampling_accepts() -> None:
    assert SamplingParams(1, 0.7, -3, True) == SamplingParams(max_tokens=1, temperature=0.7, seed=-3, ignore_eos=True)
    assert SamplingParams(temperature=0).temperature == 0


# Policy.


@pytest.mark.parametrize("name", ["gpu_batch_size", "num_gpu_batches", "slots", "prefill_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None, 10**9 + 1])
def test_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Policy(**{name: value})
    allowed = f"a whole number of at least 1 and at most {'1,000' if name == 'slots' else '1,000,000,000'}"
    shown = repr(value)
    assert str(caught.value) == f"policy {name} is {shown}; it must be {allowed}"


@pytest.mark.parametrize("values", [{"slots": 10**5000}, {"weights": (10**5000, 0, 0)}, {"cache": "x" * 5000}])
def test_messages_stay_short(values: dict[str, Any]) -> None:
    """Python refuses to print thousands of digits."""
    with pytest.raises(InvalidInput) as caught:
        Policy(**values)
    assert len(str(caught.value)) < 300


def test_blocks_have_a_most() -> None:
    assert Policy(1000, 1000).block_size == 10**6
    with pytest.raises(InvalidInput, match=r"1000 x num_gpu_batches 1001 is 1,001,000 .* at most 1,000,000"):
        Policy(1000, 1001)


@pytest.mark.parametrize("name", ["weights", "cache", "activations"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 0], r"\[1, 0\]; it must be three fractions \[device, host, disk\]"),
        ("abc", "'abc'; it must be three fractions"),
        (1.0, "1.0; it must be three fractions"),
        ([1, 0, "0"], r"it must be three fractions"),
        ([True, 0, 0], r"it must be three fractions"),
        ([0.5, 0.6, 0], r"fractions must be at least 0 and sum to 1, not 1.1"),
        ([1.5, -0.5, 0], "fractions must be at least 0 and sum to 1"),
        ([100, 0, 0], "sum to 1, not 100"),
    ],
)
def test_splits(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"policy {name} is .*{message}"):
        Policy(**{name: value})


def test_schedule_is_one_of_four() -> None:
    with pytest.raises(InvalidInput, match="schedule is 'zag'; it must be one of row, zigzag, diagonal, continuous"):
        Policy(schedule="zag")


@pytest.mark.parametrize(("value", "shown"), [(1, "1"), (0, "0"), (None, "None"), ("yes", "'yes'"), ([True], "[true]")])
def test_delegate_is_one_of_three(value: Any, shown: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Policy(cache=(0, 1, 0), delegate=value)
    assert str(caught.value) == f"policy delegate is {shown}; it must be one of none, host, all"


def test_delegate_needs_a_cache_off_the_device(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is all with cache \[1.0, 0.0, 0.0\], which has no share on the host or a"):
        Policy(delegate="all")
    with pytest.raises(InvalidInput, match=r"is host with cache .*, which has no share on the host; .* none, host"):
        Policy(cache=(0.5, 0, 0.5), delegate="host")
    made = Policy(cache=(0, 0, 1), activations=(0.5, 0.5, 0), delegate="all")
    assert (made.attends("host"), made.attends("disk2"), made.attends("device")) == ("host", "host", "device")
    by_host = Policy(cache=(0, 0.5, 0.5), delegate="host")
    assert (by_host.attends("host"), by_host.attends("disk"), by_host.attends("device")) == ("host", "device", "device")
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(made.to_json()))
    assert Policy.load(path) == made
    old = {name: value for name, value in Policy().to_json().items() if name != "delegate"}
    path.write_text(json.dumps(old))
    assert Policy.load(path) == Policy()


@pytest.mark.parametrize(("cache", "delegate"), [([0, 0.5, 0.5], "host"), ([0, 1, 0], "host"), ([0.5, 0, 0.5], "all")])
def test_files_with_true_and_false_mean_what_they_meant(tmp_path: Path, cache: list[float], delegate: str) -> None:
    path = tmp_path / "policy.json"
    for old, meant in ((True, delegate), (False, "none")):
        path.write_text(json.dumps({"cache": cache, "delegate": old}))
        assert Policy.load(path).delegate == meant
        assert Policy(cache=cache, delegate=old).to_json()["delegate"] == meant  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 3])
def test_halves_of_layers_have_two_slots(slots: int) -> None:
    assert Policy(half_layers=True).slots == 2
    with pytest.raises(InvalidInput, match=f"half_layers is True with slots {slots}; .* set slots to 2"):
        Policy(half_layers=True, slots=slots)


def test_block_size() -> None:
    assert Policy(3, 5).block_size == 15
    assert Policy(3, 5, schedule="row").block_size == 3


def test_policy_is_a_value() -> None:
    made = Policy(cache=[0, 1, 0])  # type: ignore[arg-type]  # as from JSON
    assert made == Policy(cache=(0.0, 1.0, 0.0))
    assert len({made, Policy(cache=(0, 1, 0))}) == 1
    with pytest.raises(AttributeError):
        made.slots = 3  # type: ignore[misc]


def random_split(rng: random.Random) -> list[float]:
    cuts = sorted(rng.randint(0, 20) for _ in range(2))
    return [cuts[0] / 20, (cuts[1] - cuts[0]) / 20, (20 - cuts[1]) / 20]


@given(rng=RANDOMS)
@settings(max_examples=50)
def test_json_round_trip(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "policy.json"
    fields = {
        "gpu_batch_size": rng.randint(1, 99), "num_gpu_batches": rng.randint(1, 9), "weights": random_split(rng),
        "cache": random_split(rng), "activations": random_split(rng), "slots": rng.randint(1, 4),
        "schedule": rng.choice(["row", "zigzag", "diagonal", "continuous"]), "prefill_tokens": rng.randint(1, 9999),
    }  # fmt: skip
    fields["partition"] = "requests"
    fields["queries_first"], fields["neurons"], fields["order"] = False, 0.0, "fixed"
    fields["delegate"] = rng.choice(["none", "all"] if fields["cache"][0] < 1 else ["none"])  # type: ignore[index]
    fields["half_layers"] = bool(fields["slots"] == 2 and rng.random() < 0.5)
    path.write_text(json.dumps(fields))
    policy = Policy.load(path)
    assert policy == Policy(**fields)  # type: ignore[arg-type]
    assert policy.to_json() == fields
    path.write_text(json.dumps(policy.to_json()))
    assert Policy.load(str(path)) == policy


def test_missing_fields_are_defaults(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"slots": 3}')
    assert Policy.load(path) == Policy(slots=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "policy.json is not JSON: Expecting property name"),
        ("[1]", "policy.json holds an array; it must be an object of fields"),
        ('{"slot": 3, "b": 1}', r"policy.json has unknown fields \['b', 'slot'\]; it takes \['activations', 'cache'"),
        ('{"slots": 0}', "policy slots is 0"),
        ('{"weights": {"gpu": 1}}', "policy weights has a share on 'gpu'; it may have shares on device, host"),
        ('{"weights": {"device": 0.5}}', "must be at least 0 and sum to 1, not 0.5"),
        ('{"weights": {"workers": 1}}', "policy weights has a share on workers, which hold KV cache only; give that"),
        ('{"cache": {"workers": 1}, "activations": [0, 1, 0]}', "hidden states must stay on the device while workers"),
        ('{"weights": null}', "policy weights is null; it must be three fractions"),
        ("\xff", "policy.json is not UTF-8 text: byte 0 is wrong"),
        ('{"slots": ' + "9" * 5000 + "}", "is not JSON: a whole number has over 4,300 digits"),
        ('{"slots": 1000000000}', "policy slots is 1000000000; it must be .* at most 1,000$"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match=message):
        Policy.load(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_bytes(b'\xef\xbb\xbf{"slots": 3}')
    assert Policy.load(tmp_path / "policy.json") == Policy(slots=3)


def test_a_file_without_an_end() -> None:
    with pytest.raises(InvalidInput, match=r"^policy file /dev/zero has more than 10\.0 MB; "):
        Policy.load("/dev/zero")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there is no policy file [^ ]*gone.json; give a path, or a name \(shipped"):
        Policy.load(tmp_path / "gone.json")
    with pytest.raises(InvalidInput, match="no hardware file t4; did you mean t4-16gb_208gb_ssd"):
        Hardware.load("t4")


def test_shipped_names_load_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Policy.load("opt-30b")
    assert loaded == Policy.load("policies/published/opt-30b.json")
    (tmp_path / "opt-30b").mkdir()  # as results of this model, which are no policy
    monkeypatch.chdir(tmp_path)
    assert Policy.load("opt-30b") == loaded
    assert Hardware.load("t4-16gb_208gb_ssd") == Hardware.load("policies/hardware/t4-16gb_208gb_ssd.json")


def test_read() -> None:
    assert read(SamplingParams, {"seed": 4}, "row") == SamplingParams(seed=4)
    known = r"row has unknown fields \['top_q'\]; it takes \['add_generation_prompt'.*; did you mean top_p\?"
    with pytest.raises(InvalidInput, match=known):
        read(SamplingParams, {"top_q": 4}, "row")


def test_shipped_policies_load() -> None:
    paths = list((Path(__file__).parents[1] / "policies" / "published").glob("*.json"))
    assert len(paths) == 6
    for path in paths:
        assert Policy.load(path).to_json() == Policy(**json.loads(path.read_text())).to_json()


# Placement.


@pytest.mark.parametrize(
    ("sizes", "split", "homes"),
    [
        ([1] * 4, (1, 0, 0), ["device"] * 4),
        ([1] * 4, (0, 1, 0), ["host"] * 4),
        ([1] * 4, (0, 0, 1), ["disk"] * 4),
        ([1] * 4, (0.25, 0.25, 0.5), ["disk", "disk", "host", "device"]),
        ([1] * 4, (0.5, 0, 0.5), ["disk", "disk", "device", "device"]),
        ([1], (0.4, 0.3, 0.3), ["host"]),  # one item goes where its middle lies
        ([1], (0.4, 0.0, 0.6), ["disk"]),
        ([8, 1, 1], (0.5, 0, 0.5), ["disk", "device", "device"]),
        ([1, 1, 8], (0.5, 0, 0.5), ["disk", "disk", "device"]),
        ([], (0.5, 0, 0.5), []),
        ([0, 0], (0, 0, 1), ["disk", "disk"]),
        ([10**7, 1], (0, 1 - 5e-7, 0), ["host", "host"]),  # fractions may sum to a little less than 1
    ],
)
def test_place(sizes: list[int], split: tuple[float, float, float], homes: list[str]) -> None:
    assert assign_tiers(sizes, split) == homes


@given(rng=RANDOMS)
@settings(max_examples=200)
def test_place_keeps_within_half_an_item_of_the_split(rng: random.Random) -> None:
    """Cumulative midpoints: at each border at most half the item that straddles it lands on the wrong side."""
    sizes = [rng.randint(1, 50) for _ in range(rng.randint(1, 30))]
    device, host, disk = split = tuple(random_split(rng))
    homes = assign_tiers(sizes, split)  # type: ignore[arg-type]
    assert homes == sorted(homes, key=["disk", "host", "device"].index)
    assert all(dict(device=device, host=host, disk=disk)[home] > 0 for home in homes)
    total = sum(sizes)
    for border, names in ((disk, ("disk",)), (disk + host, ("disk", "host"))):
        got = sum(s for s, home in zip(sizes, homes, strict=True) if home in names)
        assert abs(got - border * total) <= max(sizes) / 2 + 1e-6


@given(rng=RANDOMS)
@settings(max_examples=200)
def test_groups_make_up_for_each_others_rounding(rng: random.Random) -> None:
    """However coarse a group's items are, the whole keeps within one item of the split."""
    groups = [[rng.randint(1, 50) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 40))]
    device, host, disk = split = tuple(random_split(rng))
    homes = place_groups(tuple(map(tuple, groups)), split)  # type: ignore[arg-type]
    assert [len(at) for at in homes] == [len(sizes) for sizes in groups]
    pairs = [pair for sizes, at in zip(groups, homes, strict=True) for pair in zip(sizes, at, strict=True)]
    total, largest = sum(s for s, _ in pairs), max(s for s, _ in pairs)
    for name, share in (("device", device), ("host", host), ("disk", disk)):
        got = sum(s for s, home in pairs if home == name)
        assert abs(got - share * total) <= largest
        assert share or not got


def test_opt_layers_at_27_percent() -> None:
    """Its six matrices are 1/12 and 1/3 of a layer: alone every layer would put a third on the device."""
    homes = place_groups(((1, 1, 1, 1, 4, 4),) * 24, (0.27, 0, 0.73))
    on_device = [sum(s for s, home in zip([1, 1, 1, 1, 4, 4], at, strict=True) if home == "device") for at in homes]
    assert set(on_device) == {0, 4}
    assert abs(sum(on_device) - 0.27 * 12 * 24) <= 2
