"""Attention of new tokens over paged KV of every kind, and of prompts, with 1, 4 and 8 query heads per KV head.

python -m bench.kernels.attention [--cases mha gqa gqa8 ...] [--rounds 12] [--out attention.jsonl]

Decode attention is compared with torch's fp32 SDPA, with a plain read of the same bytes, and with the bound: the longer
of the time of that read and the time of the products at the peak that bench.kernels.peak measures in the same run.
Attention of prompts is compared with that peak; products with keys after the query are not counted. Cases "share ..."
are left out unless named: prompts of 512, 1,500 and 6,000 tokens by heads, in fp32 and, compared with the peak of bf16,
in pairs of bf16.

All sides alternate in one process, on threads that share cores with other programs, so the least time of all rounds
counts. Every side of a decode case uses more memory than the CPU caches hold, in the pages of the engine's tiers:
the kernel through pools of shuffled pages, SDPA through contiguous K and V of equal lengths. Prints one JSON line and
one table per case.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench import harness
from bench.harness import Record
from bench.kernels import peak
from bench.kernels.peak import Peak
from flexengine import kernels
from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions, Kernels
from flexengine.tier.memory import aligned_buffer

import torch  # isort: skip  # after flexengine, which sets the threads' wait policy
from torch import Tensor  # isort: skip

BEYOND = 256 << 20  # least bytes that a side reads before it reads the same bytes again
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 0
Run = Callable[[int], object]  # called with the number of the round


@dataclass(frozen=True)
class Case:
    """One layer's cache: `sequences` of up to `tokens` tokens, with one new token each.

    Attributes:
        kinds: formats of KV; those that end in -bit are codes.
    """

    name: str
    kv_heads: int
    sequences: int = 16
    tokens: int = 544
    heads: int = 32
    dim: int = 128
    page_tokens: int = 32
    kinds: tuple[str, ...] = ("fp32", "bf16", "8-bit", "4-bit")

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each sequence, which differ."""
        return [self.tokens - i % 7 for i in range(self.sequences)]

    @property
    def pages(self) -> int:
        """Return the pages of all sequences."""
        return sum(-(-n // self.page_tokens) for n in self.lengths)

    def form(self, kind: str) -> CacheFormat | None:
        """Return the format of the codes; None for floats."""
        bits = kind.removesuffix("-bit")
        return None if kind in FLOATS else CacheFormat(int(bits), self.kv_heads, self.page_tokens, self.dim)

    def token_bytes(self, kind: str) -> int:
        """Return the bytes of K and V of one token in all heads."""
        form = self.form(kind)
        if form is not None:
            return form.page_bytes // self.page_tokens
        return 2 * self.kv_heads * self.dim * FLOATS[kind].itemsize

    def kv_bytes(self, kind: str) -> int:
        """Return the bytes of KV that attention reads."""
        return sum(self.lengths) * self.token_bytes(kind)

    @property
    def operations(self) -> int:
        """Return the products and additions of one call: each query head multiplies every K and every V before it."""
        return 4 * sum(self.lengths) * self.heads * self.dim


@dataclass(frozen=True)
class PromptCase:
    """Prompts of one layer, computed one at a time.

    Attributes:
        tokens: tokens of each prompt.
        rounded: whether products are of pairs of bf16, where the CPU has them.
    """

    name: str
    kv_heads: int
    heads: int = 32
    dim: int = 128
    tokens: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    rounded: bool = False

    def operations(self, tokens: int) -> int:
        """Return the products and additions of a causal prompt: query t attends to t + 1 keys."""
        return 4 * self.heads * self.dim * tokens * (tokens + 1) // 2


CASES = {case.name: case for case in (Case("mha", kv_heads=32), Case("gqa", kv_heads=8), Case("gqa8", kv_heads=4))}
PROMPTS = {case.name: case for case in (
    PromptCase("prompt-mha", kv_heads=32), PromptCase("prompt-gqa", kv_heads=8), PromptCase("prompt-gqa8", kv_heads=4),
)}  # fmt: skip
SHARES = {case.name: case for case in (
    PromptCase(f"share {heads}/{kv_heads} of {dim}{', bf16' if rounded else ''}", kv_heads, heads, dim,
               (512, 1500, 6000), rounded)
    for heads, kv_heads, dim in ((9, 3, 64), (16, 16, 64), (16, 16, 128), (16, 4, 128), (16, 2, 128))
    for rounded in (False, True)
)}  # fmt: skip


def copies(nbytes: int) -> int:
    """Return how many operands of this size a side uses in turn."""
    return max(2, -(-BEYOND // nbytes))


def held(source: Tensor) -> Tensor:
    """Return a copy in the same kind of memory as the tiers use."""
    room = aligned_buffer(source.numel() * source.element_size())
    return room.view(source.dtype).view(source.shape).copy_(source)


def filled(case: Case, kind: str, kernel: Kernels) -> Tensor:
    """Return a pool of random K and V."""
    form, size = case.form(kind), case.page_tokens
    if form is None:
        return torch.randn(case.pages, 2, case.kv_heads, size, case.dim).to(FLOATS[kind])
    pool = torch.zeros(case.pages, form.page_bytes, dtype=torch.uint8)
    place = torch.arange(case.pages * size, dtype=torch.int32)
    k, v = torch.randn(2, len(place), case.kv_heads, case.dim)
    kernel.append(k, v, pool, place // size, place % size, form)
    return pool


def ours(case: Case, kind: str, kernel: Kernels, q: Tensor) -> Run:
    """Return the kernel as a side. Its rounds use one pool after the other, each with its own order of pages."""
    pool, lengths = filled(case, kind, kernel), torch.tensor(case.lengths, dtype=torch.int32)
    count, longest = copies(pool.numel() * pool.element_size()), -(-case.tokens // case.page_tokens)
    tables = []
    for _ in range(count):
        free, table = torch.randperm(case.pages).int(), torch.full((case.sequences, longest), -1, dtype=torch.int32)
        for i, n in enumerate(-(-n // case.page_tokens) for n in case.lengths):
            table[i, :n], free = free[:n], free[n:]
        tables.append(table)
    pools = [held(pool) for _ in range(count)]
    call = functools.partial(
        kernel.decode_attention, q, lengths=lengths, options=AttentionOptions(case.dim**-0.5), form=case.form(kind)
    )
    return lambda i: call(pools[i % count], tables[i % count])


def sdpa(case: Case, q: Tensor) -> Run:
    """Return torch's fp32 SDPA as a side, with every sequence `tokens` long and contiguous."""
    kv = torch.randn(2, case.sequences, case.kv_heads, case.tokens, case.dim)
    pairs = [held(kv) for _ in range(copies(kv.numel() * 4))]
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=case.kv_heads != case.heads)
    return lambda i: attend(q[:, :, None], *pairs[i % len(pairs)])


def reading(nbytes: int, room: Tensor) -> Run:
    """Return a side that adds up the next `nbytes` of `room`, 8 bytes at a time, so that memory is the limit."""
    words, of = nbytes // 8, room.numel() // (nbytes // 8)
    return lambda i: room[i % of * words : (i % of + 1) * words].sum()


def timed(sides: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side. The sides take turns, after one round to warm up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            run(i)
            found[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def results(case: Case, seconds: Mapping[str, list[float]], most: Peak) -> dict[str, Record]:
    """Return figures by kind, from the least times.

    seconds and median are of one call; gb_s counts KV bytes; gflop_s counts products and additions; share is the share
    of the rate of reading as many bytes; bound is the share of the least possible time; tokens_s is millions of cached
    tokens per second.

    Args:
        seconds: seconds by side; besides the kinds there are sides "sdpa" and "read KIND".
    """
    least = {name: min(found) for name, found in seconds.items()}
    full = case.sequences * case.tokens  # tokens to which SDPA attends
    found: dict[str, Record] = {}
    for kind in (*case.kinds, "sdpa"):
        tokens = full if kind == "sdpa" else sum(case.lengths)
        nbytes = tokens * case.token_bytes("fp32" if kind == "sdpa" else kind)
        found[kind] = {
            "seconds": least[kind],
            "median": statistics.median(seconds[kind]),
            "gb_s": nbytes / least[kind] / 1e9,
            "mtokens_s": tokens / least[kind] / 1e6,
        }
        if kind != "sdpa":
            read = least[f"read {kind}"]
            found[kind] |= {
                "gflop_s": case.operations / least[kind] / 1e9,
                "read_gb_s": nbytes / read / 1e9,
                "share": read / least[kind],
                "bound": max(read, case.operations / most.fp32) / least[kind],
                "to_sdpa": tokens / least[kind] / (full / least["sdpa"]),
            }
    return found


def prompt_results(case: PromptCase, seconds: Mapping[int, list[float]], most: Peak) -> dict[str, Record]:
    """Return figures by tokens of a prompt, from the least times. `share` is the share of the peak of fp32 products, or
    of those of bf16."""
    found, peak_rate = {}, most.bf16 if case.rounded else most.fp32
    for tokens, all_seconds in seconds.items():
        rate = case.operations(tokens) / min(all_seconds)
        found[str(tokens)] = {
            "seconds": min(all_seconds), "median": statistics.median(all_seconds), "gflop_s": rate / 1e9,
            "share": rate / peak_rate,
        }  # fmt: skip
    return found


def table(case: Case, found: Mapping[str, Record]) -> str:
    """Return the figures of `results` as a table."""
    title = f"{case.name}: {case.sequences} x {case.tokens} tokens, {case.heads} heads on {case.kv_heads} of {case.dim}"
    lines = [title, f"{'KV':6}{'ms':>8}{'GB/s':>8}{'read':>8}{'share':>8}{'bound':>8}{'M tok/s':>9}{'x sdpa':>8}"]
    for kind, x in found.items():
        more = f"{x['read_gb_s']:8.1f}{x['share']:8.2f}{x['bound']:8.2f}" if "share" in x else " " * 24
        ratio = f"{x['to_sdpa']:8.2f}" if "share" in x else ""
        lines.append(f"{kind:6}{x['seconds'] * 1e3:8.2f}{x['gb_s']:8.1f}{more}{x['mtokens_s']:9.2f}{ratio}".rstrip())
    return "\n".join(lines)


def prompt_table(case: PromptCase, found: Mapping[str, Record]) -> str:
    """Return the figures of `prompt_results` as a table."""
    lines = [f"{case.name}: {case.heads} heads on {case.kv_heads} of {case.dim}{', bf16' if case.rounded else ''}",
             f"{'tokens':8}{'ms':>9}{'GFLOP/s':>9}{'share':>8}"]  # fmt: skip
    lines += [f"{n:8}{x['seconds'] * 1e3:9.2f}{x['gflop_s']:9.1f}{x['share']:8.2f}" for n, x in found.items()]
    return "\n".join(lines)


def run_case(case: Case, rounds: int) -> Record:
    """Return the record of one decode case."""
    torch.manual_seed(SEED)
    kernel, q = kernels.load(), torch.randn(case.sequences, case.heads, case.dim)
    room = held(torch.ones(max(2 * case.kv_bytes(kind) for kind in case.kinds) // 8 + BEYOND // 8, dtype=torch.int64))
    sides: dict[str, Run] = {"sdpa": sdpa(case, q)}
    for kind in case.kinds:
        sides |= {kind: ours(case, kind, kernel, q), f"read {kind}": reading(case.kv_bytes(kind), room)}
    return record(case, kernel, rounds) | {"kinds": results(case, timed(sides, rounds), peak.measure())}


def run_prompt(case: PromptCase, rounds: int) -> Record:
    """Return the record of one case of prompts. Short prompts are computed more often."""
    torch.manual_seed(SEED)
    kernel, longest = kernels.load(), max(case.tokens)
    q = torch.randn(1, longest, case.heads, case.dim)
    k, v = torch.randn(2, 1, longest, case.kv_heads, case.dim)
    seconds = {}
    for n in case.tokens:
        options = AttentionOptions(case.dim**-0.5, rounded=case.rounded)
        call = functools.partial(kernel.attend_prompt, q[:, :n], k[:, :n], v[:, :n], options)
        seconds[n] = timed({"": functools.partial(_ignoring, call)}, max(2, rounds * 256 // n))[""]
    return record(case, kernel, rounds) | {"lengths": prompt_results(case, seconds, peak.measure())}


def _ignoring(call: Callable[[], object], _: int) -> object:
    """Return a side that ignores the number of the round."""
    return call()


def record(case: Case | PromptCase, kernel: Kernels, rounds: int) -> Record:
    """Return the fields that every record starts with."""
    most = peak.measure()
    return {
        **harness.header("attention", case, [{"versions": harness.versions()}]), "kernels": kernel.name,
        "simd": getattr(kernel, "simd", None), "threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds,
        "peak_gflop_s": most.fp32 / 1e9,
    }  # fmt: skip


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *PROMPTS, *SHARES], default=[*CASES, *PROMPTS])
    parser.add_argument("--rounds", type=int, default=12, help="how often the sides take turns (default 12)")
    parser.add_argument("--out", metavar="FILE", help="append records to this file under bench/results/")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name in CASES:
            found = run_case(CASES[name], arguments.rounds)
            text = table(CASES[name], found["kinds"])
        else:
            case = (PROMPTS | SHARES)[name]
            found = run_prompt(case, arguments.rounds)
            text = prompt_table(case, found["lengths"])
        harness.emit(found, arguments.out)
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
