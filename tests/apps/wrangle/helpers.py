"""Small tables, and a job whose answers a function gives."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PAIRS = """\
id,left_name,left_city,right_name,right_city,same
1,arts deli,studio city,art's delicatessen,studio city,yes
2,campanile,los angeles,patina,los angeles,No
3,fenix,hollywood,fenix at the argyle,w. hollywood,1
4,arts deli,studio city,campanile,los angeles,false
5,spago,hollywood,,bel air,
"""
CITIES = """\
name,phone,city
arts deli,818-762,studio city
campanile,213-938,los angeles
patina,213-467,los angeles
spago,310-652,
citrus,213-857,
"""


def written(folder: Path, name: str, text: str) -> str:
    """Write a file, and return its name."""
    (folder / name).write_text(text)
    return str(folder / name)


def answer_rows(rows: Path, results: Path, answer: Callable[[Mapping[str, Any]], Any]) -> None:
    """Write the results of a job.

    Args:
        answer: return, for a row, one log probability per choice, or the generated text, or an error in a list.
    """
    with results.open("w") as file:
        for line in rows.read_text().splitlines():
            row, given = json.loads(line), answer(json.loads(line))
            if isinstance(given, list) and isinstance(given[0], str):
                made: dict[str, Any] = {"error": given[0]}
            elif isinstance(given, str):
                logprobs = [{"logprob": -0.5}, {"logprob": -0.25}]
                made = {"generated_text": given, "finish_reason": "stop", "logprobs": logprobs, "error": None}
            else:
                made = {"scores": [{"logprob": x, "tokens": 1, "is_greedy": False} for x in given], "error": None}
            file.write(json.dumps(row | made) + "\n")
    (results.parent / (results.name + ".journal")).write_text("")
