"""Facts of a model for the planner: sizes and dtypes of weights, from a skeleton and the headers of a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from flexengine.model.form import WeightFormat
from flexengine.model.loading import Origin
from flexengine.model.skeleton import Skeleton
from flexengine.plan.facts import ModelFacts, TensorFact


def held_dtypes(
    skeleton: Skeleton, stored: dict[str, Origin], dtype: torch.dtype, cpu: bool, encodable: Mapping[str, WeightFormat]
) -> dict[str, torch.dtype]:
    """Return the dtype of each weight on the device.

    On a CPU that computes in fp32, 16-bit matrices keep their stored dtype. If products are computed in bf16, all
    matrices except routers are held in bf16.

    Args:
        skeleton: the model.
        stored: location of each weight.
        dtype: dtype of activations.
        cpu: whether the device is a CPU.
        encodable: has the names of the matrices that can be encoded, which routers cannot; unused unless products are
            computed in bf16.
    """
    keep = skeleton.matrices if cpu and dtype == torch.float32 else set[str]()
    if skeleton.product.compute == "bf16":
        keep &= set(encodable)  # routers keep their dtype: rounding would change the choice of experts
        return {name: torch.bfloat16 if name in keep else dtype for name in stored}
    narrow = (torch.bfloat16, torch.float16)
    return {n: s.dtype if n in keep and s.dtype in narrow else dtype for n, s in stored.items()}


def model_facts(
    skeleton: Skeleton, stored: dict[str, Origin], held: dict[str, torch.dtype], dtype: torch.dtype
) -> ModelFacts:
    """Return the sizes of a model for the planner, from a skeleton and the headers of the checkpoint."""
    by = f" by {skeleton.product.compute}" if skeleton.product.compute else ""

    def facts(shapes: Mapping[str, tuple[int, ...]], shared: Mapping[str, int]) -> tuple[TensorFact, ...]:
        tensor_facts = []
        for name, shape in shapes.items():
            size = stored[name].dtype.itemsize
            elements, experts = stored[name].nbytes // size, shared.get(name, 0)
            fact = TensorFact(name, elements, size, held[name].itemsize, experts, matrix=len(shape) > 1)
            if (form := skeleton.forms.get(name)) is not None:
                fact = replace(fact, encoded=form.nbytes, together=form.packed.step, form=form.packed.name + by)
            elif skeleton.product.compute == "bf16" and fact.matrix and held[name] == torch.bfloat16:
                fact = replace(fact, form="bfloat16" + by)
            tensor_facts.append(fact)
        return tuple(tensor_facts)

    embedding = None if skeleton.enters else facts(dict([skeleton.embedding]), {})[0]
    own = not skeleton.leaves and not (skeleton.tied and embedding)
    head = facts({skeleton.output: skeleton.head[1]}, {})[0] if own else None
    others = {name: param.shape for name, param in skeleton.others.items()}
    others |= {n: skeleton.head[1][:1] for n in [skeleton.head_bias] if n is not None and n in skeleton.wanted}
    layers = [{name: param.shape for name, param in layer.items()} for layer in skeleton.layers]
    text = skeleton.config.get_text_config()
    return ModelFacts(
        tuple(facts(layer, skeleton.experts) for layer in layers),
        facts(others, {}),
        embedding,
        head,
        vocabulary=skeleton.head[1][0],
        hidden=text.hidden_size,
        width=skeleton.width,
        heads=skeleton.heads,
        kv_heads=skeleton.cache.kv_heads,
        head_dim=skeleton.cache.head_dim,
        itemsize=dtype.itemsize,
        kind=skeleton.config.model_type,
        active=skeleton.active,
        windows=tuple(skeleton.windows.get(j) for j in range(len(skeleton.layers))),
        softcap=getattr(text, "attn_logit_softcapping", None),
        leaves=skeleton.leaves,
        queries_apart=skeleton.queries_apart,
    )
