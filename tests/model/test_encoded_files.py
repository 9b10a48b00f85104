"""Encoded weights of a whole model and of ranges of its layers: bytes, what is made, and what is made again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.activity import Activity, reporting
from flexengine.codec.packed import CODECS, Packed
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.lossy import Lossy
from flexengine.model import encoding
from flexengine.model.checkpoint import Origin
from flexengine.worker.open_model import OpenModel, open_model

INT4 = Lossy(weights="int4")
PER_LAYER = 7  # matrices of a layer of the tiny LLaMA
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters that are encoded, by pieces, in order."""
    names, real = list[str](), encoding._encoded

    def noting(piece: Any, *args: Any) -> Any:
        names.append(piece.name)
        return real(piece, *args)

    monkeypatch.setattr(encoding, "_encoded", noting)
    return names


def opened(known: Any, layers: tuple[int, int] | None = None, lossy: Lossy = INT4) -> OpenModel:
    return open_model(str(known.directory), None, "cpu", lossy=lossy, layers=layers)


def layers_of(names: list[str]) -> set[int | None]:
    return {int(name.split(".")[2]) if ".layers." in name else None for name in names}


def stored_bytes(model: OpenModel, name: str) -> bytes:
    (run,) = model.prepare_weights()[name].runs
    with run.path.open("rb") as file:
        file.seek(run.start)
        return file.read(run.nbytes)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("chunk", [encoding.CHUNK, 2048])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-oss", "mixtral"])  # plain, transposed, both and experts
def test_bytes(families: Any, monkeypatch: pytest.MonkeyPatch, family: str, chunk: int) -> None:
    """Each parameter is the concatenation of its matrices, each encoded as a whole."""
    monkeypatch.setattr(encoding, "CHUNK", chunk)
    monkeypatch.setattr(encoding, "DEPTH", 2)
    known = families(family)
    model, weights = opened(known), dict(known.model.named_parameters())
    for name, form in model.forms.items():
        codec = CODECS["int4"] if ".layers." in name or ".h." in name else CODECS["int8"]
        matrices = weights[name].detach().view(max(1, form.count), *weights[name].shape[-2:])
        expected = [m.T if form.transposed else m for m in matrices]
        data = torch.cat([Packed(codec, *m.shape).encode(m.contiguous()) for m in expected])
        assert stored_bytes(model, name) == data.numpy().tobytes()
    found = list[int]()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert (torch.get_num_threads(), found) == (3, [3])


@pytest.mark.parametrize(
    ("ends", "edges"), [((0, 2), {"model.embed_tokens.weight"}), ((1, 3), set()), ((2, 4), {"lm_head.weight"})]
)
def test_a_range_makes_its_own_layers(families: Any, made: list[str], ends: tuple[int, int], edges: set[str]) -> None:
    known = families("llama")
    origins = opened(known, ends).prepare_weights()
    files = {run.path for name in set(made) for run in origins[name].runs}
    assert layers_of(made) - {None} == set(range(*ends))
    assert {name for name in made if ".layers." not in name} == edges
    assert len(set(made)) == len(files) == PER_LAYER * (ends[1] - ends[0]) + len(edges)
    assert {path.parent for path in files} == {next(iter(files)).parent}
    assert set(next(iter(files)).parent.glob("*.safetensors")) == files


def test_ranges_share_layers_that_they_have_in_common(families: Any, made: list[str]) -> None:
    """Stages that were divided otherwise before, and the whole model, encode what no range has."""
    known = families("llama")
    of_stage = opened(known, (0, 2)).prepare_weights()
    made.clear()
    assert opened(known, (1, 4)).prepare_weights()
    assert layers_of(made) - {None} == {2, 3}
    made.clear()
    whole = opened(known).prepare_weights()
    assert made == []
    for name, origin in of_stage.items():
        assert whole[name].runs[0].path.stat().st_ino == origin.runs[0].path.stat().st_ino


