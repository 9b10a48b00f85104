"""One side of bench.helm: a process that runs HELM's command line with one client.

stdin: {"side": "hf" or "flexengine", "model": DIR, "name": NAME, "entries": [ENTRY, ...], "folder": DIR,
"threads": N, "instances": N}
"""

import json
import os
import sys
from typing import Any

from bench import harness


def main() -> None:
    """Run the entries of the job on stdin. HELM writes its files into the job's folder."""
    harness.needs("crfm-helm", "helm")
    job = json.loads(sys.stdin.read())
    os.chdir(job["folder"])
    words = ["--run-entries", *job["entries"], "--suite", "bench", "--max-eval-instances", str(job["instances"]),
             "--num-threads", str(job["threads"]), "--exit-on-error"]  # fmt: skip
    _hf(job, words) if job["side"] == "hf" else _flexengine(job, words)
    print(json.dumps({"peak_rss": harness.peak_rss(), "versions": harness.versions()}), flush=True)


def _hf(job: dict[str, Any], words: list[str]) -> None:
    from helm.benchmark.run import build_parser, helm_run

    more = ["--enable-local-huggingface-models", job["model"], "--models-to-run", f"huggingface/{job['name']}"]
    helm_run(build_parser().parse_args([*words, *more]))


def _flexengine(job: dict[str, Any], words: list[str]) -> None:
    from flexengine.shell.commands.main import main as command

    if code := command(["helm", "run", "--model", job["model"], "--name", job["name"], "--device", "cpu", *words]):
        sys.exit(code)


if __name__ == "__main__":
    main()
