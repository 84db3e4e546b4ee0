"""Settings of an adapter that its tensors do not contain: its alpha, and how to apply it.

PEFT writes them to `adapter_config.json`. If a training engine saved the weights instead of PEFT, alpha must come from
another file of the engine, or from the user: the tensors do not contain it.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain_json import JSON_MOST, json_of
from reshard.folders.allowed_paths import belongs, is_here
from reshard.folders.base_hints import RUN_CONFIG, read_yaml
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.megatron import nemo, nemo_1
from reshard.formats.peft import ADAPTER_CONFIG
from reshard.transfer.source_files import Sources

Defaults = Callable[[Mapping[str, Any]], dict[str, Any]]

PARENTS_SEARCHED = 3
"""Number of parent folders to search: `checkpoint-N/pytorch_model_fsdp_0` is two below the folder of its run."""


@dataclass(frozen=True)
class AdapterSettings:
    """`config` has the keys of adapter_config.json, as far as the file `source` has values for them.

    `written` says that it is that file, complete. With `rounded`, the tool rounds the product of a pair to the dtype of
    the weight before it adds it. Raises ReshardError if its patterns are not regular expressions.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    written: bool = False
    rounded: bool = False

    @property
    def base(self) -> str | None:
        """The path of the base model when the adapter was trained: a hint, possibly of another machine."""
        value = self.config.get("base_model_name_or_path")
        return value if isinstance(value, str) and value else None

    @property
    def base_is_here(self) -> bool:
        """Whether that is a folder on this machine."""
        return self.base is not None and is_here(self.base, ".")

    def alpha(self, module: str) -> float | None:
        """`lora_alpha` of one module, or None if it is unknown. Raises ReshardError if it is not finite."""
        value = self._of("alpha_pattern", module, self.config.get("lora_alpha"))
        if not isinstance(value, int | float):
            return None
        if not abs(value) <= sys.float_info.max:
            raise ReshardError(
                "lora-alpha-not-finite",
                "lora_alpha is not a finite number",
                file=self.source,
                found=reprlib.repr(value),
                remedy="pass the alpha that the adapter was trained with: --lora-alpha N",
            )
        return float(value)

    @property
    def dropout(self) -> float:
        """`lora_dropout` of the training run; 0 if it is unknown. Raises ReshardError if it is not a number."""
        value = self.config.get("lora_dropout") or 0
        if not isinstance(value, int | float):
            raise ReshardError(
                "lora-dropout-no-number",
                "lora_dropout is not a number",
                file=self.source,
                found=reprlib.repr(value),
                remedy="correct it; merging and loading do not use it",
            )
        return float(value)

    def rank(self, module: str) -> int | None:
        """The rank of one module according to the config."""
        value = self._of("rank_pattern", module, self.config.get("r"))
        return int(value) if isinstance(value, int) else None

    def scale(self, module: str, rank: int) -> float:
        """The factor of a pair's product: alpha/r, or alpha/√r for rank-stabilized LoRA."""
        alpha = self.alpha(module)
        if alpha is None:
            raise ReshardError(unknown_alpha(module))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    @property
    def parameters(self) -> list[str]:
        """Parameters that were adapted by name, such as stacked experts, rather than as modules."""
        value = self.config.get("target_parameters")
        return [str(name) for name in value] if isinstance(value, list) else []

    def _of(self, patterns: str, module: str, default: Any) -> Any:
        """Like PEFT's `get_pattern_key`: the value of the first pattern that matches the end of the module's name."""
        keys = self.config.get(patterns)
        keys = keys if isinstance(keys, Mapping) else {}
        if endless := [key for key in keys if _is_endless(key)]:
            raise ReshardError(
                "adapter-pattern-too-slow",
                f"matching a key of {patterns} could take forever",
                file=self.source,
                expected=f"at most {REPEATS} of * + {{ in a regular expression, and none behind a group",
                found=reprlib.repr(endless[0]),
                remedy=f"write the key in {ADAPTER_CONFIG} as a simpler expression",
                values={"patterns": patterns},
            )
        try:
            return next((keys[key] for key in keys if re.match(rf"(.*\.)?({key})$", module)), default)
        except re.error as error:
            raise ReshardError(
                "adapter-pattern-malformed",
                f"{patterns} has a key that is not a regular expression",
                file=self.source,
                found=f"{error.pattern!r}: {error}",
                remedy=f"correct the key in {ADAPTER_CONFIG}",
                values={"patterns": patterns},
            ) from None


