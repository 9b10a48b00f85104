"""Options of sampling and of chat templates."""

import argparse
from dataclasses import fields

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
from flexengine.shell.commands.options import OptionTable

SAMPLING = {f.name: f.default for f in fields(SamplingParams)}  # names and defaults of the sampling options
LENGTHS = OptionTable(
    """
--max-tokens N  most tokens per prompt (default: %(default)s)
--n N           samples per prompt (default: %(default)s)
""",
    SAMPLING,
)
SAMPLED = OptionTable(
    """
--temperature X         0 is greedy (default: %(default)s)
--seed N                seed of all sampling noise (default: %(default)s)
--top-k K               sample from the K likeliest tokens; 0: from all (default: %(default)s)
--top-p X               sample from the fewest likeliest tokens whose probability reaches X (default: %(default)s)
--min-p X               drop tokens less likely than X times the likeliest (default: %(default)s)
--repetition-penalty X  divide the logits of tokens in prompt and text by X (default: %(default)s)
--presence-penalty X    subtract X from the logits of tokens in the text (default: %(default)s)
--frequency-penalty X   subtract X once for every time a token is in the text (default: %(default)s)
--logprobs K            log probability of each token, and of the K likeliest (default: %(default)s)
--stop TEXT ...         text that ends a row, taken literally; may be repeated
--stop-token-id ID ...  token that ends a row; may be repeated
--ignore-eos            continue after an end-of-sequence token
--min-tokens N          end no row before it has N tokens (default: %(default)s)
--logit-bias JSON       add numbers from -100 to 100 to the logits of tokens, e.g. '{"50256": -100}'
--bad-word TEXT ...     text that is not generated; may be repeated
--no-thinking           set the chat template's variable enable_thinking to false
--chat-template-kwargs JSON  variables of the chat template, e.g. '{"reasoning_effort": "low"}'
--continue-final-message  continue the last message of a chat, instead of beginning an answer
""",
    SAMPLING | {"stop": []},
    {
        "stop_token_id": {"dest": "stop_token_ids", "default": []},
        "bad_word": {"dest": "bad_words", "default": []},
    },
)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters in the arguments. Raise InvalidInput if a value is not allowed."""
    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    if args.no_thinking:
        variables = args.chat_template_kwargs or {}
        if (thinking := variables.get("enable_thinking")) not in (None, False):
            fault = f"--no-thinking contradicts enable_thinking {shown(thinking)} of --chat-template-kwargs"
            raise InvalidInput(f"{fault}; remove one")
        given["chat_template_kwargs"] = {**variables, "enable_thinking": False}
    return SamplingParams(**given)
