"""Tensor names in state dicts: the path of the model in a nested one, and prefixes that wrappers add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.base.errors import UNUSABLE, Problem, ReshardError, listed
from reshard.base.plain_json import json_of, to_json
from reshard.formats.unique_names import under_new_names

T = TypeVar("T")

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile, FSDP and activation checkpointing add to names if `state_dict()` is called on them.
Such names cannot be loaded: transformers would initialize those modules at random.
"""

ANCHORS = (
    *("thinker.model.language_model.embed_tokens.weight", "thinker.model.embed_tokens.weight"),
    *("language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    *("model.embed_tokens.weight", "model.tok_embeddings.weight", "transformer.wte.weight"),
    *("base_model.model.", "tok_embeddings.weight"),
)
"""The beginning of a name in the model's own state dict: embeddings, and PEFT's wrapper."""


WEIGHT_PATHS = ("state_dict", "model_state_dict", "model", "module", "state.model")
"""Paths of the weights in what training loops save: Lightning, DeepSpeed, many scripts, and Composer."""

COMPOSER_CONFIG_PATH = ("state", "integrations", "huggingface", "model", "config", "content")
"""The path of config.json in a file of Composer, whose HuggingFaceModel puts it there."""

NO_WEIGHTS = re.compile(r"(?i)optim|sched|rng|random_state")
"""Keys, and names of files, whose tensors are not weights."""

MAX_DEPTH = 4
"""Levels of dicts in which weights are searched for."""

ROPE_BUFFER = "rotary_emb.inv_freq"
"""Frequencies that older versions of transformers saved with the weights. They follow from the config."""


def without_buffers(tensors: dict[str, Tensor]) -> int:
    """Remove rotary buffers named as in transformers from the tensors of a model; returns their bytes."""
    return sum(tensors.pop(name).nbytes for name in list(tensors) if name.endswith(ROPE_BUFFER))


def state_dict_in(content: dict[Any, Any], file: str) -> dict[str, StoredTensor]:
    """The tensors of the model in what a training loop saved; none if there are no tensors at all.

    They are at the top, below one of `WEIGHT_PATHS`, or in the only other dict with tensors. The prefix that the module
    of a training loop adds to names below a key is removed. Raises ReshardError if there are several such dicts.
    """
    nests = {
        path: _unwrapped_tensors(tensors, file) if path else tensors for path, tensors in _nests(content)
    }
    for path in ((), *(tuple(key.split(".")) for key in WEIGHT_PATHS)):
        if path in nests:
            return nests[path]
    if len(nests) > 1:
        paths = {".".join(path): tensors for path, tensors in nests.items()}
        raise ReshardError(
            "weights-in-several-nests",
            "the file has several dicts of tensors, and does not say which are the weights",
            file=file,
            expected=f"tensors by name, at the top or below {', '.join(WEIGHT_PATHS)}",
            found=listed([f"{len(tensors)} below {path}" for path, tensors in paths.items()], 4),
            remedy="save the model's state_dict() by itself",
        )
    top = {str(name): item for name, item in content.items() if isinstance(item, StoredTensor)}
    return next(iter(nests.values()), top)


def _nests(content: dict[Any, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, StoredTensor]]]:
    """Dicts with tensors that have axes, by their path; not those of optimizers, which have tensors of their own.

    No dict is entered twice: files can share them such that all paths would take forever.
    """
    waiting: list[tuple[tuple[str, ...], dict[Any, Any]]] = [((), content)]
    entered: set[int] = set()
    while waiting:
        path, each = waiting.pop()
        if id(each) in entered:
            continue
        entered.add(id(each))
        tensors = {str(name): item for name, item in each.items() if isinstance(item, StoredTensor)}
        if any(item.shape for item in tensors.values()):
            yield path, tensors
        elif len(path) < MAX_DEPTH:
            waiting += [
                ((*path, key), value)
                for key, value in reversed(each.items())
                if isinstance(key, str) and isinstance(value, dict) and not NO_WEIGHTS.search(key)
            ]


