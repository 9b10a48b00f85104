"""The layers of each stage of a pipeline on one machine, divided by predicted seconds."""

import json
from contextlib import closing

from flexengine.activity import activity
from flexengine.engine.options import EngineOptions
from flexengine.engine.rates import RateStore
from flexengine.engine.stages import ProcessGroup
from flexengine.errors import FlexError
from flexengine.plan.chain import ChainSearch, Range
from flexengine.plan.stages import stage_layers
from flexengine.plan.workload import Workload
from flexengine.worker.open_model import Trust, open_model

MIN_SPLIT_GAIN = 0.97  # layers are divided evenly unless the slowest stage then takes at most this share of its seconds
# The rows are not read yet when a stage opens its layers. Layers, embedding and head are compared by these.
PROMPT_TOKENS, NEW_TOKENS, ROWS = 512, 32, 256
WORTH_MEASURING = 20.0  # seconds of this job, from which on the model is measured before its layers are divided


def layers_of(options: EngineOptions, group: ProcessGroup, count: int) -> Range:
    """Return the first layer, and the last layer + 1, of this process's stage. Wait for rank 0, which plans.

    Layers are those of the strategy, if one is given. They are divided evenly if a policy is given, or if stages are on
    several machines or have attention workers.

    Args:
        count: layers of the model.

    Raises:
        InvalidInput: there are fewer layers than stages, or the strategy is for another model.
    """
    even = stage_layers(count, group.rank, group.size, options.strategy)
    if group.local_size < group.size:
        return even
    given = options.strategy or options.policy or options.attention_workers
    planned = json.dumps([] if group.rank or given else planned_layers(options, group.size))
    ranges = json.loads(group.exchange("layers", planned)[0])  # rank 0 decides, though options may differ by process
    return (ranges[group.rank][0], ranges[group.rank][1]) if ranges and not options.strategy else even


def planned_layers(options: EngineOptions, stages: int) -> list[Range]:
    """Return the layers of each stage under which the slowest stage is predicted to be fastest; evenly divided ones, if
    others gain little. Each stage has the memory of this process."""
    trust = Trust(options.trust_remote_code, allow_symlinks=options.allow_symlinks)
    with closing(options.machine()) as machine:
        name = None if options.model is None else str(options.model)
        opened = open_model(name, options.dtype, machine.kind, trust, lossy=options.lossy)
        rates = RateStore(machine, opened, options.hardware)
        context = opened.skeleton.context_length or PROMPT_TOKENS + NEW_TOKENS
        new = min(NEW_TOKENS, max(1, context // 4))
        work = Workload({(max(1, min(PROMPT_TOKENS, context - new)), new): ROWS})
        found = ChainSearch(opened.facts, [rates.known()] * stages, work)
        even = found.even()
        try:
            with activity("planning", "dividing the layers among the stages"):
                plan = found.plan()
            # The other processes wait, so that nothing disturbs the measurement. They read what it stores.
            if plan.seconds >= WORTH_MEASURING and rates.measure_quickly():
                found = ChainSearch(opened.facts, [rates.known()] * stages, work)
                plan = found.plan()
        except FlexError:
            return even  # the job's own plan raises the error, if it meets it
    ranges = [stage.layers for stage in plan.stages]
    gains = max(found.seconds(plan.policy, ranges)) <= MIN_SPLIT_GAIN * max(found.seconds(plan.policy, even))
    return ranges if gains else even