REPEATS, CHOICES = 3, 8
"""Maximum number of repetitions and of optional parts in a regular expression of an adapter."""


def _is_endless(pattern: str) -> bool:
    """Whether backtracking could take exponential or high-degree polynomial time in the length of a name."""
    repeats = len(re.findall(r"[*+{]", pattern))
    return bool(re.search(r"\)[*+{]", pattern)) or repeats > REPEATS or pattern.count("?") > CHOICES


def unknown_alpha(module: str | None = None) -> Problem:
    """The error for an adapter whose alpha is not recorded."""
    return Problem(
        "lora-alpha-unknown",
        "lora_alpha is unknown",
        tensor=module,
        rule="the change of an adapter is scaled by alpha/r, and the tensors only show r",
        expected=f"{ADAPTER_CONFIG} next to the weights, or a training config with lora_alpha",
        remedy="pass the alpha that the adapter was trained with: --lora-alpha N",
    )


def find_settings(checkpoint: Checkpoint, alpha: float | None = None) -> AdapterSettings:
    """The settings in files near an adapter. `alpha`, if given, applies to every module, whatever a file says."""
    recorded = next(
        (
            settings
            for folder in _folders(checkpoint)
            for settings in _settings_in(folder, checkpoint.sources)
        ),
        AdapterSettings(),
    )
    if alpha is None:
        return recorded
    config = {key: value for key, value in recorded.config.items() if key != "alpha_pattern"}
    return replace(recorded, config={**config, "lora_alpha": alpha}, source=recorded.source or "--lora-alpha")


def _folders(checkpoint: Checkpoint) -> Iterator[Path]:
    place = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    seen = [place, checkpoint.description.folder, *list(place.absolute().parents)[:PARENTS_SEARCHED]]
    yield from dict.fromkeys(folder for place in seen for folder in (place, place / "lora_adapter"))


def _settings_in(folder: Path, sources: Sources) -> Iterator[AdapterSettings]:
    """The settings in one folder, from the most reliable file on."""
    if (folder / ADAPTER_CONFIG).is_file() and belongs(folder / ADAPTER_CONFIG, folder, sources):
        yield _in_adapter_config(folder / ADAPTER_CONFIG, sources)
    for name, keys in TRAINING_NOTES.items():
        if (folder / name).is_file() and (content := _in_peft_keys(_object(folder / name, sources), keys)):
            yield AdapterSettings(content, str(folder / name))
    for name, section, called, defaults in IN_YAML:
        settings: Any = _yaml(folder / name, sources)
        for part in section:
            settings = settings.get(part) if isinstance(settings, Mapping) else None
        if isinstance(settings, Mapping) and (
            content := _in_peft_keys({**defaults(settings), **_without_none(settings)}, called)
        ):
            yield AdapterSettings(content, str(folder / name))


