"""Tokens per second of a run, and those of a batch that is padded, as FlexGen's tables of data wrangling give both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COUNTS = ("rows", "useful_tokens", "padded_tokens")  # of `Throughput.to_json`


@dataclass(frozen=True)
class Throughput:
    """Tokens of a run.

    Attributes:
        rows: rows without error.
        useful: tokens of all inputs, each counted once, and of all outputs.
        padded: tokens of all sequences if each is as long as the longest input and the longest output of its scenario;
            each choice of a row is a sequence of its own.
    """

    rows: int
    useful: int
    padded: int

    def to_json(self, seconds: float | None) -> dict[str, Any]:
        """Return the tokens, and their rates.

        Args:
            seconds: seconds of the whole run, loading included; None if unknown.
        """
        rates = {name: getattr(self, name) / seconds if seconds else None for name in ("useful", "padded")}
        return {"rows": self.rows, "useful_tokens": self.useful, "padded_tokens": self.padded, "seconds": seconds,
                "useful_tok_s": rates["useful"], "padded_tok_s": rates["padded"]}  # fmt: skip


def throughput(results: Sequence[Mapping[str, Any]]) -> Throughput:
    """Return the tokens of a job's results. Texts that are scored whole have no input."""
    groups: dict[tuple[str, bool], list[tuple[int, list[int]]]] = {}
    rows = [row for row in results if row["error"] is None]
    for row in rows:
        alone = "variant" not in row  # choices after the unconditional context are a batch of their own
        groups.setdefault((row["scenario"], alone), []).append(_sizes(row))
    sizes = [size for group in groups.values() for size in group]
    return Throughput(len(rows), sum(first + sum(rest) for first, rest in sizes), sum(map(_padded, groups.values())))


def _sizes(row: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the tokens of the input and of each output."""
    if "scores" not in row:
        return row["prompt_tokens"], [row["completion_tokens"]]
    outputs = [score["tokens"] for score in row["scores"]]
    return (0 if "text" in row else row["prompt_tokens"]), outputs


def _padded(group: Sequence[tuple[int, list[int]]]) -> int:
    longest = max(first for first, _ in group) + max(max(outputs) for _, outputs in group)
    return longest * sum(len(outputs) for _, outputs in group)
