"""How engines name tensors: a dialect is declared beside the rules that families have for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """The tensor names of one engine: `name`, as in `Family.dialects`, and what it calls the embedding in any family.

    Without `embeddings`, sizes are checked only by the rules of a family. If it is `padded`, the embedding and `head`
    may have more rows than the model has tokens. If it is `widened`, small tensors are in float32, whatever the model
    has. Only if it is `sharded`, tensors may belong to ranks. `engine` is the one of Megatron's engines that has these
    names, empty for all others.
    """

    name: str
    embeddings: tuple[str, ...] = ()
    widened: bool = False
    padded: bool = False
    head: str = ""
    sharded: bool = True
    engine: str = ""

    @property
    def rules(self) -> str:
        """The engine or dialect whose rules say which tensors there must be. Hub names fit those of any engine."""
        return self.engine or (MEGATRON.name if self == HUB else self.name)

    def __str__(self) -> str:
        return self.name


HUB = Dialect(
    "hf",
    (
        "model.embed_tokens.weight",
        "model.tok_embeddings.weight",
        "model.word_embeddings.weight",
        "embed.weight",
    ),
    sharded=False,
)
"""The names on the Hub."""
MEGATRON = Dialect(
    "mcore", ("embedding.word_embeddings.weight",), padded=True, head="output_layer.weight", engine="mcore"
)
"""The names of Megatron-Core's local layer spec, with the numbers of layers and experts in the complete model."""
