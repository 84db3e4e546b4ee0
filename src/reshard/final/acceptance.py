"""Checks that a folder has to pass before it is used, though reshard itself wrote it.

What cannot be checked, such as what only transformers can tell where it is not installed, is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard import adapters
from reshard.adapters.adapter import LowRankPair
from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.families.outer_model import language_config
from reshard.folders.companion_names import CONFIG
from reshard.folders.companions import find_companions
from reshard.folders.json_objects import read_object
from reshard.formats import open_checkpoint
from reshard.formats.peft import ADAPTER_CONFIG
from reshard.model.described_checkpoint import describe
from reshard.model.model_heads import resolve_if_declared
from reshard.transfer.source_files import Sources


@dataclass(frozen=True)
class Origin:
    """What a folder is compared with: its base model, if it is known, and whether that may bring its own code."""

    base: Path | None = None
    trust_remote_code: bool = False


NO_TRANSFORMERS = "transformers is not installed beside reshard"
NO_BASE = "the base model is not known"


class NotChecked(Exception):  # noqa: N818 - it is no error
    """Why something cannot be checked."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: what was found, and its problems."""

    name: str
    found: str
    problems: tuple[Problem, ...] = ()
    checked: bool = True
    """False if it could not be checked; `found` is then the reason."""

    @property
    def mark(self) -> str:
        """How a screen shows the result: a tick is only before what was checked."""
        if not self.checked:
            return "○"
        return "✓" if self.right else "✗"

    @property
    def right(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name,
            "found": self.found,
            "checked": self.checked,
            "right": self.right,
            "problems": [problem.as_dict() for problem in self.problems],
        }


def checked(name: str, look: Callable[[], str]) -> CheckResult:
    """The result of `look`, which returns what it found, or raises NotChecked, ReshardError or OSError."""
    try:
        return CheckResult(name, look())
    except NotChecked as reason:
        return CheckResult(name, f"not checked: {reason}", checked=False)
    except ReshardError as error:
        return CheckResult(name, error.problems[0].message, tuple(error.problems))
    except OSError as error:
        problem = Problem(
            "system-refused",
            "the system refused to read or to write",
            file=str(error.filename) if error.filename else None,
            found=error.strerror or str(error),
            remedy="fix what the system reports, and make the folder again from the last checkpoint",
        )
        return CheckResult(name, problem.message, (problem,))


def checks_of(folder: Path, origin: Origin) -> Iterator[CheckResult]:
    """The checks of a folder with a model, or with an adapter."""
    if (folder / ADAPTER_CONFIG).is_file():
        yield checked("adapter fits its base", lambda: _fits(folder, origin))
        yield from _texts(folder, origin)
        return
    yield checked("loads strictly", lambda: _loads(folder, origin))
    yield from _texts(folder, origin)
    if origin.base is None:
        yield CheckResult("compared with the base", f"not checked: {NO_BASE}", checked=False)


def _texts(folder: Path, origin: Origin) -> Iterator[CheckResult]:
    yield _by_transformers("tokenizer", lambda: _tokenizer(folder, origin))
    yield _by_transformers("chat template", lambda: _template(folder, origin))


def _by_transformers(name: str, look: Callable[[], str]) -> CheckResult:
    """A check by transformers, if it is installed."""
    if find_spec("transformers") is None:
        return CheckResult(name, f"not checked: {NO_TRANSFORMERS}", checked=False)
    return checked(name, look)


def _loads(folder: Path, origin: Origin) -> str:
    """Check strictly that all tensors are there and no others: with reshard, and with transformers if installed.

    The model's own code is not executed here, even if the run trusted it.
    """
    checkpoint = open_checkpoint(folder)
    count = len(resolve_if_declared(describe(checkpoint)).checkpoint.tensors)
    if find_spec("transformers") is None:
        raise NotChecked(f"{NO_TRANSFORMERS}; reshard opens it, with {count} tensors")
    if origin.trust_remote_code and "auto_map" in read_object(folder / CONFIG, Sources()):
        raise NotChecked(
            f"the code of the model is its own, and not run; reshard opens it, with {count} tensors"
        )
    from importlib.metadata import version

    from reshard.oracle.transformers import assert_loads

    assert_loads(folder)
    return f"{count} tensors, none missing and none left over, by transformers {version('transformers')}"


