"""bench/wrangle: tables from an sdist, and the comparison of answers."""

import csv
import io
import tarfile
from pathlib import Path

from bench.wrangle.__main__ import CASES, TOLERANCE, compared
from bench.wrangle.data import tables
from flexengine.shell.commands.wrangle import parser

FILES = {
    "restaurants/lbl_restnt_wf1.csv": "#key=_id\n_id,ltable_id,rtable_id,ltable_name,rtable_name,gold\n1,2,3,a,b,0\n",
    "labeled_data_demo.csv": '_id,ltable_id,rtable_id,ltable_title,rtable_title,label\n0,l1,r1,"A, b",a b,1\n',
    "restaurants/fodors.csv": "id,name,addr,city,phone,type\n1,x,s. 1,rome,12,food\n",
    "restaurants/zagats.csv": "id,name,addr,city,phone,type\n1,y,s. 2,bern,34,food\n",
}


def test_tables(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "py_entitymatching-0.tar.gz", "w:gz") as tar:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"py-entitymatching-0/py_entitymatching/datasets/end-to-end/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    made = {name: list(csv.DictReader(path.open())) for name, path in tables(tmp_path).items()}
    assert made["fodors-zagats"] == [{"left_name": "a", "right_name": "b", "same": "0"}]
    assert made["dblp-acm"] == [{"left_title": "A, b", "right_title": "a b", "same": "1"}]
    assert [row["city"] for row in made["restaurants"]] == ["rome", "bern"]
    assert list(made["restaurants"][0]) == ["name", "addr", "phone", "type", "city"]


def test_compared() -> None:
    """Other answers of equal probability are a tie; a failed row is wrong."""
    theirs = [("Yes", -1.0), ("No", -2.0), ("Yes", -1.0), ("Yes", -1.0)]
    ours = [("Yes", -1.25), ("Yes", -2.0 - TOLERANCE / 2), ("No", -1.5), (None, None)]
    assert compared(ours, theirs) == {"questions": 4, "equal": 1, "wrong": 2, "largest_difference": 0.25}


def test_command_lines() -> None:
    for case in CASES:
        args = parser().parse_args(case.words(Path("t.csv"), Path("o.jsonl"), 2, 8)[1:])
        assert (args.task, args.shots, args.restart) == (case.task, 2, True)
