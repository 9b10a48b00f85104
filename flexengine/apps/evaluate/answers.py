"""The kinds of scenarios, and a model's answer to one instance."""

from dataclasses import dataclass

CHOICE, GENERATION, PERPLEXITY = "choice", "generation", "perplexity"
KINDS = (CHOICE, GENERATION, PERPLEXITY)


@dataclass(frozen=True)
class InstanceAnswer:
    """A model's answer, and the right one.

    Attributes:
        choices: the answers among which the model chose; the scored text of a perplexity scenario.
        logprobs: log probability of each of `choices`, in nats, summed over its tokens.
        tokens: tokens of each of `choices`.
        unconditional: log probabilities of `choices` after the unconditional context; empty if no metric needs them.
        gold: number of the right choice, or None.
        text: generated text.
        generated: tokens of the generated text.
        references: right answers of a generation scenario.
        error: why there is no answer; None if there is one.
    """

    choices: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    unconditional: tuple[float, ...] = ()
    gold: int | None = None
    text: str = ""
    generated: int = 0
    references: tuple[str, ...] = ()
    error: str | None = None
