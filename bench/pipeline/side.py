"""One side of a case: a process with a pipeline of N stages, or with one stage.

python -m bench.pipeline.side JOB.json, with the fields of `run`'s job: model, stages, policy, memory, links, rows,
tokens. Prints one JSON object.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.guests.stages.group import PipelineGroup
from flexengine.guests.stages.planner import PipelinePlanner, opened_again
from flexengine.guests.stages.server import StageServer
from flexengine.guests.wire.processes import local_stages, ranks
from flexengine.plan.chain import ChainSearch
from flexengine.plan.stages import Strategy


def engine_of(job: dict[str, Any], group: PipelineGroup | None) -> Engine:
    return Engine(job["model"], device="sim", device_mem=job["memory"], host_mem=job["host"],
                  links=Links(**job["links"]), policy=Policy(**job["policy"]) if "policy" in job else None,
                  strategy=Strategy(**job["strategy"]) if "strategy" in job else None, group=group,
                  progress=False)  # fmt: skip


def drive(job: dict[str, Any], group: PipelineGroup | None) -> dict[str, Any]:
    """Generate, and return seconds and tokens."""
    prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
    with engine_of(job, group) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
        summary, driver, planner = engine.summary, engine.core.driver, engine.planner
        first_stage, watch = engine.core.skeleton.layer_range, engine.watch
        predicted, whole = [], None
        if isinstance(planner, PipelinePlanner) and watch is not None:
            own = planner.cost(watch.cost.workload).predict(watch.layout)
            predicted = [own.total_seconds, *(plan.seconds for plan in planner.others)]
            machines = [planner.rates.known()] * len(predicted)
            search = ChainSearch(opened_again(engine.core, None).facts, machines, watch.cost.workload)
            ranges = [first_stage, *(plan.layers[:2] for plan in planner.others)]
            whole = search.made(watch.layout.policy, ranges).seconds
    first = len(results)  # the first token of each row is computed with its prompt
    return {
        "tokens": [result.token_ids for result in results], "prefill_seconds": summary.prefill_seconds,
        "decode_seconds": summary.decode_seconds, "sweeps": summary.sweeps,
        "decode_tok_s": (summary.generated_tokens - first) / summary.decode_seconds,
        "layers": [first_stage, *(each["layers"][:2] for each in driver.measured.values())] if driver else [],
        "predicted_seconds": predicted, "predicted_job_seconds": whole,
        "policy": summary.policy.to_json() if summary.policy else None,
        "peak_bytes": dict(summary.peak_bytes), "stages": driver.measured if driver else {},
    }  # fmt: skip


def main() -> None:
    path = sys.argv[1]
    job = json.loads(Path(path).read_text())
    if ranks()[0] > 0:
        group = PipelineGroup()
        with engine_of(job, group) as engine:
            StageServer(engine, group).run()
        group.close()
    elif job["stages"] == 1:
        print(json.dumps(drive(job, None)))
    else:
        with local_stages(job["stages"], ["-m", "bench.pipeline.side", path]):
            group = PipelineGroup()
            made = drive(job, group)
            group.close()
        print(json.dumps(made))


if __name__ == "__main__":
    main()
