"""The draw of rows that are shown before a prompt."""

from collections.abc import Sequence
from random import Random


def draw(labels: Sequence[str], count: int, seed: int, balanced: bool) -> list[int]:
    """Return the numbers of `count` rows, in the order in which they are shown.

    If balanced, labels take turns, the most frequent first and those of equal count in random order, until each has
    been drawn as often as it occurs. So the numbers of rows of two labels differ by at most one, unless a label has too
    few rows.

    Args:
        labels: label of each row.
        count: at most the number of rows.
        seed: seed of the draw.
    """
    random = Random(seed)
    groups: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        groups.setdefault(label if balanced else "", []).append(number)
    queues = list(groups.values())
    random.shuffle(queues)  # the sort keeps this order among labels of equal count
    queues.sort(key=len, reverse=True)
    for queue in queues:
        random.shuffle(queue)
    turns = max(map(len, queues), default=0)
    in_turns = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
    chosen = in_turns[:count]
    random.shuffle(chosen)
    return chosen