def test_a_restarted_stage_makes_what_is_missing(
    families: Any, made: list[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    known, noting = families("llama"), encoding._encoded

    def interrupted(piece: Any, *args: Any) -> Any:
        if len(set(made)) == PER_LAYER and piece.name != made[-1]:
            raise KeyboardInterrupt
        return noting(piece, *args)

    monkeypatch.setattr(encoding, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assert opened(known, (1, 3)).prepare_weights()
    first = set(made)
    assert len(first) == PER_LAYER == len(list((own_cache / "prepared").glob("*.part/*.safetensors")))
    made.clear()
    monkeypatch.setattr(encoding, "_encoded", noting)
    stage = opened(known, (1, 3))
    assert stage.prepare_weights()
    assert (first & set(made), len(set(made))) == (set(), PER_LAYER)
    made.clear()
    assert opened(known, (1, 3)).prepare_weights() == stage.prepare_weights()
    assert made == []


def test_progress_counts_the_bytes_that_are_encoded(families: Any) -> None:
    known, heard = families("llama"), list[Activity]()
    with reporting(heard.append):
        model = opened(known)
        assert model.prepare_weights()
    total = sum(model.locations[name].nbytes for name in model.forms)
    work = [entry for entry in heard if entry.name == "encoding"]
    assert [entry.state for entry in work if entry.state != "running"] == ["began", "done"]
    assert {entry.total for entry in work} == {total}
    assert work[-1].done == total


FAULTS: list[tuple[str, type[Exception], str]] = [
    ("read", BadCheckpoint, "cannot be read: .*reading byte"), ("write", InvalidInput, "cannot be written: .*writing"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "error", "says"), FAULTS)
def test_a_disk_that_fails(
    families: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception], says: str
) -> None:
    """Both threads end, and the next run goes on."""
    monkeypatch.setattr("flexengine.system.read_retries.PAUSES", ())
    known, threads = families("llama"), set(threading.enumerate())
    model, real = opened(known), encoding.in_threads

    def failing(*args: Any) -> None:
        folder = known.directory if kind == "read" else own_cache
        with Failing([folder], Fault((kind,), 20, lasting=True)) as calls:
            real(*args)
        assert calls.struck

    monkeypatch.setattr(encoding, "in_threads", failing)
    with pytest.raises(error, match=says):
        assert model.prepare_weights()
    assert set(threading.enumerate()) <= threads
    done = len(list((own_cache / "prepared").glob("*.part/*.safetensors")))
    assert 0 < done < len(model.forms)
    monkeypatch.setattr(encoding, "in_threads", real)
    assert model.prepare_weights()


def test_a_file_that_ends_early(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    model = opened(known)
    name = next(iter(model.forms))
    (run,) = model.locations[name].runs
    (short := tmp_path / "short").write_bytes(run.path.read_bytes()[: run.start + run.nbytes - 1])
    model.locations[name] = Origin((run._replace(path=short),), torch.float32, model.locations[name].shape)
    with pytest.raises(BadCheckpoint, match=rf"short ends before byte {run.start + run.nbytes}"):
        assert model.prepare_weights()


def test_memory_is_bounded_by_pieces(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the writer is held up, the reader stops after DEPTH + 2 pieces."""
    from flexengine.model.shards import TensorFiles

    monkeypatch.setattr(encoding, "CHUNK", 1)  # pieces of 16 rows
    monkeypatch.setattr(encoding, "DEPTH", 3)
    counts, real = {"read": 0, "encoded": 0, "written": 0}, encoding._encoded
    read, write, gaps = encoding.read_part, TensorFiles.write, set[int]()

    def counting(step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if step == "written":
                gaps.add(counts["read"] - counts["written"])
            done = work(*args)
            counts[step] += 1
            return done

        return call

    monkeypatch.setattr(encoding, "read_part", counting("read", read))
    monkeypatch.setattr(encoding, "_encoded", counting("encoded", real))
    monkeypatch.setattr(TensorFiles, "write", counting("written", write))
    assert opened(families("llama")).prepare_weights()
    assert counts["read"] == counts["encoded"] == counts["written"] > 100
    assert max(gaps) <= 3 + 2