def _tokenizer(folder: Path, origin: Origin) -> str:
    """Check that every token of the base has the same id here. Added tokens are allowed."""
    ours = _vocabulary(folder, origin)
    theirs = _vocabulary(origin.base, origin) if origin.base else {}
    changed = [token for token, number in theirs.items() if ours.get(token) != number]
    rows, highest = _rows(folder), max(ours.values(), default=0)
    problem = None
    if len(ours) < 2:
        problem = Problem(
            "tokenizer-without-vocabulary", "the tokenizer has no vocabulary", found=f"{len(ours)} tokens"
        )
    elif changed:
        some = ", ".join(repr(token) for token in changed[:5])
        problem = Problem(
            "tokens-renumbered",
            "tokens of the base have different ids or are missing",
            found=f"{len(changed)}: {some}",
        )
    elif rows is not None and highest >= rows:
        problem = Problem(
            "token-without-row",
            "a token has no row in the embedding",
            expected=f"ids below {rows}",
            found=str(highest),
        )
    if problem:
        raise ReshardError(
            replace(
                problem,
                file=str(folder),
                expected=problem.expected or f"the {len(theirs)} tokens of {origin.base}",
                remedy=_copy_tokenizer(origin),
            )
        )
    added = f", {len(ours) - len(theirs)} added" if len(ours) > len(theirs) else ""
    return f"{len(theirs)} tokens as in the base{added}" if origin.base else f"{len(ours)} tokens"


def _copy_tokenizer(origin: Origin) -> str:
    return f"copy the tokenizer of {origin.base or 'the base'} into the checkpoint, and convert it again"


def _rows(folder: Path) -> int | None:
    """Rows of the embedding according to the config; None for an adapter, which may add rows to its base."""
    if (folder / ADAPTER_CONFIG).is_file():
        return None
    rows = language_config(read_object(folder / CONFIG, Sources())).get("vocab_size")
    return int(rows) if rows else None


def _vocabulary(folder: Path, origin: Origin) -> dict[str, int]:
    vocabulary: dict[str, int] = _loaded_tokenizer(folder, origin).get_vocab()
    return vocabulary


def _loaded_tokenizer(folder: Path, origin: Origin) -> Any:
    """The tokenizer as transformers loads it. Raises ReshardError if transformers cannot load it."""
    from transformers import AutoTokenizer

    if not find_companions(
        Sources(), folder
    ).has_tokenizer:  # transformers 5 would make a tokenizer of a single token
        raise ReshardError(
            "final-tokenizer-missing",
            "there is no tokenizer",
            file=str(folder),
            expected="tokenizer.json, tokenizer.model or vocab.json",
            remedy=_copy_tokenizer(origin),
        )
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=origin.trust_remote_code
        )
    except Exception as error:
        raise ReshardError(
            "tokenizer-not-loadable",
            "transformers does not load the tokenizer",
            file=str(folder),
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="fix what it reports, and export the checkpoint again",
        ) from error


def _template(folder: Path, origin: Origin) -> str:
    ours = _loaded_tokenizer(folder, origin).chat_template
    theirs = _loaded_tokenizer(origin.base, origin).chat_template if origin.base else None
    if theirs and not ours:
        raise ReshardError(
            "chat-template-lost",
            "the chat template is lost",
            file=str(folder),
            expected=f"that of {origin.base}",
            remedy="copy chat_template.jinja into the checkpoint, and convert it again",
        )
    if not ours:
        if origin.base is None:
            raise NotChecked("there is none")
        return "none, as in the base"
    return "as in the base" if ours == theirs else "of its own"


def _fits(folder: Path, origin: Origin) -> str:
    """Check that every lora_A and lora_B is complete and has the shape that its linear layer needs."""
    adapter = adapters.read_adapter(open_checkpoint(folder))
    ranks = ", ".join(map(str, adapter.ranks))
    layers = f"{len(adapter.pairs)} layers, rank {ranks}"
    if origin.base is None:
        raise NotChecked(f"{NO_BASE}; the adapter has {layers}")
    base = open_checkpoint(origin.base).tensors
    unknown = [module for module in adapter.pairs if f"{module}.weight" not in base]
    raise_all(
        problem
        for module, pair in adapter.pairs.items()
        if f"{module}.weight" in base
        for problem in _misshapen(module, pair, base[f"{module}.weight"].shape, folder)
    )
    if unknown:
        raise NotChecked(
            f"the base has no weights of these names: {listed(unknown, 3)}; the adapter has {layers}"
        )
    return f"{layers}, each whole"


def _misshapen(module: str, pair: LowRankPair, shape: tuple[int, ...], folder: Path) -> Iterator[Problem]:
    if pair.embedding:
        shape = (shape[1], shape[0])
    whole = {"lora_A": (pair.a.shape, (pair.rank, shape[1])), "lora_B": (pair.b.shape, (shape[0], pair.rank))}
    for name, (stored_shape, expected) in whole.items():
        if tuple(stored_shape) != expected:
            yield Problem(
                "adapter-tensor-incomplete",
                "a tensor of the adapter is incomplete",
                tensor=f"{module}.{name}",
                file=str(folder),
                expected=str(list(expected)),
                found=str(list(stored_shape)),
                remedy="it was saved while it was sharded: convert another checkpoint",
            )
