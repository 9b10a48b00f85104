"""Hostile pickles: refused, and no code of theirs ever runs."""

import io
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.errors import BadCheckpoint
from flexengine.model.pickled import convert_bin
from tests.helpers.hostile import damaged, refused_or_loaded


# --- pickles
class Runs:
    """Writes the canary when it is unpickled."""

    def __init__(self, canary: Path, how: str = "eval") -> None:
        self.how, self.text = how, f"open({str(canary)!r}, 'w').close()"

    def __reduce__(self) -> Any:
        if self.how == "eval":
            return eval, (self.text,)
        if self.how == "exec":
            return exec, (self.text,)
        import os

        return os.system, (f"touch {self.text.split(chr(39))[1]}",)


def tensors_with(payload: Any) -> dict[str, Any]:
    return {"w": torch.ones(2), "payload": payload}


def as_tar(payload: Any, file: Path) -> None:
    """The format of before torch 0.1.10: a tar of pickles."""
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            part = pickle.dumps(payload)
            info = tarfile.TarInfo(name)
            info.size = len(part)
            archive.addfile(info, io.BytesIO(part))


def as_nested_zip(payload: Any, file: Path) -> None:
    inner = io.BytesIO()
    torch.save(tensors_with(payload), inner)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")
        archive.writestr("archive/inner.zip", inner.getvalue())


def as_script(payload: Any, file: Path) -> None:
    """Return an archive that looks like TorchScript, which torch.load passes to another loader."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/constants.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")


FORMS: dict[str, Callable[[Any, Path], None]] = {
    "zip": lambda payload, file: torch.save(tensors_with(payload), file),
    "legacy": lambda payload, file: torch.save(tensors_with(payload), file, _use_new_zipfile_serialization=False),
    "bare pickle": lambda payload, file: file.write_bytes(pickle.dumps(tensors_with(payload))) and None,
    "protocol 0": lambda payload, file: file.write_bytes(pickle.dumps(tensors_with(payload), protocol=0)) and None,
    "protocol 5": lambda payload, file: torch.save(tensors_with(payload), file, pickle_protocol=5),
    "key": lambda payload, file: torch.save({"w": torch.ones(1), "deep": {"er": [(payload,)]}}, file),
    "top": lambda payload, file: torch.save(payload, file),
    "tar": as_tar, "nested zip": as_nested_zip, "script": as_script,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Weights only load")
@pytest.mark.parametrize("how", ["eval", "exec", "system"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt"])
def test_no_pickle_runs(tmp_path: Path, form: str, how: str, name: str) -> None:
    FORMS[form](Runs(tmp_path / "canary", how), tmp_path / name)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadCheckpoint, match=name):
        convert_bin([tmp_path / name], [], tmp_path / "out")
    assert not (tmp_path / "canary").exists()
    assert not list((tmp_path / "out").iterdir())


def test_the_payload_would_run_elsewhere(tmp_path: Path) -> None:
    """The canary works: read without care, the same file writes it."""
    FORMS["zip"](Runs(tmp_path / "canary"), tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(("tensor", "reason"), [
    (torch.zeros(1).expand(10**6, 10**6), "claims 4,000,000,000,000 bytes of a storage of 4"),
    (torch.eye(3).to_sparse(), "sparse"), (torch.empty(3, device="meta"), "meta"),
])  # fmt: skip
def test_tensors_that_are_not_plain(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    torch.save({"w": tensor}, tmp_path / "x.bin")
    with pytest.raises(BadCheckpoint, match=rf"x\.bin is refused.*{reason}"):
        convert_bin([tmp_path / "x.bin"], [], tmp_path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """It could expand to a thousand times its size."""
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(tmp_path / "x.bin", "w") as packed:
        for part in plain.infolist():
            packed.writestr(part.filename, plain.read(part), compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.bin").stat().st_size < 10_000
    with pytest.raises(BadCheckpoint, match=r"x\.bin is refused.*compressed"):
        convert_bin([tmp_path / "x.bin"], [], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_damaged_pickles(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file, rng, refused = tmp_path / "x.bin", random.Random(13), 0
    for legacy in (False, True):
        torch.save({f"t{i}": torch.ones(i) for i in range(6)}, file, _use_new_zipfile_serialization=not legacy)
        good = file.read_bytes()
        for _ in range(100):
            file.write_bytes(damaged(good, rng, len(good)))
            refused += refused_or_loaded(lambda: convert_bin([file], [], tmp_path / "out"))
    assert refused > 20
