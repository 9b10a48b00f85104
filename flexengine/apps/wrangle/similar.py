"""Nearest texts by TF-IDF and cosine, with scikit-learn (extra "wrangle")."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flexengine.apps.wrangle.spec import TOKEN
from flexengine.errors import InvalidInput

_MAX_CELLS = 2**22  # similarities in memory at a time


class Neighbour(NamedTuple):
    """A text beside a query.

    Attributes:
        number: index of the text.
        similarity: cosine of the TF-IDF vectors, 0 to 1.
    """

    number: int
    similarity: float


def check_library() -> None:
    """Raise InvalidInput if scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise InvalidInput('similarity needs scikit-learn; pip install "flexengine[wrangle]"') from error


def nearest(queries: Sequence[str], texts: Sequence[str], count: int, kind: str) -> Iterator[list[Neighbour]]:
    """Yield the nearest texts of each query, the most similar first. Equally similar texts keep their order.

    Args:
        count: most texts per query.
        kind: CHARACTER compares sequences of three characters, TOKEN compares words.
    """
    import numpy as np

    mine, other = _vectors(queries, texts, kind)
    step = max(1, _MAX_CELLS // len(texts))
    for first in range(0, len(queries), step):
        similarities = (mine[first : first + step] @ other).toarray().round(9)
        for row in similarities:
            least = np.partition(row, -count)[-count] if count < len(row) else 0.0
            enough = np.flatnonzero(row >= least)
            best = enough[np.argsort(-row[enough], kind="stable")][:count]
            yield [Neighbour(int(i), float(row[i])) for i in best]


def _vectors(queries: Sequence[str], texts: Sequence[str], kind: str) -> tuple[Any, Any]:
    """Return the TF-IDF vectors of the queries, and of the texts, transposed."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    cut = {"token_pattern": r"\w+"} if kind == TOKEN else {"analyzer": "char_wb", "ngram_range": (3, 3)}
    vectorizer = TfidfVectorizer(**cut)
    try:
        vectorizer.fit([*queries, *texts])
    except ValueError as error:  # no text has a word
        raise InvalidInput("no row has a text to compare; give tables with text in their common columns") from error
    return vectorizer.transform(queries), vectorizer.transform(texts).T.tocsc()
