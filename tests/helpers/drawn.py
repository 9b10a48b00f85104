"""Models, policies and workloads drawn with a generator."""

import random

from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

SPLITS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5)]


def model_of(rng: random.Random) -> ModelFacts:
    hidden, kv_heads, group = rng.choice([64, 576]), rng.choice([1, 2, 3]), rng.choice([1, 3])
    head_dim, width, vocabulary = rng.choice([32, 64]), 2 * hidden, rng.choice([601, 32000])
    stored, itemsize = rng.choice([2, 4]), rng.choice([2, 4])
    held = rng.choice([itemsize, min(stored, itemsize)])
    sizes = [hidden * hidden, hidden * kv_heads * head_dim, hidden, hidden * width, width * hidden, 7]
    layers = tuple(
        tuple(TensorFact(f"{j}.{i}", n, stored, held) for i, n in enumerate(sizes)) for j in range(rng.randint(1, 6))
    )
    head = TensorFact("head", vocabulary * hidden, stored, held) if rng.random() < 0.5 else None
    embedding = TensorFact("embedding", vocabulary * hidden, stored, held)
    return ModelFacts(layers, (TensorFact("norm", hidden, stored, itemsize),), embedding,
                      head, vocabulary, hidden, width, group * kv_heads, kv_heads, head_dim, itemsize)  # fmt: skip


def policy_of(rng: random.Random) -> Policy:
    return Policy(rng.randint(1, 8), rng.randint(1, 4), rng.choice(SPLITS), rng.choice(SPLITS), rng.choice(SPLITS),
                  rng.randint(1, 3), rng.choice(["row", "zigzag", "diagonal", "continuous"]),
                  rng.choice([16, 128, 2048]))  # fmt: skip


def work_of(rng: random.Random) -> Workload:
    return Workload.of((rng.randint(1, 300), rng.randint(1, 60)) for _ in range(rng.randint(1, 40)))
