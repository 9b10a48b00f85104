"""Memory for neurons that are read on demand: their rooms, predictors, and buffers of reads."""

from collections.abc import Iterable, Sequence

from flexengine.errors import InvalidInput
from flexengine.plan.buffers import SHORT_READ
from flexengine.plan.facts import ModelFacts, NeuronFacts
from flexengine.plan.layout import Layout
from flexengine.plan.neurons import RECORD_READERS, rooms
from flexengine.plan.sizes import ALIGN, aligned

NEURONS = "neurons"
PREDICTORS = "predictors"
RECORDS = "records on their way"
STREAMED = 4 << 20  # bytes of records that are read together for tokens that use all neurons; two such buffers
EXPERT_STAGES = 3  # experts that are on their way to a GPU at once
EXPERT_SPARES = 2  # experts that are read early at once without a GPU
RECORD_READ = 128 << 10  # bytes of a read of records; as in flash.reader


def book(layout: Layout, model: ModelFacts, shared: bool) -> None:
    """Book device memory for neurons and their predictors, and RAM for records that are read.

    The workspace has room for masks of the neurons that tokens use.

    Args:
        shared: whether host and device are one memory.

    Raises:
        InvalidInput: the policy has a share of neurons in memory, but none are read on demand.
    """
    if layout.policy.neurons and not any(model.blocks):
        raise InvalidInput(
            f"policy neurons is {layout.policy.neurons}, but no neurons are read on demand; set flash"
            " (--flash), or leave neurons out of the policy"
        )
    place = "device" if shared else "host"
    layout.rooms = rooms(model.blocks, layout.policy.neurons)
    blocks = [block for block in model.blocks if block is not None]
    for block, room in zip(model.blocks, layout.rooms, strict=True):
        if block is None:
            continue
        if not block.experts:
            layout.book("device", NEURONS, aligned(room * block.record))
        layout.book("device", PREDICTORS, aligned(block.predictor))
    for record, rows in expert_rows(model, layout.rooms).items():
        layout.book("device", NEURONS, aligned(rows * record))
    if records := [block.record for block in blocks if not block.experts]:
        readers = aligned(RECORD_READERS * (max(RECORD_READ, *records) + 2 * ALIGN))
        layout.book(place, RECORDS, 2 * STREAMED + readers)
        # A GPU computes, or puts into rows, copies of the records that were read.
        layout.book("device", RECORDS, decoded_bytes(blocks) + STREAMED * model.gpu)
    if experts_read := [block.read_bytes for block in blocks if block.experts]:
        layout.book(place, RECORDS, SHORT_READ + 2 * ALIGN + EXPERT_STAGES * model.gpu * aligned(max(experts_read)))


def decoded_bytes(blocks: Iterable[NeuronFacts]) -> int:
    """Return the bytes of the decoded vectors of one buffer of records."""
    return max((aligned(STREAMED // block.record * block.decoded) for block in blocks), default=0)


def expert_rows(model: ModelFacts, held: Sequence[int]) -> dict[int, int]:
    """Return, by bytes of an expert, the rows of memory for all layers with such experts.

    Without a GPU, experts are read early to spare rows, which belong to no layer; none if all experts fit.

    Args:
        held: by layer, the number of neurons that memory has room for.
    """
    rows, spare = dict[int, int](), 0
    for block, room in zip(model.blocks, held, strict=True):
        if block is not None and block.experts:
            rows[block.record] = rows.get(block.record, 0) + room
            spare = EXPERT_SPARES if room < block.neurons and not model.gpu else spare
    return {record: count + spare for record, count in rows.items()}