def _in_adapter_config(path: Path, sources: Sources) -> AdapterSettings:
    """The settings in a file that PEFT wrote, or mlx-lm under the same name, whose scale is alpha/r."""
    content = read_object(path, sources)
    lora = content.get("lora_parameters")
    if not isinstance(lora, Mapping):
        return AdapterSettings(content, str(path), written=True)
    rank, scale = lora.get("rank"), lora.get("scale")
    known: dict[str, Any] = {"r": rank, "lora_dropout": lora.get("dropout")}
    if isinstance(rank, int) and isinstance(scale, int | float):
        known["lora_alpha"] = rank * scale
    known["base_model_name_or_path"] = content.get("model")
    return AdapterSettings(_without_none(known), str(path), rounded=True)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _no_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _of_nemo_1(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What NeMo 1 uses as alpha if it is not set, as in all releases before 2.0."""
    return {"alpha": settings.get("adapter_dim")}


def _of_nemo_2(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of NeMo 2's LoRA, which `model.yaml` leaves out."""
    is_lora = str(settings.get("_target_")).endswith((".LoRA", ".CanonicalLoRA"))
    return {"dim": 32, "alpha": 32} if is_lora else {}


BRIDGE_KEYS = {"dim": "r", "alpha": "lora_alpha"}
IN_YAML: tuple[tuple[str, tuple[str, ...], Mapping[str, str], Defaults], ...] = (
    (RUN_CONFIG, ("peft",), BRIDGE_KEYS, _no_defaults),
    (
        nemo_1.CONFIG_FILE,
        ("peft", "lora_tuning"),
        {"adapter_dim": "r", "alpha": "lora_alpha", "adapter_dropout": "lora_dropout"},
        _of_nemo_1,
    ),
    (
        f"{nemo.CONTEXT}/{nemo.MODEL}",
        ("model_transform",),
        {**BRIDGE_KEYS, "dropout": "lora_dropout"},
        _of_nemo_2,
    ),
)
"""Files of Megatron-Bridge and NeMo, the section with the settings, the names of its keys in adapter_config.json, and
what it leaves out. Sources: `nlp/parts/peft_config.py` and `llm/peft/lora.py` of NeMo 2.3.
"""
TRAINING_NOTES = {
    "lora_train_meta.json": {"r": "r", "lora_alpha": "lora_alpha", "task_type": "task_type"},
    "args.json": {
        "lora_rank": "r",
        "lora_alpha": "lora_alpha",
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
        "model_dir": "base_model_name_or_path",
    },
}
"""Files of verl and of ms-swift, with the names of their keys in adapter_config.json.

Sources: `utils/checkpoint/fsdp_checkpoint_manager.py` of verl 0.9.1; `swift/megatron/arguments` of ms-swift 4.
"""


def _in_peft_keys(content: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The values under the names of adapter_config.json; empty without an alpha."""
    if not isinstance(content, Mapping):
        return {}
    known = {ours: content[theirs] for theirs, ours in keys.items() if content.get(theirs) is not None}
    return known if "lora_alpha" in known else {}


def _object(path: Path, sources: Sources) -> Any:
    try:
        return json_of(sources.read(path, JSON_MOST))
    except ValueError:
        return None  # an unreadable hint is ignored


def _yaml(path: Path, sources: Sources) -> dict[str, Any] | None:
    try:
        return read_yaml(path, sources) if path.is_file() else None
    except ValueError:
        return None


TUNERS_ALIKE = ("LORA", None)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_OTHER_MECHANISMS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)


def type_problems(settings: AdapterSettings) -> Iterator[Problem]:
    """The problem of an adapter of another kind than LoRA."""
    kind = settings.config.get("peft_type")
    if kind not in TUNERS_ALIKE:
        yield Problem(
            "adapter-type-unsupported",
            f"adapters of type {kind} are not supported",
            file=settings.source,
            expected="peft_type LORA",
            found=str(kind),
            remedy="load it with PEFT, and save the result of merge_and_unload() if its type can be merged",
        )


def merge_problems(settings: AdapterSettings) -> Iterator[Problem]:
    """Problems of an adapter that is not just a low-rank sum, or whose base is not the one that it names."""
    for key in _OTHER_MECHANISMS:
        if settings.config.get(key):
            yield _unmergeable(settings, f"{key}={settings.config[key]}", "load and merge it with PEFT")
    start = settings.config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        yield _unmergeable(
            settings,
            f"init_lora_weights={start}, which changes the base",
            "save it again with path_initial_model_for_weight_conversion, which PEFT's documentation describes",
        )


def _unmergeable(settings: AdapterSettings, found: str, remedy: str) -> Problem:
    return Problem(
        "adapter-not-mergeable",
        "this adapter cannot be merged by adding a product to the base",
        file=settings.source,
        rule="merged = base + alpha/r · B·A, with or without DoRA's magnitudes",
        found=found,
        remedy=remedy,
    )


def rank_problems(settings: AdapterSettings, ranks: Iterable[tuple[str, int]]) -> Iterator[Problem]:
    """Problems of modules whose rank differs from that in the config."""
    for module, rank in ranks:
        wanted = settings.rank(module) if settings.written else None
        if wanted is not None and wanted != rank:
            yield Problem(
                "adapter-rank-contradicts-config",
                "the adapter's config and its tensors disagree on the rank",
                tensor=module,
                file=settings.source,
                expected=f"{wanted} ({ADAPTER_CONFIG})",
                found=f"{rank} (tensors)",
                remedy=f"put the {ADAPTER_CONFIG} that was saved with the tensors next to them",
            )
