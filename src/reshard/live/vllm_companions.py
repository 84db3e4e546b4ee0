"""vLLM's config and tokenizer of a checkpoint that does not have them where vLLM looks for them.

`--config-format reshard --tokenizer-mode reshard` uses those that a conversion to a Hugging Face folder would write:
`config.json` may lie in a folder above or below the weights, or be derived from the settings of the training run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.tokenizers.registry import TokenizerRegistry
from vllm.transformers_utils.config import HFConfigParser, register_config_parser

from reshard.api.weights import open as open_weights
from reshard.base.errors import ReshardError
from reshard.folders.companions import find_companions
from reshard.transfer.source_files import Sources


def register(name: str) -> None:
    """Make the config format and the tokenizer mode of this name known to vLLM."""
    register_config_parser(name)(ConfigParser)
    TokenizerRegistry.register(name, __name__, Tokenizer.__name__)
    RENDERER_REGISTRY.register(name, "vllm.renderers.hf", "HfRenderer")  # vLLM finds it by the tokenizer mode


class ConfigParser(HFConfigParser):  # type: ignore[misc]
    """The config that a conversion would write."""

    def parse(self, model: str | Path, *args: Any, **options: Any) -> Any:
        """What vLLM's own parser finds in it. Raises ReshardError if the checkpoint has no config."""
        return super().parse(_written_folder(str(model)).name, *args, **options)


class Tokenizer:
    """The tokenizer that a conversion would write."""

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, *args: Any, **options: Any) -> Any:
        """vLLM's tokenizer from it. Raises ReshardError if there is none: transformers would make up an empty one."""
        folder = _written_folder(str(path_or_repo_id)).name
        if not find_companions(Sources(), folder).has_tokenizer:
            raise ReshardError(
                "engine-tokenizer-missing",
                "tokenizer not found next to the checkpoint",
                file=str(path_or_repo_id),
                expected="tokenizer.json, tokenizer.model or vocab.json",
                remedy="pass the Hugging Face folder that training started from: --tokenizer DIR --tokenizer-mode auto",
            )
        return CachedHfTokenizer.from_pretrained(folder, *args, **options)


@cache
def _written_folder(checkpoint: str) -> TemporaryDirectory[str]:
    """A folder with the files beside the weights, which is deleted when the process ends."""
    folder = TemporaryDirectory(prefix="reshard-")
    open_weights(checkpoint).write_companions(Path(folder.name))
    return folder
