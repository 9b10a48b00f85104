"""Plugin of HELM: the names `flexengine/MODEL` of deployments and tokenizers.

HELM loads it through the entry point group `helm`. MODEL is a directory or a hub id, or `demo` for the demo model. The
engine is imported on first use: this package may be installed beside HELM without what the engine needs.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from helm.benchmark.model_deployment_registry import (
    ClientSpec,
    ModelDeployment,
    model_deployment_generator,
    register_model_deployment,
)
from helm.benchmark.model_metadata_registry import get_unknown_model_metadata, register_model_metadata
from helm.benchmark.tokenizer_config_registry import (
    TokenizerConfig,
    TokenizerSpec,
    register_tokenizer_config,
    tokenizer_config_generator,
)

PREFIX, DEMO = "flexengine", "demo"
CLIENT = "flexengine.apps.helm.client.FlexClient"
_TOKENIZER = "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"


def register(name: str, args: Mapping[str, Any]) -> None:
    """Register a deployment, its model and its tokenizer under one name, PREFIX/NAME. Raise FlexError if the model
    cannot be opened."""
    register_model_metadata(get_unknown_model_metadata(name))
    register_model_deployment(_deployment(name, args))
    register_tokenizer_config(_tokenizer(name, args))


@model_deployment_generator(PREFIX)  # type: ignore[untyped-decorator]
def deployment(name: str) -> ModelDeployment:
    """Return the deployment PREFIX/MODEL."""
    return _deployment(name, _args(name))


@tokenizer_config_generator(PREFIX)  # type: ignore[untyped-decorator]
@cache
def tokenizer_config(name: str) -> TokenizerConfig:
    """Return the tokenizer of the deployment PREFIX/MODEL."""
    return _tokenizer(name, _args(name))


def _args(name: str) -> dict[str, Any]:
    model = name.removeprefix(f"{PREFIX}/")
    return {} if model == DEMO else {"model": model}


def _deployment(name: str, args: Mapping[str, Any]) -> ModelDeployment:
    """Return a deployment. HELM cuts prompts so that they fit into the model's context with the tokens that are added
    to them."""
    from flexengine.apps.helm.exchange import encoding_of, engine_of

    skeleton, tokenizer = engine_of(args).core.skeleton, engine_of(args).tokenizer
    context = skeleton.context_length or tokenizer.model_max_length
    return ModelDeployment(
        name, ClientSpec(CLIENT, dict(args)), name, name, max_sequence_length=context - encoding_of(args).added_tokens()
    )


def _tokenizer(name: str, args: Mapping[str, Any]) -> TokenizerConfig:
    from flexengine.apps.helm.exchange import engine_of

    engine = engine_of(args)
    spec = TokenizerSpec(_TOKENIZER, {"pretrained_model_name_or_path": str(engine.core.source.directory)})
    tokenizer = engine.tokenizer
    return TokenizerConfig(name, spec, tokenizer.eos_token or "", tokenizer.bos_token or "")
