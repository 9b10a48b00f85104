"""Seconds of the device lane by sweep: layers, head, attention and bookkeeping."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flexengine.places import DEVICE
from flexengine.plan.paging import Array
from flexengine.plan.profile import Profile
from flexengine.plan.rates import Rates
from flexengine.plan.sizes import SCORED_ROWS
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.batches import form_batches, split_prompt

PAST_SHARE = 2 / 3  # share of a prompt cached before a later piece, averaged over its (query, key) pairs
SAMPLE_PROMPTS = 256  # most prompts of which gpu_batches are formed to estimate the mean


@dataclass(frozen=True)
class PromptBatches:
    """Means of gpu_batches that hold prompts alone.

    Attributes:
        prompt: tokens of a prompt.
        batch: tokens of a gpu_batch.
        token_seconds: seconds of all layers per token.
        token_batches: gpu_batches per token.
        past: tokens cached before a piece that is not a prompt's first.
    """

    prompt: float
    batch: float
    token_seconds: float
    token_batches: float
    past: float

    @staticmethod
    def of(workload: Workload, rates: Rates, policy: Policy, prompt: float) -> "PromptBatches":
        """Return the means over a sample of the workload's prompts. prompt: mean computed tokens of a prompt."""
        rng, max_tokens = np.random.default_rng(0), policy.prefill_tokens
        sizes = sorted(workload.sizes.items())
        counts = np.array([count for _, count in sizes], dtype=float)
        sample = rng.choice(len(sizes), min(SAMPLE_PROMPTS, workload.count), p=counts / counts.sum())
        spared = [int(workload.spared.get(sizes[k][0], 0.0)) for k in sample]
        pieces = [
            p
            for i, (k, shared) in enumerate(zip(sample, spared, strict=True))
            for p in split_prompt(i, shared, sizes[k][0][0] - shared, max_tokens)
        ]
        batches = form_batches(pieces, policy.gpu_batch_size, max_tokens)
        tokens = np.array([sum(p.count for p in batch) for batch in batches], dtype=float)
        total = tokens.sum()
        seconds = float(rates.stack(tokens).sum() / total)
        past = float(np.mean(spared)) or PAST_SHARE * prompt
        return PromptBatches(max(1e-9, prompt), float(tokens.mean()), seconds, len(batches) / total, past)


def parts(
    rates: Rates, policy: Policy, sweeps: Profile, prompts: PromptBatches, split: Mapping[str, float], chunks: int
) -> dict[str, Array]:
    """Return the seconds of the device lane by kind of work and sweep.

    Args:
        split: by place, share of the sequences whose cache is there. A gpu_batch holds sequences of one place.
        chunks: number of head chunks if the head is streamed.
    """
    hardware, g = rates.hardware, policy.gpu_batch_size
    units = len(rates.model.layers) + (chunks if policy.weights[0] < 1 else 1)
    full_layers, full_head = float(rates.stack(g)), float(rates.head(g))
    prompt_head = rates.head(min(g, prompts.batch / prompts.prompt))
    layers = head = cells = np.zeros(sweeps.times.shape)
    for home, share in ((home, share) for home, share in split.items() if share > 0):
        decoding, prompt = sweeps.decoding * share, sweeps.prompt * share
        full = np.floor(decoding / g + 1e-9)
        rest = decoding - g * full
        # If prompts are too few for a gpu_batch of their own, they join the last decoding gpu_batch. Sequences whose
        # attention is delegated share no gpu_batch with prompts.
        joins_decode = (prompt < prompts.batch) & (policy.attends(home) == DEVICE)
        apart = np.where(joins_decode, 0, prompt)  # prompt tokens in gpu_batches of their own
        joined = prompt - apart
        layers = layers + full * full_layers + rates.stack(rest + joined) + apart * prompts.token_seconds
        head = head + full * full_head + rates.head(rest + joined / prompts.prompt)
        head = head + apart * prompts.token_batches * prompt_head
        cells = cells + full + (rest > 0) + apart * prompts.token_batches
    head = head + sweeps.logits * float(rates.head(SCORED_ROWS)) / SCORED_ROWS
    fresh = np.zeros(sweeps.times.shape)
    for window, count in rates.windows.items():
        late, attention = sweeps.late[window], rates.attention[window]
        seconds = attention.prompt(sweeps.pairs[window] - late, min(prompts.prompt, policy.prefill_tokens))
        fresh = fresh + count * (seconds + attention.continued(late, prompts.past))
    return {
        "bookkeeping": hardware.sweep_seconds + hardware.sequence_seconds * sweeps.live,
        "layers": layers, "head": head, "calls": cells * rates.calls, "tasks": cells * units * hardware.task_seconds,
        "prompt attention": fresh, "decode attention": decode_attention(rates, sweeps),
    }  # fmt: skip


def decode_attention(rates: Rates, sweeps: Profile, place: str = "device") -> Array:
    """Return the seconds by sweep of decode attention in all layers. place: place that computes all of it."""
    length = sweeps.cached / np.maximum(sweeps.decoding, 1e-9)
    total = np.zeros(sweeps.times.shape)
    for window, layers in rates.windows.items():
        cached = sweeps.cached if window is None else sweeps.windows[window]
        seen = length if window is None else np.minimum(length, window)
        total = total + layers * rates.attention[window].decode(cached, seen, place)
    return total
