"""Stop strings and bad words that rows share are looked up once, not for each row."""

from types import SimpleNamespace
from typing import Any

from flexengine.config import SamplingParams
from flexengine.engine.generation import Generation
from flexengine.engine.survey import Arranged, PromptReader
from flexengine.job.rows import Request, Row
from flexengine.model.tokenizer import bad_word_ids
from tests.helpers.tokenizers import byte_tokenizer

SHARED = SamplingParams(max_tokens=2, stop=["a", "b"], bad_words=["word", "other"])


class Counted:
    """A tokenizer that notes the texts that it gets, and the names that it looks up."""

    def __init__(self) -> None:
        self.inner, self.texts = byte_tokenizer(), list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.inner(text, **options)

    def convert_tokens_to_ids(self, text: str) -> Any:
        self.texts.append(text)
        return self.inner.convert_tokens_to_ids(text)


def test_rows_are_checked_once_if_they_share_their_parameters() -> None:
    tokenizer = Counted()
    step = SimpleNamespace(step=SimpleNamespace(fault=None))
    skeleton: Any = SimpleNamespace(context_length=99, head=(None, (259, 8)), head_module=step)
    reader = PromptReader(tokenizer, skeleton, True)
    rows = [{"prompt_token_ids": [5], "seed": seed} for seed in range(20)]
    assert all(isinstance(each, Request) for each in reader.requests(rows, SHARED))
    assert len(tokenizer.texts) == 6  # of each bad word two forms
    wrong = [{"prompt_token_ids": [5], "bad_words": [[300]]}] * 2  # each is refused
    found = list(reader.requests([*wrong, rows[0]], SHARED))
    assert [isinstance(each, Row) for each in found] == [True, True, False]


def test_bad_words_are_resolved_once() -> None:
    tokenizer, entered = Counted(), list[Any]()
    sweeps, reports = SimpleNamespace(cohorts=[], add=entered.append), SimpleNamespace(progress=None)
    generation = Generation(SimpleNamespace(sweeps=sweeps), None, tokenizer, set(), reports)  # type: ignore[arg-type]
    words: list[Any] = [*[["word", "other"]] * 20, [], [[7]], ["word"]]
    for index, given in enumerate(words):
        request = Request(index, (5,), SamplingParams(max_tokens=2, seed=index, bad_words=given))
        generation._enter(Arranged(request, [None]))
    assert len(tokenizer.texts) == 6
    plain = [bad_word_ids(SamplingParams(bad_words=given), byte_tokenizer()) for given in words]
    assert [sequence.sampling.bad_words for sequence in entered] == plain
