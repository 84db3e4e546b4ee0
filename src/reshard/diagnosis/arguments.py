"""Arguments and keys that a program rejects as unknown, and the ones that were probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from reshard.base.suggest import closest
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.keys import Keys
from reshard.diagnosis.history.table import table
from reshard.diagnosis.history.versions import Versions
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told
from reshard.diagnosis.spelling import Usage, keys_of
from reshard.diagnosis.upstream import place_in_code
from reshard.diagnosis.words import words

_LISTS = re.compile(
    r"unrecognized arguments?: (?P<typed>[^\n]+)"
    r"|(?:not used by the HfArgumentParser|remaining_argv): \[(?P<used>[^\]\n]*)\]"
    r"|had unknown keys \(\[(?P<keys>[^\]\n]*)\]\)"
    r"|[Nn]o such option:? (?P<option>--[\w-]+)"
    r"|[Uu]nrecognized (?:option|argument)s?:? (?P<other>--?[\w-]+)"
    r"|[Kk]ey '(?P<struct>\w+)' is not in struct|Could not override '(?P<override>[\w.]+)'"
    r"|^(?P<extra>[\w.]+)\n\s+Extra inputs are not permitted",
    re.MULTILINE,
)
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_USAGE = re.compile(r"--[a-z][\w-]+")
_FULL = re.compile(r"full_key: (?P<key>[\w.]+)")
PROGRAMS = {tool: tool for tool in ("trl", "llamafactory", "accelerate")} | {"swift": "ms-swift"}
"""Programs whose keys are known from their releases, and their tools in settings.yaml."""
ALIKE = 0.75


def evidence(root: Traceback, log: Log) -> list[Text]:
    """For each unknown argument the nearest known one; empty if a message names none, or releases accept it."""
    unknown = list(dict.fromkeys(_unknown(root.said)))
    if "HfArgumentParser" in root.said and (of_training := _of_training(unknown)):
        return [of_training]
    if of_releases(root, log):
        return []
    known = _known(root.said, log) if unknown else set()
    return [_near(name, known) for name in unknown[:5]]


MANY = 5
"""Number of unknown training keys at once from which the command is assumed not to train."""


def _of_training(unknown: list[str]) -> Text | None:
    """A text if most of the keys are those of a training run, passed to a command that does not train."""
    trains = table("transformers")
    known = trains.ever("TrainingArguments.__init__") if trains else set()
    if len(unknown) < MANY or sum(name in known for name in unknown) < len(unknown) * 0.6:
        return None
    return words("arguments-of-training", names=", ".join(unknown[:4]), count=len(unknown))


def of_releases(root: Traceback, log: Log) -> list[Text]:
    """For each unknown key the releases of its program that accept it; empty unless some release accepts each."""
    program = next((name for said, name in _PRINTED_BY if said in root.said), None)
    keys, unknown = (Keys(program, Versions()) if program else None), list(dict.fromkeys(_unknown(root.said)))
    spans = {name: span for name in unknown if keys and (span := keys.span(name))}
    if keys is None or keys.table is None or not unknown or len(spans) < len(unknown):
        return []
    package, texts = keys.table.package, []
    for name, (since, last) in spans.items():
        newer = package in log.versions and Version(log.versions[package]) > Version(last)
        until = newer or since == keys.table.versions[0]
        phrase = "since" if last == keys.table.versions[-1] else "until" if until else "between"
        shown = {
            "name": name,
            "since": since,
            "last": last,
            "package": package,
            "program": keys.schema.program,
        }
        now = _RENAMED.get(program or "", {}).get(name)
        texts.append(
            words("argument-renamed", now=now, **shown)
            if now and phrase != "since"
            else words(f"argument-{phrase}", **shown)
        )
    return texts


_RENAMED = {
    "ms-swift": {
        "sft_type": "tuner_type (3.x: --train_type)",
        "train_type": "tuner_type",
        "model_id_or_path": "model",
        "template_type": "template",
        "ckpt_dir": "adapters",
        "custom_train_dataset_path": "dataset",
        "custom_val_dataset_path": "val_dataset",
        "lora_target_modules": "target_modules",
        "lora_dropout_p": "lora_dropout",
        "dtype": "torch_dtype",
        "quantization_bit": "quant_bits",
        "batch_size": "per_device_train_batch_size",
        "dataset_test_ratio": "split_dataset_ratio",
        "deepspeed_config_path": "deepspeed",
        "use_flash_attn": "attn_impl flash_attn",
        "merge_lora_and_save": "merge_lora",
        "tensor_parallel_size": "vllm_tensor_parallel_size",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    },
}
"""Keys that a program renamed, and their names in its current release."""
_PRINTED_BY = (("remaining_argv", "ms-swift"), ("HfArgumentParser", "llamafactory"))
"""Messages about unknown arguments, and the programs that print them."""


_OF_CONFIG = re.compile(
    r"The config file at (?P<file>\S{1,300}) had unknown keys \(\[(?P<keys>[^\]\n]{1,300})\]\)"
)
"""What accelerate says of keys in its config that it does not know: those of newer releases, or misspelled ones."""


_LACKS = re.compile(
    r"(?:ConfigAttributeError:|Error\(s\):) {1,8}(?:Key '|Missing key )(?P<name>\w+)[^\n]{0,40}\s{1,20}"
    r"full_key: (?P<key>[\w.]{1,200})"
)


def of_arguments(root: Traceback, log: Log) -> Finding | None:
    """The finding for a key that no catalogue entry covers."""
    place = Place.of(log.name, root.last, root.said)
    config = _OF_CONFIG.search(root.said)
    if config and set(_NAME.findall(config["keys"])) <= Keys("accelerate", Versions()).known:
        return told("accelerate-config-newer", [place], config.groupdict(), certainty="likely")
    texts = of_releases(root, log) or evidence(root, log)
    lacks = None if "Could not override" in log.text else _LACKS.search(root.said)
    if lacks and texts in ([], [words("argument-unknown", name=lacks["key"])]):
        values = {**lacks.groupdict(), "where": place_in_code(root.root)}
        return told("config-lacks-key", [place], values, certainty="likely")
    if not texts:
        return None
    lines = Text("; ".join(each.en for each in texts), "；".join(each.zh for each in texts))
    return told("unknown-key", [place], {"told": lines}, certainty="likely")


def _unknown(said: str) -> Iterator[str]:
    """The names in a message, without their values."""
    for match in _LISTS.finditer(said):
        given = next(each for each in match.groups() if each is not None)
        if match.lastgroup in ("typed", "used"):
            tokens = re.findall(r"(?<![\w-])--?([A-Za-z][\w.-]*)", given)
            yield from tokens or (_NAME.findall(given) if match.lastgroup == "used" else ())
        elif match.lastgroup == "struct" and (full := _FULL.search(said)):
            yield full["key"]
        else:
            yield from (name.lstrip("-") for name in re.findall(r"-{0,2}[A-Za-z_][\w.-]*", given))


def _known(said: str, log: Log) -> set[str]:
    """The program's arguments: from its usage, if the log shows it, or from its releases."""
    usage = Usage()
    usage.see(log.text)
    of_usage = (
        line.text for line in log.lines if line.text.lstrip()[:1] in ("[", "-") or "usage:" in line.text
    )
    shown = {flag[2:] for text in of_usage for flag in _USAGE.findall(text)}
    if shown and "usage:" in log.text:
        return shown
    named = next((program for program in ("accelerate", "deepspeed") if program in said.lower()), None)
    program = named or next((PROGRAMS[tool] for tool in usage.tools if tool in PROGRAMS), None)
    if program is not None:
        return shown | Keys(program, Versions()).known
    if "is not in struct" in said or "Could not override" in said:  # Hydra, which verl uses
        return shown | {key.rpartition(".")[2] for key in keys_of("verl")}
    if "HfArgumentParser" in said:  # programs that read their settings from a file
        shown |= {key for each in ("llamafactory", "trl") for key in Keys(each, Versions()).known}
    trains = table("transformers")
    return shown | (trains.ever("Seq2SeqTrainingArguments.__init__") if trains else set())


def _near(name: str, known: set[str]) -> Text:
    """An unknown name and the one that was probably meant. Dashes and underscores are equivalent."""
    if name.replace("-", "_") == "local_rank":
        return words("argument-of-launcher", name=name)
    plain = {each.replace("-", "_"): each for each in known}
    prefix, dot, last = name.replace("-", "_").rpartition(".")
    if last in plain and not dot:
        return words("argument-elsewhere", name=name)
    near = closest(last, plain, cutoff=ALIKE)
    return (
        words("argument-near", name=name, near=f"{prefix}{dot}{plain[near[0]]}")
        if near
        else words("argument-unknown", name=name)
    )
