"""Walks every causal LM of the installed `transformers` at tiny size and tells which ones the engine runs exactly.

    python -m tests.helpers.architectures [--only NAME ...] [--write docs/models.md] [--json FILE]

For each config class of AutoModelForCausalLM: a tiny config, random weights, saved as a user would have them, loaded
again by `transformers` and generated with greedily (the reference), then the same prompts by the engine, with weights
and KV cache spread over three simulated tiers and with everything in memory. One process per architecture. Models that
keep states beside keys and values get longer prompts, which are cut into pieces.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 - here, and not in every process
import torch
import transformers
from transformers import conversion_mapping

from flexengine import Engine, Policy, SamplingParams, kernels
from flexengine.errors import FlexError
from flexengine.model.forward import pausing_layers
from tests.helpers.layer_words import record_text
from tests.helpers.tiny_models import VOCABULARY, NoReferenceError, make_model, seeds_of, tiny_config

# Ragged prompts, most of them longer than the sliding window, one whose answer begins a page of the cache; new tokens.
LENGTHS, NEW = (5, 17, 1, 33, 30), 4
# Prompts of models with states beside keys and values: some are cut, at multiples of 64 tokens.
STATE_LENGTHS, STATE_PIECE = (70, 17, 1, 129, 150), 128
GAP = 3e-4  # least distance of the two best logits, in standard deviations of all
MOST_TEXT = 250  # characters of a reason
VARIED = 2  # different tokens in an answer, on average, at least
COMMAND = "python -m tests.helpers.architectures --write docs/models.md"
SECONDS, MEMORY, PROCESSES = 90, 16 << 30, 2
VERDICTS = {
    "exact": "every token equals that of `transformers`",
    "refused": "refused with a reason before any weight is read",
    "wrong": "some token differs",
    "crash": "failed otherwise",
    "no reference": "`transformers` itself cannot make, save, load or generate with a tiny one",
}


@dataclass(frozen=True)
class Finding:
    """Result of one architecture. reason: one line without the model's name; empty if the engine is exact."""

    model_type: str
    architecture: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0


