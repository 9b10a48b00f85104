"""airllm, which reads every layer from its own file before computing it: reads a Job on stdin, prints one JSON line.

airllm streams models whose layers are named model.layers, and computes on the CPU if there is no GPU. The layers' files
are made in job.scratch before the time is taken.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import Job, needs, report, report_loaded, skip
from bench.peers.transformers_generate import generate_batch


def _with_tokenizer(model: Path, folder: Path) -> Path:
    """Return the model's directory with a tokenizer. airllm opens a tokenizer, but the bench does not use it: if the
    model has none, its files and a tokenizer of a single word are combined in `folder`."""
    if (model / "tokenizer.json").exists():
        return model
    from tokenizers import Tokenizer, models

    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("airllm", "airllm")
    config = json.loads((Path(job.model) / "config.json").read_text())
    if config["model_type"] in ("opt", "gpt2", "bloom", "gpt_neox"):
        skip(f"airllm streams models whose layers are model.layers; those of {config['model_type']} are not")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder, contextlib.redirect_stdout(sys.stderr):
        import torch
        from airllm import AutoModel

        device = "cuda:0" if job.device == "cuda" else "cpu"
        dtype = getattr(torch, job.dtype or "float32")
        model = _with_tokenizer(Path(job.model), Path(folder) / "model")
        engine = AutoModel.from_pretrained(str(model), device=device, dtype=dtype, layer_shards_saving_path=folder)
        engine.model.generation_config.eos_token_id = None
        with contextlib.redirect_stdout(sys.__stdout__):
            report_loaded()
        loaded, tokens = time.perf_counter(), []
        for first in range(0, len(job.requests), job.batch):
            tokens += generate_batch(engine.model, job.requests[first : first + job.batch], 0, device)
        seconds = time.perf_counter() - loaded
    report(tokens, seconds, loaded - start, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
