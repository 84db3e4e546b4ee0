"""The table of options that engines pass through (docs/training-options.md): `python -m tests.train.options_table`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from reshard.training.megatron import refused_options
from reshard.training.megatron.core_fields import CORE_CONFIGS, all_fields
from reshard.training.megatron.options import OWN_OPTIONS
from reshard.training.methods import TRAINING_METHODS
from reshard.training.trl import config_fields
from reshard.training.trl import refused_options as of_trl
from reshard.training.trl.trl_methods import TRL_METHODS

PAGE = Path(__file__).parents[2] / "docs" / "training-options.md"
BEGIN, END = "<!-- options: python -m tests.train.options_table -->\n", "<!-- /options -->\n"


def names(found: Iterable[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{each}`" for each in found)


def grouped(refused: dict[str, tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Names by the reason for refusing them, and the remedy."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, reason in refused.items():
        found.setdefault(reason, []).append(name)
    return found


def methods() -> str:
    """The table of TRL's methods."""
    rows = []
    for name, way in TRL_METHODS.items():
        plans = ", ".join(f"`{plan}`" for plan in way.plans)
        rows.append(
            f"| `{name}` | `{way.name}Trainer` | {', '.join(TRAINING_METHODS[name].shapes)} | {plans} |"
        )
    return "\n".join(["| method | TRL | learns from | `--parallel` |", "|---|---|---|---|", *rows]) + "\n"


def trl() -> str:
    """The table of TRL's options."""
    configs = names(way.config for way in TRL_METHODS.values())
    rows = [
        ("pass through", f"all fields of {configs} that are not refused below"),
        ("of `ModelConfig`", names((*config_fields.LORA_OPTIONS, *config_fields.MODEL_CONFIG_OPTIONS))),
        ("ours", names(config_fields.ADDED_OPTIONS)),
        ("have another default", names((*config_fields.FIXED_VALUES, *config_fields.SFT_VALUES))),
    ]
    for (why, cure), which in grouped(of_trl.REFUSED_OPTIONS).items():
        rows.append((f"refused: {why}; {cure}", names(which)))
    return table("TRL", rows)


def megatron() -> str:
    """The table of Megatron's options."""
    passing = [name for name in all_fields() if refused_options.passes(name) and name not in OWN_OPTIONS]
    engine = [name for name in passing if refused_options.NEEDS_TRANSFORMER_ENGINE.takes(name)]
    gpu = [name for name in passing if refused_options.NEEDS_GPU.takes(name)]
    rows = [
        ("pass through", names(name for name in passing if name not in (*engine, *gpu))),
        ("pass through with TransformerEngine, and are refused without", names(engine)),
        ("pass through on a GPU, and are refused without", names(gpu)),
        ("reshard's own, under Megatron-LM's names", names(OWN_OPTIONS)),
        (
            "refused: they have another name here",
            ", ".join(f"`{name}` (`{flag}`)" for name, flag in refused_options.SIZES_OF_MODEL.items()),
        ),
    ]
    for each in refused_options.REFUSED:
        rows.append((f"refused: {each.why}; {each.cure}", names(each.names)))
    return table(f"Megatron-Core 0.16.1 ({names(CORE_CONFIGS)})", rows)


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """A Markdown table."""
    lines = [f"| {title} | options |", "|---|---|", *(f"| {what} | {which} |" for what, which in rows)]
    return "\n".join(lines) + "\n"


def tables() -> str:
    """The text between `BEGIN` and `END`."""
    return f"\n{methods()}\n{trl()}\n{megatron()}\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    between = re.escape(BEGIN) + ".*?" + re.escape(END)
    PAGE.write_text(re.sub(between, lambda _: BEGIN + tables() + END, text, flags=re.S), encoding="utf-8")
