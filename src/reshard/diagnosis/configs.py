"""Diagnose configs by reading them: accelerate, DeepSpeed, TRL and LLaMA-Factory, as YAML or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.base.arguments import truth
from reshard.checks import grpo
from reshard.checks.device_maps import spread_in
from reshard.checks.environment import find_gpus
from reshard.checks.precision import several, without_bf16
from reshard.diagnosis.configtext import ConfigText, read_config
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.calls import Refused
from reshard.diagnosis.history.keys import Keys
from reshard.diagnosis.history.messages import read_from
from reshard.diagnosis.history.scripts import wording
from reshard.diagnosis.history.versions import Versions
from reshard.diagnosis.rules import in_words, told

RUN = {"learning_rate", "per_device_train_batch_size", "num_train_epochs", "output_dir", "model_name_or_path"}
"""Keys that identify the config of a run."""
FOREIGN = {"base_model", "model", "rlhf_type", "train_type", "tuner_type", "teacher_model", "adapter"}
"""Keys of Axolotl and ms-swift, which have their own arguments."""
OF_SWIFT = {"rlhf_type", "train_type", "tuner_type", "teacher_model"}
OF_ACCELERATE = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}


def diagnose_config(path: str, installed: Mapping[str, str] | None = None) -> list[Finding]:
    """The findings about a config. Raises ReshardError if it cannot be read.

    `installed` are the packages of the Python that reads it; None if that is this one.
    """
    config = replace(read_config(path), installed=installed)
    rules = (_text, _accelerate, _deepspeed, _llamafactory, _trl, _keys)
    return [finding for rule in rules for finding in rule(config)]


def _text(config: ConfigText) -> Iterator[Finding]:
    """Syntax on which readers of YAML and JSON disagree."""
    if config.repeated:
        places = [config.place(key) for key in config.repeated]
        yield told("config-repeated-key", places, {"keys": ", ".join(config.repeated)})
    if config.is_lenient:
        yield told("config-json-comments", [Place(config.path)])


# ------------------------------------------------------------------------------------------------- accelerate

OF_FSDP1 = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)
"""FSDP2 has none of these (accelerate 1.15, FullyShardedDataParallelPlugin); it refuses forward prefetching."""


def _accelerate(config: ConfigText) -> Iterator[Finding]:
    if _program(config) != "accelerate":
        return
    if config.get("fsdp_config.fsdp_state_dict_type") == "SHARDED_STATE_DICT":
        where = config.changed("fsdp_config.fsdp_state_dict_type", "FULL_STATE_DICT")
        yield told("sharded-save-model", [where], severity="warning", certainty="possible")
    processes, machines = config.get("num_processes"), config.get("num_machines")
    if config.get("distributed_type") == "FSDP" and processes == 1:
        yield told("config-one-process", [config.place("num_processes")], {"kind": "FSDP"})
    if isinstance(processes, int) and isinstance(machines, int) and machines > 0 and processes % machines:
        better = -(-processes // machines) * machines
        counts = {"processes": processes, "machines": machines}
        yield told("config-processes-machines", [config.changed("num_processes", better)], counts)
    if isinstance(config.get("fsdp_config"), Mapping):
        yield from _fsdp(config)
    for fact in without_bf16(find_gpus()[0] if config.get("mixed_precision") == "bf16" else ()):
        yield in_words(fact, [config.changed("mixed_precision", "fp16")])


def _fsdp(config: ConfigText) -> Iterator[Finding]:
    """Options of FSDP 1 and 2 that do not work together."""
    version = config.get("fsdp_config.fsdp_version") or 1
    given = config.content["fsdp_config"]
    if version == 2:
        old = [key for key in OF_FSDP1 if given.get(key) not in (None, False, "NO_PREFETCH")]
        refused = truth(given.get("fsdp_forward_prefetch"))
        if old:
            places = [config.dropped(f"fsdp_config.{key}") for key in old]
            kind = "error" if refused else "warning"
            yield told("config-fsdp-versions", places, {"keys": ", ".join(old)}, severity=kind)
    elif isinstance(given.get("fsdp_reshard_after_forward"), bool):
        values = {"keys": "fsdp_reshard_after_forward: true/false"}
        places = [config.changed("fsdp_config.fsdp_reshard_after_forward", "FULL_SHARD")]
        yield told("config-fsdp-versions", places, values, severity="error")
    lean = truth(given.get("fsdp_cpu_ram_efficient_loading"))
    if (
        lean
        and version == 1
        and "fsdp_sync_module_states" in given
        and not truth(given["fsdp_sync_module_states"])
    ):
        yield told("config-fsdp-sync", [config.changed("fsdp_config.fsdp_sync_module_states", True)])


# ------------------------------------------------------------------------------------------------- DeepSpeed

FILLED = {
    *(
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ),
    *("fp16.enabled", "bf16.enabled", "zero_optimization.stage", "steps_per_print"),
    *("zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.reduce_bucket_size"),
    *(
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ),
    *(
        f"zero_optimization.offload_{kind}.{key}"
        for kind in ("optimizer", "param")
        for key in ("device", "nvme_path")
    ),
}
"""Keys whose "auto" transformers or accelerate replace; they also replace all in `optimizer` and `scheduler`."""


def _deepspeed(config: ConfigText) -> Iterator[Finding]:
    if not isinstance(config.get("zero_optimization"), Mapping):
        return
    stage, gather = config.get("zero_optimization.stage"), "stage3_gather_16bit_weights_on_model_save"
    every = list(_leaves(config.content))
    auto = [key for key, value in every if value == "auto"]
    if stage == 3 and config.get(f"zero_optimization.{gather}") in (None, False):
        there = f"zero_optimization.{gather}" in config.spots
        key = f"zero_optimization.{gather}" if there else "zero_optimization.stage"
        place = config.changed(key, True) if there else config.with_sibling(key, gather, True)
        yield told("config-zero3-gather", [place], certainty="likely" if auto else "possible")
    yield from _precisions(config, "fp16.enabled", "bf16.enabled")
    unfilled = [
        key for key in auto if key not in FILLED and key.split(".")[0] not in ("optimizer", "scheduler")
    ]
    if unfilled:
        places = [config.place(key) for key in unfilled]
        yield told("config-auto-unfilled", places, {"keys": ", ".join(unfilled)}, certainty="likely")
    yield from _batch(config)
    if isinstance(stage, int) and stage < 3:
        keys = ("offload_param", *(k for k in config.content["zero_optimization"] if k.startswith("stage3_")))
        late = [key for key in keys if _switched_on(config.get(f"zero_optimization.{key}"))]
        if late:
            places = [config.place(f"zero_optimization.{key}") for key in late]
            values = {"keys": ", ".join(late), "stage": stage}
            yield told(
                "config-stage3-keys", places, values, severity="error" if "offload_param" in late else None
            )


def _precisions(config: ConfigText, half: str, brain: str) -> Iterator[Finding]:
    on = [key.partition(".")[0] for key in (half, brain) if truth(config.get(key))]
    for fact in several(on):
        yield in_words(fact, [config.changed(half, False), config.place(brain)])


def _switched_on(value: object) -> bool:
    """Whether an option is effective: templates contain those of stage 3 with "auto" and "none"."""
    device = value.get("device") if isinstance(value, Mapping) else None
    return device in ("cpu", "nvme") if isinstance(value, Mapping) else value is True


def _batch(config: ConfigText) -> Iterator[Finding]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (config.get(key) for key in keys)
    steps = 1 if steps is None else steps
    if all(isinstance(value, int) and value > 0 for value in (total, micro, steps)) and total % (
        micro * steps
    ):
        better = -(-total // (micro * steps)) * micro * steps
        values = {"total": total, "micro": micro, "steps": steps}
        yield told("config-batch-product", [config.changed("train_batch_size", better)], values)


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------------------------------- LLaMA-Factory

STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")


def _is_llamafactory(config: ConfigText) -> bool:
    given = config.content
    return (
        "finetuning_type" in given
        or given.get("stage") in STAGES
        or {"export_dir", "template"} <= given.keys()
    )


def _llamafactory(config: ConfigText) -> Iterator[Finding]:
    """What `llamafactory-cli` refuses after parsing everything (hparams/parser.py), and unknown keys."""
    if not _is_llamafactory(config):
        return
    given = config.content
    for key, clashes in _clashes(given):
        if clashes:
            with_what = ", ".join(f"{name}: {given[name]}" for name in clashes if name in given) or "–"
            values = {"key": key, "value": given[key], "others": with_what}
            yield told(
                "config-llamafactory-clash", [config.dropped(key), *map(config.place, clashes)], values
            )
    for fact in without_bf16(find_gpus()[0] if str(given.get("flash_attn")) == "fa2" else ()):
        yield in_words(fact, [config.changed("flash_attn", "sdpa")])
    if given.get("do_train") and given.get("stage") in STAGES[1:] and not given.get("template"):
        yield told("config-no-template", [config.place("stage")], certainty="possible")


def _clashes(given: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """A refused key, and the keys that are the reason; an empty list if there is none."""
    zero3 = (
        ["deepspeed"] if any(word in str(given.get("deepspeed")).lower() for word in ("z3", "zero3")) else []
    )
    kind = ["finetuning_type"]

    def found(key: str, because: list[str]) -> tuple[str, list[str]]:
        return key, because if given.get(key) not in (None, False) else []

    yield found(
        "quantization_bit", kind if given.get("finetuning_type", "lora") not in ("lora", "oft") else []
    )
    yield found("adapter_name_or_path", kind if given.get("finetuning_type", "lora") != "lora" else [])
    yield found("quantization_bit", ["export_dir"] if "export_dir" in given else [])
    yield found("quantization_device_map", ["stage"] if given.get("do_train") else [])
    yield found("resize_vocab", ["quantization_bit"] if given.get("quantization_bit") else [])
    for key in ("predict_with_generate", "pure_bf16", "use_unsloth", "pissa_init"):
        yield found(key, zero3)
    for key in ("neat_packing", "train_on_prompt", "mask_history"):
        yield found(key, ["stage"] if given.get("stage") not in (None, "sft") else [])
    for key in ("use_galore", "use_apollo"):
        yield found(key, ["deepspeed"] if given.get("deepspeed") else [])
    yield found("fp16", ["bf16"] if given.get("bf16") is True else [])
    yield found("streaming", ["stage"] if "max_steps" not in given and given.get("do_train") else [])


# --------------------------------------------------------------------------------------------------------- TRL


def _trl(config: ConfigText) -> Iterator[Finding]:
    given = config.content
    if not RUN & given.keys() or _is_llamafactory(config) or FOREIGN & given.keys():
        return
    yield from device_maps(config)
    if "num_generations" in given or "reward_funcs" in given:
        yield from _groups(config)
    yield from _precisions(config, "fp16", "bf16")


def device_maps(config: ConfigText) -> Iterator[Finding]:
    """Device maps over several devices, in `model_init_kwargs` and everywhere else."""
    if keys := list(spread_in(config.content)):
        yield told("script-device-map", [config.changed(key, None) for key in keys])


def _groups(config: ConfigText) -> Iterator[Finding]:
    if numbers := grpo.numbers_of(config.content):
        key, value = grpo.better(numbers)
        for fact in grpo.cut_groups(numbers):
            yield in_words(fact, [config.changed(key, value) if value else config.place(key)])


# -------------------------------------------------------------------------------------------------------- keys


def _keys(config: ConfigText) -> Iterator[Finding]:
    """Keys that the program does not read: of another release, or misspelled."""
    program = _program(config)
    if program is None:
        return
    versions = Versions.beside(config.path, installed=config.installed)
    keys = Keys(program, versions)
    if keys.table is None:
        return
    slips: dict[str, str] = {}
    for key in _asked(config, program):
        name = key.rpartition(".")[2]
        if why := keys.gone(name):
            sure, evidence = versions.certainty(why.table, why.bounds.until if why.bounds else None)
            proof = [evidence, read_from(why.table)]
            yield _of_other_release(config, key, keys, why, sure, proof)
        elif near := keys.near(name):
            slips[key] = near
    if slips:
        names = ", ".join(key.rpartition(".")[2] for key in slips)
        values = {"program": keys.schema.program, "key": names, "near": ", ".join(slips.values())}
        places, proof = [config.renamed(*each) for each in slips.items()], [read_from(keys.table)]
        yield told("config-unknown-key", places, values, certainty="likely", evidence=proof)


def _of_other_release(
    config: ConfigText, key: str, keys: Keys, why: Refused, sure: str, proof: list[Text]
) -> Finding:
    assert why.bounds is not None
    package, name = why.table.package, key.rpartition(".")[2]
    if why.bounds.since is None:
        values = wording(keys.schema.program, name, why.renamed, package, why.bounds.specifier)
        place = config.renamed(key, why.renamed) if why.renamed else config.dropped(key)
        return told("script-removed-keyword", [place], values, certainty=sure, evidence=proof)
    values = {"name": name, "package": package, "release": why.bounds.shown}
    values["pin"] = f"{package}{why.bounds.specifier}"
    return told("script-name-later", [config.place(key)], values, certainty=sure, evidence=proof)


def _program(config: ConfigText) -> str | None:
    """The program that reads a config, as far as its keys show."""
    given = config.content
    if isinstance(given.get("zero_optimization"), Mapping):
        return "deepspeed"
    if "base_model" in given:
        return None  # axolotl's: it may have an `fsdp_config` with keys of its own
    if given.keys() & OF_ACCELERATE:
        return "accelerate"
    if _is_llamafactory(config):
        return "llamafactory"
    if given.keys() & OF_SWIFT:
        return "ms-swift"
    return "trl" if RUN & given.keys() and not FOREIGN & given.keys() else None


def _asked(config: ConfigText, program: str) -> list[str]:
    """The keys of a config to look up: those that the program reads itself."""
    if program == "deepspeed":
        free = ("optimizer.params.", "scheduler.params.")
        return [key for key in config.spots if not key.startswith(free)]
    nested = ("fsdp_config.", "deepspeed_config.") if program == "accelerate" else ()
    return [key for key in config.spots if "." not in key or key.startswith(nested)]
