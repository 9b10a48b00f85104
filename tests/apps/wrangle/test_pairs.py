"""Pairs of two tables: similarities against TF-IDF in plain Python, candidates, and joined tables."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from flexengine.apps.tables import FileTable, read_table
from flexengine.apps.wrangle.pairs import common_columns, matching_pairs, nearest, schema_pairs
from flexengine.apps.wrangle.plan import make_plan
from flexengine.apps.wrangle.spec import CHARACTER, MATCH, TOKEN, Spec
from flexengine.errors import InvalidInput
from tests.apps.wrangle.helpers import written
from tests.helpers.inputs import arrow_file

LEFT = "name,city,phone\narts deli,studio city,1\nfenix,hollywood,2\nzzz,qqq,3\n"
RIGHT = "city,name,stars\nw. hollywood,fenix at the argyle,3\nstudio city,art's delicatessen,4\nlos angeles,patina,5\n"


def trigrams(text: str) -> Counter[str]:
    """Sequences of three characters of each word, with a space before and after it; a shorter word is one."""
    words = (f" {word} " for word in text.lower().split())
    return Counter(word[i : i + 3] for word in words for i in range(max(1, len(word) - 2)))


def words_of(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def cosines(queries: list[str], texts: list[str], cut: Callable[[str], Counter[str]]) -> list[list[float]]:
    documents = [cut(text) for text in queries + texts]
    in_documents = Counter(term for document in documents for term in document)
    weight = {term: math.log((1 + len(documents)) / (1 + n)) + 1 for term, n in in_documents.items()}
    vectors = [{term: n * weight[term] for term, n in document.items()} for document in documents]
    norms = [math.hypot(*vector.values()) or 1.0 for vector in vectors]

    def cosine(a: int, b: int) -> float:
        return sum(x * vectors[b].get(t, 0.0) for t, x in vectors[a].items()) / norms[a] / norms[b]

    return [[cosine(i, len(queries) + j) for j in range(len(texts))] for i in range(len(queries))]


@pytest.mark.parametrize(("kind", "cut"), [(CHARACTER, trigrams), (TOKEN, words_of)])
def test_nearest(kind: str, cut: Callable[[str], Counter[str]]) -> None:
    queries = ["Arts deli studio", "fenix at the argyle", "", "a"]
    texts = ["fenix", "art's delicatessen studio city", "the fenix argyle", "fenix", "arts"]
    expected = cosines(queries, texts, cut)
    for count in (1, 3, 5):
        for row, found in zip(expected, nearest(queries, texts, count, kind), strict=True):
            best = sorted(range(len(texts)), key=lambda j: (-round(row[j], 9), j))[:count]
            assert [number for number, _ in found] == best
            assert [similarity for _, similarity in found] == pytest.approx([row[j] for j in best], abs=1e-8)


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        InvalidInput, match=r'similarity needs scikit-learn \(.*\); pip install "flexengine\[wrangle\]"'
    ):
        make_plan(Spec(MATCH, ("left.csv", "right.csv")))


def test_no_text_at_all() -> None:
    with pytest.raises(InvalidInput, match="no row has a text to compare"):
        list(nearest([""], ["", " "], 1, TOKEN))


def two(tmp_path: Path) -> tuple[FileTable, FileTable]:
    return read_table(written(tmp_path, "a.csv", LEFT)), read_table(written(tmp_path, "b.csv", RIGHT))


def test_candidates(tmp_path: Path) -> None:
    """The common columns name and city are compared. A row without a similar one has no candidate."""
    table = matching_pairs(*two(tmp_path), Spec("match", ("a", "b"), top=1))
    assert table.columns == ("left_name", "left_city", "left_phone", "right_city", "right_name", "right_stars",
                             "similarity")  # fmt: skip
    cells = [record.fields for record in table.records]
    assert [(c["left_name"], c["right_name"]) for c in cells] == [
        ("arts deli", "art's delicatessen"),
        ("fenix", "fenix at the argyle"),
    ]
    assert cells[0]["left_phone"] == "1"
    assert cells[0]["right_stars"] == "4"
    left = ["arts deli studio city", "fenix hollywood", "zzz qqq"]
    right = ["fenix at the argyle w. hollywood", "art's delicatessen studio city", "patina los angeles"]
    assert cells[1]["similarity"] == pytest.approx(cosines(left, right, trigrams)[1][0], abs=1e-8)


def test_candidates_by_one_column(tmp_path: Path) -> None:
    table = matching_pairs(*two(tmp_path), Spec("match", ("a", "b"), top=2, show=("city",), similarity=TOKEN))
    assert [(r.fields["left_city"], r.fields["right_city"]) for r in table.records] == [
        ("studio city", "studio city"),
        ("hollywood", "w. hollywood"),
    ]


def test_joined_columns_keep_their_types(tmp_path: Path) -> None:
    left = pa.table({"name": ["fenix", "arts"], "n": pa.array([1, 2], pa.int8())})
    arrow_file(tmp_path / "a.parquet", left)
    right = read_table(written(tmp_path, "b.csv", RIGHT))
    table = matching_pairs(read_table(str(tmp_path / "a.parquet")), right, Spec("match", ("a", "b"), top=1))
    assert table.arrow.schema.field("left_n").type == pa.int8()
    assert table.arrow.select(["left_name", "right_name"]).to_pylist() == [
        {"left_name": "fenix", "right_name": "fenix at the argyle"},
        {"left_name": "arts", "right_name": "art's delicatessen"},
    ]


def test_no_common_column(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="one and two have no common column: the first has a, the second has b;"):
        common_columns(["a"], ["b"], "one and two")
    with pytest.raises(InvalidInput, match="--show 'a' is no common column of one and two; common are b, c"):
        common_columns(["a", "b", "c"], ["c", "b"], "one and two", ["b", "a"])


def test_no_candidate(tmp_path: Path) -> None:
    left = read_table(written(tmp_path, "a.csv", "name\nxyz\n"))
    right = read_table(written(tmp_path, "b.csv", "name\nabc\n"))
    with pytest.raises(InvalidInput, match=r"no row of .*a\.csv is similar to a row of .*b\.csv in the columns name"):
        matching_pairs(left, right, Spec("match", ("a", "b")))


def test_schema_pairs(tmp_path: Path) -> None:
    left = read_table(written(tmp_path, "a.csv", "town,n\nrome,1\nrome,2\nparis,\n"))
    right = read_table(written(tmp_path, "b.csv", "city,count\nrome,7\nbern,8\n"))
    table = schema_pairs(left, right, Spec("schema", ("a", "b"), values=2))
    assert [tuple(r.fields.values()) for r in table.records] == [
        ("town", "rome, paris", "city", "rome, bern"),
        ("town", "rome, paris", "count", "7, 8"),
        ("n", "1, 2", "city", "rome, bern"),
        ("n", "1, 2", "count", "7, 8"),
    ]
    best = schema_pairs(left, right, Spec("schema", ("a", "b"), top=1, similarity=TOKEN))
    assert (best.records[0].fields["right_column"], best.columns[-1]) == ("city", "similarity")
    bare = schema_pairs(left, right, Spec("schema", ("a", "b"), values=0))
    assert bare.columns == ("left_column", "right_column")
