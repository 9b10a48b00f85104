"""A fleet without Ray: members in this process, whose shards end in any order, and some of which are repeated."""

import pickle
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

from flexengine.apps.fleet.job import Description, Failure, FleetMember, Recipe, ShardAnswer
from flexengine.apps.fleet.space import Share

T = TypeVar("T")


class LocalFleet:
    """Members in this process.

    Args:
        actors: number of members.
        repeated: give every second answer twice, as Ray does for an actor that is lost after its answer.
        ends: number of answers after which the fleet is lost; None for all.
    """

    def __init__(self, actors: int = 2, repeated: bool = False, ends: int | None = None) -> None:
        self.actors, self.repeated, self.ends = actors, repeated, ends
        self.shards: list[bytes] = []  # all that were run

    def describe(self, recipe: Recipe, sample: bytes) -> Description | Failure:
        member = FleetMember(sent(recipe))
        try:
            return sent(member.describe(sample))
        finally:
            member.close()

    def answers(self, recipe: Recipe, shards: Iterable[bytes]) -> Iterator[ShardAnswer | Failure]:
        members = [FleetMember(sent(recipe), share=Share(fleet=self.actors)) for _ in range(self.actors)]
        order = list(shards)
        random.Random(len(order)).shuffle(order)
        try:
            for number, shard in enumerate(order):
                if number == self.ends:
                    yield Failure("host, process 1", "memory ran out", running=True)
                    return
                self.shards.append(shard)
                answer = sent(members[number % self.actors].run(shard))
                yield answer
                if self.repeated and number % 2:
                    yield sent(members[0].run(shard))
        finally:
            for member in members:
                member.close()


def sent(value: T) -> T:
    """Return a value as another process gets it."""
    return cast(T, pickle.loads(pickle.dumps(value)))