def _unwrapped_tensors(tensors: Mapping[str, StoredTensor], file: str) -> dict[str, StoredTensor]:
    prefix = prefix_of(tensors)
    return under_new_names(((name, name.removeprefix(prefix), item) for name, item in tensors.items()), file)


def config_in(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The config.json that Composer saved with the weights, or None."""
    config: Any = content
    for key in COMPOSER_CONFIG_PATH:
        config = config.get(key) if isinstance(config, dict) else None
    with suppress(*UNUSABLE):
        if isinstance(config["model_type"], str):
            return dict(json_of(to_json(config)))
    return None


def prefix_of(names: Iterable[str], anchors: Sequence[str] = ANCHORS) -> str:
    """The prefix of the model's names in a nested state dict: "" or, for example, "model." or "app.model.".

    What is below a prefix is the model only if the rest, if any, is another one: a language model may also be a part
    of the model, next to a vision tower. `anchors` are beginnings of a model's own names, the surest first.
    """
    bare = [_bare(name) for name in names]
    prefixes = (_before(anchor, name) for anchor in anchors for name in bare)
    prefix_found = next((prefix for prefix in prefixes if prefix is not None), "")
    rest = [name for name in bare if not name.startswith(prefix_found)]
    return prefix_found if not rest or any(anchor in name for name in rest for anchor in anchors) else ""


def _before(anchor: str, name: str) -> str | None:
    """What is before the beginning of a name in the model's own state dict; None if `anchor` is not in `name`."""
    at = name.find(anchor)
    return name[:at] if at == 0 or (at > 0 and name[at - 1] == ".") else None


def split_front(name: str) -> tuple[str, str]:
    """The wrappers' prefixes at the beginning of a name, and the rest of it."""
    rest = name
    while wrapper := next((each for each in WRAPPERS if rest.startswith(each)), ""):
        rest = rest.removeprefix(wrapper)
    return name.removesuffix(rest), rest


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def wrapper_problems(names: Iterable[str], file: str) -> Iterator[Problem]:
    """One problem for each wrapper whose prefix is in the names."""
    names = list(names)
    for wrapper in WRAPPERS:
        wrapped = sorted(name for name in names if wrapper in name)
        if wrapped:
            yield _problem(wrapper, wrapped, len(names), file)


def prefix_problem(anchor: str, names: Iterable[str], file: str) -> Problem | None:
    """The problem if a name that a model has is there below a prefix, such as `module.` of DDP; None otherwise."""
    names = list(names)
    prefix = next((name.removesuffix(anchor) for name in names if name.endswith(f".{anchor}")), "")
    if not prefix or prefix in anchor:
        return None  # `--strip` would remove it from the name itself, too
    return _problem(prefix, sorted(name for name in names if name.startswith(prefix)), len(names), file)


def _problem(mark: str, wrapped: list[str], count: int, file: str) -> Problem:
    return Problem(
        "wrapper-in-names",
        "tensor names contain a wrapper's prefix",
        tensor=listed(wrapped, 1),
        file=file,
        rule="tensor names are the model's own",
        found=f"{mark} in {len(wrapped)} of {count} names",
        remedy=f"remove it with --strip {mark}, and save the unwrapped module in future",
        values={"wrapper": mark},
    )


def all_stripped(named: Mapping[str, T], marks: Iterable[str], file: str) -> dict[str, T]:
    """The items under names without the prefixes of wrappers. Raises ReshardError if two get the same name."""
    marks = list(marks)
    if not marks:
        return dict(named)
    return under_new_names(((name, stripped(name, marks), item) for name, item in named.items()), file)


def stripped(name: str, marks: Iterable[str]) -> str:
    """`name` without the prefixes of wrappers."""
    for mark in marks:
        name = name.replace(mark, "")
    return name
