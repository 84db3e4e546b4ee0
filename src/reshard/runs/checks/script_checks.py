"""What is wrong with a training script, by reading it: each check looks for one mistake."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Launch
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.script import Call, Script
from reshard.runs.checks.script_api import names_of_other_releases
from reshard.runs.checks.script_device_maps import export_device_map, spread_models

SHARDERS = ("fully_shard", "FSDP", "FullyShardedDataParallel", "parallelize_module")


def check_script(source: Script, launch: Launch | None = None) -> list[Finding]:
    """What is wrong with a script, if it is started so. Nothing of it is executed."""
    is_alone = launch is not None and launch.is_alone
    checks = (*SCRIPT_CHECKS, *(() if is_alone else SEVERAL_PROCESSES_CHECKS))
    return [finding for check in checks for finding in check(source, launch)]


_FIRST_RANK = re.compile(r"\bmodel_tp0_pp|\bmp_rank_00\b")
_OTHER_RANKS = re.compile(r"model_tp(?:\{|\*|%|\\d|[1-9])|mp_rank_(?:\{|\*|%|\\d|0[1-9])")


def first_rank_only(source: Script, _: Launch | None) -> Iterator[Finding]:
    """Only the files of tensor-parallel rank 0 are read: InternLM's `model_tp0_pp*`, Megatron's `mp_rank_00`."""
    if not source.find("load_state_dict") or _OTHER_RANKS.search(source.text):
        return
    constants = (node for node in ast.walk(source.tree) if isinstance(node, ast.Constant))
    for each in constants:
        is_text = isinstance(each.value, str) and "\n" not in each.value  # a docstring may mention it
        if is_text and _FIRST_RANK.search(str(each.value)):
            yield rules.finding("script-first-rank-only", [source.place(each.lineno)])
            return


_OPTIMIZER = re.compile(r"\boptim(?:izers?)?\.[A-Z]\w+$|^(?:AdamW?(?:8bit)?|SGD|Adafactor|FusedAdam|Lion)$")
_SET_AGAIN = re.compile(r"""\[["']params["']\]\s*=""")
"""A script that passes the new parameters to the optimizer itself."""


def optimizer_before_sharding(source: Script, _: Launch | None) -> Iterator[Finding]:
    """An optimizer with the parameters that sharding then replaces."""
    optimizers = [call for call in source.calls if _OPTIMIZER.search(call.name)]
    for optimizer in [] if _SET_AGAIN.search(source.text) else optimizers:
        made_of = ast.unparse(optimizer.node)
        models = {name for name in optimizer.names() if f"{name}.parameters" in made_of}
        for call in source.find(*SHARDERS):
            is_later = call.line > optimizer.line and call.where.scope == optimizer.where.scope
            if is_later and models & call.names():
                places = [source.place(optimizer.line), source.place(call.line)]
                yield rules.finding("script-optimizer-before-sharding", places)
                break


# ------------------------------------------------------------------------------------------------ guards of ranks

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce_scatter", "gather", "gather_for_metrics", "wait_for_everyone", "get_state_dict", "save_state"),
)
"""Functions of torch.distributed and methods of an Accelerator."""
TRAINER_METHODS = ("save_model", "evaluate", "predict")
MODEL_METHODS = (
    "save_pretrained",
    "generate",
    "state_dict",
    "save_checkpoint",
    "save_16bit_model",
    "full_tensor",
)
"""Methods that gather the parameters of a sharded model."""
ANY_RANK_METHODS = ("save_model", "get_state_dict", "save_state")
"""Methods that one rank may call as long as nothing is sharded."""
_DISTRIBUTED = re.compile(r"Accelerator|Trainer\b|FSDP|torch\.distributed|deepspeed|fully_shard")
_SHARDED = re.compile(
    r"\bfully_shard\(|\bFSDP\(|FullyShardedDataParallel\(|deepspeed\.initialize\(|\bDTensor\b|zero_?3|ZeRO-?3|deepspeed\s*="
    r"|fsdp\s*=|FullyShardedDataParallelPlugin"
)
_GATHERED = re.compile(
    r"GatheredParameters|state_dict_type\(|FullStateDictConfig|full_state_dict|summon_full"
)
"""Code that gathers the weights itself before it saves."""
_GROUP = re.compile(r"dist\b|distributed|accelerator|funcol|^comm$", re.IGNORECASE)
_MODEL = re.compile(r"model|unwrap|engine|fsdp", re.IGNORECASE)
_NO_MODEL = re.compile(
    r"tok|process|config|pipe|ema|lora_state|optimizer|sched|base_model$|vae|ref_|module", re.IGNORECASE
)


def rank_guard(source: Script, _: Launch | None) -> Iterator[Finding]:
    """Operations that all ranks must perform together, performed by one."""
    is_sharded = bool(_SHARDED.search(source.text))
    gathers = (is_sharded or "Accelerator(" in source.text) and not _GATHERED.search(source.text)
    guarded = [call for call in source.calls if call.where.guard is not None]
    alone = [call for call in guarded if _together(call, guarded) or (gathers and _of_model(call))]
    if not alone or not _DISTRIBUTED.search(source.text):
        return
    is_sure = is_sharded or not all(call.last in (*MODEL_METHODS, *ANY_RANK_METHODS) for call in alone)
    guards = sorted({call.where.guard for call in alone if call.where.guard})
    yield rules.finding(
        "script-rank-guard",
        [source.place(line) for line in (*(call.line for call in alone), *guards)],
        severity="error" if is_sure else "warning",
        certainty="likely" if is_sure else "possible",
        evidence=() if is_sure else [phrase_text("harmless-under-ddp")],
    )


def _together(call: Call, guarded: Sequence[Call]) -> bool:
    """Whether all ranks must make this call, and the others do not make it under another condition."""
    if call.last in TRAINER_METHODS:
        return "trainer" in call.owner.lower()
    if call.last not in COLLECTIVES or not _GROUP.search(call.owner):
        return False
    same = (each.where for each in guarded if each.last == call.last)
    return not any(where.scope == call.where.scope and where.others != call.where.others for where in same)


def _of_model(call: Call) -> bool:
    """Whether this gathers the parameters of a model that may be sharded."""
    if call.last not in MODEL_METHODS or call.keyword("state_dict") or call.keyword("is_main_process"):
        return False
    return bool(_MODEL.search(call.owner)) and not _NO_MODEL.search(call.owner)


ScriptCheck = Callable[[Script, Launch | None], Iterator[Finding]]
SCRIPT_CHECKS: tuple[ScriptCheck, ...] = (*(export_device_map, first_rank_only, names_of_other_releases),)
SEVERAL_PROCESSES_CHECKS: tuple[ScriptCheck, ...] = (spread_models, optimizer_before_sharding, rank_guard)
"""What breaks only if several processes run the script."""
