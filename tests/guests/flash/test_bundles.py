"""Files of bundles: their records are the model's matrices, they are made once, and damage is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.activity import Activity, reporting
from flexengine.codec.records import CODED, PLAIN, RecordForm
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.flash import bundles
from flexengine.guests.flash.bundles import Bundle, made_bundles, prepare_bundles
from flexengine.guests.flash.feed_forward import find
from flexengine.model import encoding
from flexengine.model.verify import Verifier
from flexengine.worker.open_model import OpenModel, open_model
from tests.model.test_encoded_files import FAULTS

pytestmark = pytest.mark.usefixtures("own_cache")
NAMES = {"opt": ("fc1", "fc2"), "llama": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
NEURONS, WIDTH = 112, 64


def opened(known: Any) -> OpenModel:
    return open_model(str(known.directory), None, "cpu")


def prepared(model: OpenModel, kind: str = "", verifier: Verifier | None = None) -> list[Bundle]:
    model.verifier = verifier
    made = prepare_bundles(model, find(model.skeleton), kind)
    return [bundle for bundle in made if bundle is not None]


def matrices_of(known: Any, family: str, layer: int) -> list[torch.Tensor]:
    """First, up if there is one, and the transpose of down, as transformers loads them."""
    weights = known.model.state_dict()
    (name,) = {key.partition("layers.")[0] for key in weights if "layers.0." in key}
    *rows, down = (weights[f"{name}layers.{layer}.{own}.weight"].detach() for own in NAMES[family])
    return [*rows, down.t()]


def records_of(bundle: Bundle) -> torch.Tensor:
    data = torch.frombuffer(bytearray(bundle.path.read_bytes()), dtype=torch.uint8)
    return data.view(bundle.neurons, bundle.form.nbytes)


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", NAMES)
def test_records_are_the_rows_and_columns(
    families: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, pieces: bool
) -> None:
    """Bit by bit, wherever pieces and strips of `down` end: 112 neurons in strips of 30 and pieces of 10."""
    size = dtype.itemsize
    if pieces:
        monkeypatch.setattr(bundles, "PIECE", len(NAMES[family]) * WIDTH * size * 10)
        monkeypatch.setattr(bundles, "STRIP", WIDTH * size * 39)
    known = families(family, dtype)
    made = prepared(opened(known))
    assert len(made) == 4
    for layer, bundle in enumerate(made):
        assert bundle.form == RecordForm(str(dtype).removeprefix("torch."), WIDTH, family == "llama")
        assert (bundle.neurons, bundle.nbytes) == (NEURONS, bundle.path.stat().st_size)
        vectors = [m.to(dtype).contiguous().view(torch.uint8) for m in matrices_of(known, family, layer)]
        used = torch.cat(vectors, 1)
        records = records_of(bundle)
        assert torch.equal(records[:, : used.shape[1]], used)
        assert not records[:, used.shape[1] :].any()


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("family", NAMES)
def test_encoded_records_are_near_the_weights(families: Any, family: str, kind: str) -> None:
    """No number is further off than half a step of its group, at 4 bits a whole one as ranges are cut."""
    known = families(family)
    for layer, bundle in enumerate(prepared(opened(known), kind)):
        records, width = records_of(bundle), 64 if kind == "int8" else 32
        for index, matrix in enumerate(matrices_of(known, family, layer)):
            groups = matrix.unflatten(1, (-1, width))
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2 ** CODED[kind] - 1)
            off = (bundle.form.decode(records, index).view_as(groups) - groups).abs()
            assert bool((off <= step * (0.51 if kind == "int8" else 2.5) + 1e-3).all())
            assert float((off / step).mean()) < 0.3


def test_wider_is_lossless_and_narrower_is_refused(families: Any) -> None:
    known = families("opt", torch.bfloat16)
    for layer, bundle in enumerate(prepared(opened(known), "float32")):
        for index, matrix in enumerate(matrices_of(known, "opt", layer)):
            assert torch.equal(bundle.form.decode(records_of(bundle), index), matrix.float())
    with pytest.raises(InvalidInput, match=r"float16 would round .*fc1.*bfloat16; choose bfloat16, int8, int4"):
        prepared(opened(known), "float16")
    with pytest.raises(InvalidInput, match="records of kind 'int3'; it must be one of"):
        prepared(opened(known), "int3")


def test_layers_without_a_block(families: Any) -> None:
    model = opened(families("llama"))
    blocks = list(find(model.skeleton))
    blocks[1] = None
    made = prepare_bundles(model, blocks)
    assert [bundle is None for bundle in made] == [False, True, False, False]


def test_bundles_are_made_once_and_progress_counts_bytes(families: Any) -> None:
    model, heard = opened(families("llama")), list[Activity]()
    with reporting(heard.append):
        first = prepared(model)
    work = [entry for entry in heard if entry.name == "bundling"]
    total = 4 * 3 * NEURONS * WIDTH * 4
    assert (work[0].state, work[-1].state, work[-1].done, work[-1].total) == ("began", "done", total, total)
    heard.clear()
    with reporting(heard.append):
        assert prepared(model) == first
    assert heard == []
    assert {b.path.parent for b in prepared(model, "int8")} != {first[0].path.parent}


def test_bundles_that_were_made_are_found(families: Any, cache: Path) -> None:
    """Those of this format, if all are complete. Nothing is made."""
    model = opened(families("opt"))
    what = model, find(model.skeleton)
    assert made_bundles(*what) == []
    assert not [path for path in cache.glob("*") if path.suffix != ".sha256"]
    made = prepared(model)
    assert made_bundles(*what) == made
    assert made_bundles(*what, "int4") == []
    made[0].path.parent.rename(made[0].path.parent.with_suffix(".part"))
    assert made_bundles(*what) == []


def test_an_interrupted_run_goes_on(families: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names, real = opened(families("llama")), list[str](), bundles._bundled

    def interrupted(piece: Any) -> Any:
        names.append(piece[0].name)
        if names.count("00000") and piece[0].name == "00002":
            raise KeyboardInterrupt
        return real(piece)

    monkeypatch.setattr(bundles, "_bundled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(model)
    assert sorted(file.name for file in cache.glob("*.part/*.records")) == ["00000.records", "00001.records"]
    names.clear()
    made = prepared(model)
    assert set(names) == {"00002", "00003"}
    assert [bundle.path.name for bundle in made] == [f"0000{j}.records" for j in range(4)]
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize(("kind", "error", "says"), FAULTS)
def test_a_disk_that_fails(
    families: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception], says: str
) -> None:
    monkeypatch.setattr("flexengine.system.read_retries.PAUSES", [])
    known = families("opt")
    model = opened(known)
    folder = known.directory if kind == "read" else own_cache
    number = 6 if kind == "read" else 2  # the first reads are those of the fingerprint
    with Failing([folder], Fault((kind,), number, "EIO" if kind == "read" else "ENOSPC", lasting=True)) as calls:
        with pytest.raises(error, match=says):
            prepared(model)
        assert calls.struck
    assert len(prepared(model)) == 4


def damaged(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_file_of_another_size_is_refused(families: Any, by: int) -> None:
    model = opened(families("opt"))
    bundle = prepared(model)[2]
    size = bundle.nbytes + by
    damaged(bundle.path, lambda data: data.pop() if by < 0 else data.append(0))
    key = bundle.path.parent.name[:8]
    with pytest.raises(BadCheckpoint) as caught:
        prepared(model)
    for word in (str(bundle.path), f"has {size:,} bytes", f"are {bundle.nbytes:,} bytes", f"cache clear {key}"):
        assert word in str(caught.value)
    bundle.path.unlink()
    with pytest.raises(BadCheckpoint, match=r"00002\.records cannot be read: No such file.*cache clear"):
        prepared(model)


def test_a_flipped_bit_is_found_by_the_checksums(families: Any) -> None:
    model = opened(families("opt"))
    bundle = prepared(model)[1]
    prepared(model, verifier=(verifier := Verifier()))
    assert verifier.files >= 4
    damaged(bundle.path, lambda data: data.__setitem__(1000, data[1000] ^ 4))
    assert len(prepared(model)) == 4
    with pytest.raises(BadCheckpoint, match=rf"00001\.records .*remove {bundle.path.parent}"):
        prepared(model, verifier=Verifier())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7e4])
def test_numbers_that_an_encoded_vector_cannot_hold(families: Any, tmp_path: Path, bad: float) -> None:
    """Plain records keep them; the engine says which layer they break."""
    known = families("opt", torch.bfloat16)
    state = known.model.to(torch.bfloat16)
    weight = state.get_parameter("model.decoder.layers.3.fc2.weight")
    before = weight[5, 7].item()
    with torch.no_grad():
        weight[5, 7] = bad
    state.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        weight[5, 7] = before
    model = open_model(str(tmp_path / "model"), None, "cpu")
    found = prepared(model)[3]
    assert found.form.decode(records_of(found), 1)[7, 5].isfinite() == (bad == 7e4)
    with pytest.raises(BadCheckpoint, match=r"layers\.3\.fc2\.weight holds NaN, or values beyond 65,504"):
        prepared(model, "int4")


def test_memory_is_bounded_by_pieces(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the writer is held up, the reader stops after DEPTH + 2 pieces."""
    monkeypatch.setattr(bundles, "PIECE", 3 * WIDTH * 4)  # one neuron of a gated block
    monkeypatch.setattr(encoding, "DEPTH", 3)
    made, written, gaps, real = [0], [0], set[int](), bundles._Layer.pieces

    def pieces(layer: Any) -> Any:
        for piece in real(layer):
            made[0] += 1
            yield piece

    def write(files: Any, part: Any, into: Any = bundles._RecordFiles.write) -> None:
        gaps.add(made[0] - written[0])
        into(files, part)
        written[0] += 1

    monkeypatch.setattr(bundles._Layer, "pieces", pieces)
    monkeypatch.setattr(bundles._RecordFiles, "write", write)
    prepared(opened(families("llama")))
    assert made == written == [4 * NEURONS]
    assert max(gaps) <= 3 + 2


def test_every_plain_kind_has_the_name_of_its_dtype() -> None:
    assert {name: str(dtype) for name, dtype in PLAIN.items()} == {name: f"torch.{name}" for name in PLAIN}