def one_line(error: BaseException | str) -> str:
    text = " ".join((error if isinstance(error, str) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ..."


def config_classes() -> dict[str, Any]:
    """Model type to config class, each class once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING.keys()}  # noqa: SIM118 - a lazy mapping


def architecture_of(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def prompts_of(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def continuation(model: Any, prompt: list[int], use_cache: bool = True, new: int = NEW) -> tuple[list[int], float]:
    """Greedy tokens by transformers, end-of-sequence ignored, and the least gap of the two best logits."""
    ids = torch.tensor([prompt])
    for module in model.modules():  # RecurrentGemma's keep states, which a prompt of one token would begin with
        if hasattr(module, "conv1d_state"):
            module.conv1d_state = None
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, output_logits=True)
    options.update(use_cache=use_cache, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    logits = torch.stack([step[0].float() for step in out.logits])
    if not torch.isfinite(logits).all():
        raise NoReferenceError("its logits are not finite")
    best = logits.topk(2).values
    gap = (best[:, 0] - best[:, 1]) / logits.std(1)
    return out.sequences[0, len(prompt) :].tolist(), float(gap.min())


def reload(directory: Path) -> Any:
    """The model that transformers finds in `directory`, told to generate without special treatment of any token."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise NoReferenceError(f"it does not find {len(missing)} tensors in what it saved itself, such as {missing[0]}")
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
        setattr(model.generation_config, name, None)
    return model


def reference(
    config: Any, directory: Path, prompts: list[list[int]], seeds: list[int], model: Any, first: tuple[list[int], float]
) -> tuple[list[list[int]], int]:
    """Return the answers of a model whose reloaded copy answers decisively, and the seed of its weights.

    Args:
        directory: holds the model of the first seed. A model of another seed replaces it.
        seeds: in the order of trial.
        model: the reloaded copy of the first seed.
        first: its continuation of the first prompt.
    """
    why = ""
    for seed in seeds:
        if seed != seeds[0]:
            make_model(config, seed).save_pretrained(directory)
            model = reload(directory)
            first = continuation(model, prompts[0])
        found = [first]
        for prompt in prompts[1:]:  # one that is not decisive is enough to know
            if found[-1][1] >= GAP:
                found.append(continuation(model, prompt))
        answers, gaps = zip(*found, strict=True)
        varied = sum(len(set(answer)) for answer in answers) / len(answers)
        why = f"least gap {min(gaps):.1e}, {varied:.1f} different tokens a prompt"
        print(f"seed {seed}: {why}, first {answers[0]}")
        if min(gaps) >= GAP and varied >= VARIED:
            return list(answers), seed
    raise NoReferenceError(f"its answers are not decisive: {why}")


def engine_answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine:
        results = engine.generate(rows, SamplingParams(max_tokens=NEW, ignore_eos=True))
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(errors[0])
    return [list(result.token_ids) for result in results]


def check_reference(directory: Path, prompt: list[int], expected: list[int], answer: list[int]) -> None:
    """Raise NoReferenceError if transformers gives other tokens when it computes without a KV cache."""
    plain, _ = continuation(reload(directory), prompt, use_cache=False)
    if plain != expected:
        which = "those without" if answer == plain else "neither"
        raise NoReferenceError(f"its answers with and without its own KV cache differ; the engine's are {which}")


def opened(directory: Path, **options: Any) -> Engine:
    return Engine(directory, offload_dir=directory / "offload", **options)


def refusal(directory: Path, error: FlexError) -> str:
    """Return why the engine refuses the model in `directory`."""
    named = rf"^\w*(For|LMHead|Model|Decoder)\w*( \({re.escape(directory.name)}\))?:? "
    return one_line(re.sub(named, "", str(error).replace(f"{directory}/", "")))


def compare(directory: Path, in_memory: Engine, prompts: list[list[int]], expected: list[list[int]]) -> tuple[str, str]:
    """Return verdict and reason of the engine on the model in `directory`, or how its layers compute if it is exact.
    in_memory: opened on a CPU; closed here."""
    skeleton = in_memory.core.skeleton
    piece = STATE_PIECE if skeleton.mixing else Policy().prefill_tokens
    spread = Policy(3, 2, weights=(0.4, 0.3, 0.3), cache=(0.4, 0.3, 0.3), prefill_tokens=piece)
    engines = {"in memory": lambda: in_memory, "spread": lambda: opened(directory, policy=spread, device="sim")}
    for name, engine in engines.items():
        for j, answer in enumerate(engine_answers(engine(), prompts)):
            if answer != expected[j]:
                check_reference(directory, prompts[j], expected[j], answer)
                at = next(i for i, (a, b) in enumerate(zip(answer, expected[j], strict=True)) if a != b)
                return "wrong", f"{name}: prompt of {len(prompts[j])} tokens, new token {at + 1} of {NEW} differs"
    return "exact", layer_words(skeleton)


def layer_words(skeleton: Any) -> str:
    """Return how the layers of a model compute that has run: native kernels by their record, or modules and why."""
    layers = pausing_layers(skeleton.model)
    by_index = {layer.index: record_text(layer.native.record) for layer in layers if layer.native is not None}
    texts = {j: f"modules: {why}" for j, why in skeleton.as_modules.items()}
    counts = Counter(texts.get(layer.index) or f"native: {by_index[layer.index]}" for layer in layers)
    some = len(counts) > 1
    sizes = {"minimax_m3_vl_text": "index_topk_blocks * index_block_size", "doge": "keep_window_size"}
    size = sizes.get(skeleton.config.model_type, "attention_chunk_size")
    chunk = f"; rows of at most {size} tokens" if skeleton.chunk else ""
    return "; ".join(f"{text} ({n} of {len(layers)} layers)" if some else text for text, n in counts.items()) + chunk


def examine(kind: Any, directory: Path) -> tuple[str, str]:
    """Verdict and reason of one config class, in a process of its own; `directory` is its own."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return judged(kind, directory)


@torch.no_grad()
def judged(kind: Any, directory: Path, **given: Any) -> tuple[str, str]:
    """Verdict and reason of one config class, with the fields `given` in its tiny config."""
    verdict = "no reference"
    try:
        config = tiny_config(kind, **given)
        prompts = prompts_of(VOCABULARY)
        seeds = seeds_of(kind.model_type)
        make_model(config, seeds[0]).save_pretrained(directory)
        model = reload(directory)
        first = continuation(model, prompts[0])
        verdict = "crash"
        try:
            engine = opened(directory, device="cpu")
        except FlexError as error:
            return "refused", refusal(directory, error)
        verdict = "no reference"
        if engine.core.skeleton.mixing:
            prompts = prompts_of(VOCABULARY, STATE_LENGTHS)
            first = continuation(model, prompts[0])
        expected, seed = reference(config, directory, prompts, seeds, model, first)
        verdict = "crash"
        if seed != seeds[0]:  # the engine was opened on the weights of the first seed
            engine.close()
            engine = opened(directory, device="cpu")
        return compare(directory, engine, prompts, expected)
    except NoReferenceError as error:
        return "no reference", one_line(str(error))
    except Exception as error:
        traceback.print_exc()
        return verdict, one_line(error)


def _child(kind: Any, directory: Path) -> None:
    """Examine one config class in a process of its own, as it may hang or crash."""
    log = os.open(directory.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    verdict = examine(kind, directory)
    directory.with_suffix(".json").write_text(json.dumps(verdict))
    os._exit(0)  # no waiting for threads of whatever went wrong


@dataclass
class _Running:
    model_type: str
    process: BaseProcess
    began: float


def _finished(running: _Running, directory: Path) -> Finding | None:
    seconds = time.monotonic() - running.began
    if running.process.is_alive() and seconds < SECONDS:
        return None
    code = running.process.exitcode
    running.process.kill()
    running.process.join()
    found = directory.with_suffix(".json")
    if found.exists():
        verdict, reason = json.loads(found.read_text())
    else:
        verdict, reason = "crash", f"ended with code {code}" if code is not None else f"no answer in {SECONDS} s"
    return Finding(running.model_type, architecture_of(running.model_type), verdict, reason, round(seconds, 1))


def _warm(fork: Any) -> None:
    """Do the work common to all processes once, before the first fork."""
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    assert transformers.LlamaForCausalLM.__init__
    compiling = fork.Process(target=kernels.load)
    compiling.start()
    compiling.join()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it shares with its parent


def walk(kinds: dict[str, Any], scratch: Path) -> Iterator[Finding]:
    """Yield findings as they are made, `PROCESSES` architectures at a time. The parent computes nothing, so it can
    fork."""
    fork = multiprocessing.get_context("fork")
    _warm(fork)
    waiting, running = list(kinds), list[_Running]()
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            name = waiting.pop(0)
            (scratch / name).mkdir()
            process = fork.Process(target=_child, args=(kinds[name], scratch / name))
            process.start()
            running.append(_Running(name, process, time.monotonic()))
        time.sleep(0.01)
        for item in list(running):
            if finding := _finished(item, scratch / item.model_type):
                running.remove(item)
                yield finding


def grouped(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Findings by reason, the most frequent reason first."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.reason, []).append(finding)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def rendered(findings: list[Finding]) -> str:
    """docs/models.md: totals, then one table a verdict, with a row an architecture."""
    lines = [
        "# Which models run",
        "",
        f"Made by `{COMMAND}` with transformers {transformers.__version__}; not written by hand.",
        "",
        *" ".join((__doc__ or "").split("\n\n")[2].split()).split("\n"),
        "",
        "Models that run in flash mode, which reads only the neurons that a token uses: [Flash mode](flash.md#models).",
        "",
        "| verdict | architectures | meaning |",
        "|---|---|---|",
    ]
    shown = [v for v in VERDICTS if v not in ("wrong", "crash") or any(f.verdict == v for f in findings)]
    lines += [f"| {v} | {sum(f.verdict == v for f in findings)} | {VERDICTS[v]} |" for v in shown]
    lines += [f"| all | {len(findings)} | |"]
    for verdict in shown:
        column = "layers on a CPU" if verdict == "exact" else "reason"
        lines += ["", f"## {verdict}", "", f"| architecture | model_type | verdict | {column} |", "|---|---|---|---|"]
        for reason, group in grouped(f for f in findings if f.verdict == verdict).items():
            text = reason.replace("|", "\\|")
            lines += [f"| {f.architecture} | {f.model_type} | {f.verdict} | {text} |" for f in group]
    return "\n".join(lines) + "\n"


def documented(text: str) -> tuple[str, dict[str, str]]:
    """The transformers version that a docs/models.md names, and its verdict of each model type."""
    version = re.search(r"with transformers (\S+);", text)
    rows = re.findall(r"^\| \w+ \| ([\w-]+) \| ([\w ]+) \|", text, re.MULTILINE)
    return version[1] if version else "", {name: verdict for name, verdict in rows if verdict in VERDICTS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types; all without it")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table for people, Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the findings, JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="models and logs stay here")
    options = parser.parse_args(arguments)
    kinds = {n: k for n, k in config_classes().items() if not options.only or n in options.only}
    findings = []
    with tempfile.TemporaryDirectory() as temporary:
        for finding in walk(kinds, options.keep or Path(temporary)):
            name, verdict = finding.model_type, finding.verdict
            print(f"{finding.seconds:5.1f} s  {name:24} {verdict:12} {finding.reason}", flush=True)
            findings.append(finding)
    findings.sort(key=lambda finding: finding.model_type)
    counts = {v: sum(f.verdict == v for f in findings) for v in VERDICTS}
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if options.write and not options.only:
        from tests.helpers.form_table import form_rows, with_table
        from tests.helpers.people_table import section, with_section

        people = section(options.write.read_text(encoding="utf-8")) if options.write.exists() else ""
        with tempfile.TemporaryDirectory() as temporary:
            text = with_table(rendered(findings), [*form_rows(Path(temporary))])
        options.write.write_text(with_section(text, people), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in findings], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
