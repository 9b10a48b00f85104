"""FlexGen (flexgen 0.1.8, OPT on one CUDA GPU): reads a Job on stdin, prints one JSON line.

FlexGen takes prompts of one length, blocks of equal batches, and weights as one numpy file per tensor, which are made
in job.scratch. options: gpu_batch_size, num_gpu_batches, percent (six numbers, as FlexGen's --percent: weights, cache,
activations on GPU and CPU). By default the output projections of attention are on the GPU, nearly all other weights in
host RAM: FlexGen places whole tensors, and the next larger share would put half of the MLP on the GPU. Cache and
activations are on the GPU.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Job, needs, report, report_loaded, skip

PERCENT = (20, 80, 100, 0, 100, 0)


def write_weights(model: Path, folder: Path) -> None:
    """Write a numpy file per tensor, under FlexGen's names."""
    import numpy as np
    from safetensors.numpy import load_file

    folder.mkdir(parents=True)
    for path in sorted(model.glob("*.safetensors")):
        for name, value in load_file(path).items():
            name = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
            with (folder / name).open("wb") as file:
                np.save(file, value.astype(np.float16))


def shape(config: dict[str, Any], name: str) -> Any:
    """Return FlexGen's configuration of an OPT decoder."""
    from flexgen.opt_config import OptConfig

    h = config["hidden_size"]
    return OptConfig(
        name=name, max_seq_len=config["max_position_embeddings"], num_hidden_layers=config["num_hidden_layers"],
        n_head=config["num_attention_heads"], hidden_size=h, input_dim=h, ffn_embed_dim=config["ffn_dim"],
        vocab_size=config["vocab_size"],
    )  # fmt: skip


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("flexgen", "flexgen", "cuda")
    config = json.loads((Path(job.model) / "config.json").read_text())
    rows = [list(r.prompt_token_ids) for r in job.requests]
    if config["model_type"] != "opt":
        skip("flexgen knows OPT only")
    if len({len(row) for row in rows}) > 1 or len({r.max_tokens for r in job.requests}) > 1:
        skip("flexgen takes prompts and outputs of one length only")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder, contextlib.redirect_stdout(sys.stderr):
        write_weights(Path(job.model), Path(folder) / "opt-np")
        from flexgen.compression import CompressionConfig
        from flexgen.flex_opt import OptLM, Policy
        from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
        from flexgen.utils import ExecutionEnv

        gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(str(Path(folder) / "offload"))
        env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        none = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
        batch = job.options.get("gpu_batch_size", min(job.batch, len(rows)))
        batches = job.options.get("num_gpu_batches", max(1, len(rows) // batch))
        policy = Policy(batch, batches, *job.options.get("percent", PERCENT), True, True, True, False, 1.0, False, none,
                        False, none)  # fmt: skip
        model = OptLM(shape(config, "opt"), env, folder, policy)
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                report_loaded()
            loaded, tokens, most = time.perf_counter(), [], job.requests[0].max_tokens
            for first in range(0, len(rows), batch * batches):
                block = rows[first : first + batch * batches]
                tokens += model.generate(block, max_new_tokens=most)[:, len(rows[0]) :].tolist()
            seconds = time.perf_counter() - loaded
        finally:
            env.close_copy_threads()
    report(tokens, seconds, loaded - start)


if __name__ == "__main__":
    main()
