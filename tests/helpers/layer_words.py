"""Records of layers in words, for tables."""

from collections.abc import Iterator

from flexengine.model.native.describe import LayerRecord


def record_text(record: LayerRecord) -> str:
    """Return a record in a few words."""
    return ", ".join(_words(record))


def _words(record: LayerRecord) -> Iterator[str]:
    joined = {"blocks": "joined projections", "heads": "projections joined by head"}
    joined["groups"] = "projections joined by groups of heads"
    halves = "" if record.rotary is None else "rotary halves" if record.rotary.pairing == "halves" else "rotary pairs"
    activation = "block as a module" if record.mlp.module else f"{record.mlp.act} {'gated' if _gated(record) else ''}"
    latent = "latent attention" if record.latents else joined.get(record.q.joined, "")
    yield from filter(None, (latent, halves or ("ALiBi" if record.alibi else ""), activation.strip()))
    yield from (
        text
        for text, is_so in (
            ("block in two modules", record.mlp.beside),
            ("head norms", record.q.norm),
            ("limits", record.v.clip),
            ("gated attention", record.out_gate),
            ("inner norms", record.out_norm or record.mlp.norm),
            ("post norms", any(record.post)),
            ("norms of sums", any(record.closing)),
            ("parallel", record.parallel),
            ("sinks", record.sinks),
            ("factors", record.factors != (1.0, 1.0) or record.v.factor != 1.0),
        )
        if is_so
    )


def _gated(record: LayerRecord) -> bool:
    return bool(record.mlp.gate or record.mlp.joined)
