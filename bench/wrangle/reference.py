"""Answers of transformers to the rows of a job: python -m bench.wrangle.reference MODEL ROWS

Prints a JSON object: `answers`, one [text, log probability] per row; `seconds`, without loading; `versions`. A row is
computed alone, without padding. A scored answer is the likeliest choice; a generated one is greedy, up to a line end.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import harness

Answer = tuple[str, float]


def logprob(model: Any, context: list[int], answer: list[int]) -> float:
    """Return the log probability of the answer's tokens."""
    logits = model(torch.tensor([context + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    chosen = logits.double().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
    return float(chosen.sum())


def scored(model: Any, tokenizer: Any, context: str, choices: list[str]) -> Answer:
    """Return the likeliest choice. Choices of one token each, as Yes and No, need one pass."""
    begin = tokenizer(context).input_ids
    ids = [tokenizer(context + choice).input_ids[len(begin) :] for choice in choices]
    if all(len(one) == 1 for one in ids):
        logprobs = model(torch.tensor([begin]), logits_to_keep=1).logits[0, -1].double().log_softmax(-1)
        found = [float(logprobs[one[0]]) for one in ids]
    else:
        found = [logprob(model, begin, one) for one in ids]
    best = max(range(len(choices)), key=found.__getitem__)
    return choices[best].strip(), found[best]


def generated(model: Any, tokenizer: Any, row: dict[str, Any]) -> Answer:
    """Return the greedy answer, and the log probability of all its tokens."""
    begin, ids, total = tokenizer(row["prompt"]).input_ids, list[int](), 0.0
    out = model(torch.tensor([begin]), use_cache=True)
    while True:
        logprobs = out.logits[0, -1].double().log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        total += float(logprobs[ids[-1]])
        text = tokenizer.decode(ids, skip_special_tokens=True)
        stopped = any(stop in text for stop in row["stop"]) or ids[-1] == tokenizer.eos_token_id
        if stopped or len(ids) == row["max_tokens"]:
            return min((text.partition(stop)[0] for stop in row["stop"]), key=len).strip(), total
        out = model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)


def main() -> None:
    """Answer all rows."""
    folder, rows = sys.argv[1], [json.loads(line) for line in Path(sys.argv[2]).read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, began = [], time.perf_counter()
    with torch.inference_mode():
        for row in rows:
            answers.append(scored(model, tokenizer, row["context"], row["choices"]) if "choices" in row
                           else generated(model, tokenizer, row))  # fmt: skip
    print(json.dumps({"answers": answers, "seconds": time.perf_counter() - began, "versions": harness.versions()}))


if __name__ == "__main__":
    main()
