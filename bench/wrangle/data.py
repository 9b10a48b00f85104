"""Fodors-Zagats and DBLP-ACM, from the sdist of py-entitymatching (BSD-3), as tables of `flexengine wrangle`."""

import csv
import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_FOLDER = "py_entitymatching/datasets/end-to-end/"
_PAIRS = {"fodors-zagats": "restaurants/lbl_restnt_wf1.csv", "dblp-acm": "labeled_data_demo.csv"}
_RESTAURANTS = ("restaurants/fodors.csv", "restaurants/zagats.csv")
LABEL = "same"
CITY = ("name", "addr", "phone", "type", "city")  # columns of the table of restaurants
Rows = list[dict[str, str]]


def tables(folder: Path) -> dict[str, Path]:
    """Return the tables by name, written from the sdist in the folder: pairs of fodors-zagats and dblp-acm with labels,
    and restaurants."""
    (archive,) = folder.glob("py[-_]entitymatching-*.tar.gz")
    made = {}
    for name, file in _PAIRS.items():
        made[name] = _write(folder / f"{name}.csv", map(pair, _read(archive, file)))
    rows = ({name: row[name] for name in CITY} for file in _RESTAURANTS for row in _read(archive, file))
    return {**made, "restaurants": _write(folder / "restaurants.csv", rows)}


def pair(row: Mapping[str, str]) -> dict[str, str]:
    """Return a labelled pair with columns left_ and right_, without ids."""
    ends = {"ltable_": "left_", "rtable_": "right_"}
    cells = {new + name.removeprefix(old): value for old, new in ends.items() for name, value in row.items()
             if name.startswith(old) and not name.endswith("_id")}  # fmt: skip
    return {**cells, LABEL: row["gold"] if "gold" in row else row["label"]}


def _read(archive: Path, file: str) -> Rows:
    """Return the rows of a CSV file in the sdist. Comments may stand before its header."""
    with tarfile.open(archive) as tar:
        (member,) = (m for m in tar.getmembers() if m.name.endswith("/" + _FOLDER + file))
        extracted = tar.extractfile(member)
        assert extracted is not None, f"{file} is no plain file"
        text = extracted.read().decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return list(csv.DictReader(io.StringIO("\n".join(lines))))


def _write(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
