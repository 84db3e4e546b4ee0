"""Diagnose a training script by reading it: each rule looks for one trap."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from reshard.doctor.finding import Finding, Place
from reshard.doctor.rules import told
from reshard.doctor.source import Call, Source, read_source

TRAINERS = (
    *("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer", "KTOTrainer"),
    *("ORPOTrainer", "RLOOTrainer", "PPOTrainer", "OnlineDPOTrainer"),
)
ARGUMENTS = (
    *(
        "TrainingArguments",
        "Seq2SeqTrainingArguments",
        "SFTConfig",
        "DPOConfig",
        "GRPOConfig",
        "RewardConfig",
    ),
    *("KTOConfig", "ORPOConfig", "RLOOConfig", "PPOConfig"),
)
SHARDERS = ("fully_shard", "FSDP", "FullyShardedDataParallel", "parallelize_module")
DISTRIBUTED = (*SHARDERS, *TRAINERS, "Accelerator", "init_process_group", "DistributedDataParallel", "DDP")
SPREAD = {"auto", "balanced", "balanced_low_0", "sequential"}

Rule = Callable[[Source], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule of scripts."""
    RULES.append(function)
    return function


def diagnose_script(path: str) -> list[Finding]:
    """What will go wrong in a script. Raises ReshardError if it is no Python."""
    source = read_source(path)
    return [finding for each in RULES for finding in each(source)]


@rule
def device_map(source: Source) -> Iterator[Finding]:
    """device_map='auto' in a script that trains, or that several processes run."""
    if not source.find(*DISTRIBUTED):
        return
    lines = [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.keyword) and node.arg == "device_map" and _is_spread(node.value)
    ]
    lines += [
        value.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "device_map" and _is_spread(value)
    ]
    places = [
        source.place(line, _DEVICE_MAP.sub(r"\1None", source.lines[line - 1])) for line in sorted(set(lines))
    ]
    if places:
        yield told("script-device-map", places)


_DEVICE_MAP = re.compile(r"""(device_map["']?\s*[=:]\s*)["']\w+["']""")


def _is_spread(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in SPREAD


@rule
def preloaded_model(source: Source) -> Iterator[Finding]:
    """A model that was loaded before a TRL trainer, without saying where it should lie."""
    for trainer in source.find(*TRAINERS[2:]):
        given = trainer.keyword("model")
        value = given.value if given else (trainer.node.args[0] if trainer.node.args else None)
        if not isinstance(value, ast.Name):
            continue
        loads = [c for c in source.assignments(value.id, trainer.node.lineno) if c.last == "from_pretrained"]
        if loads and loads[0].keyword("device_map") is None and not _quantized(loads[0]):
            line = loads[0].node.lineno
            mended = re.sub(r"\)\s*$", ", device_map=None)", source.lines[line - 1])
            place = source.place(line, mended if mended != source.lines[line - 1] else "")
            yield told(
                "script-preloaded-model", [place, source.place(trainer.node.lineno)], certainty="possible"
            )


def _quantized(call: Call) -> bool:
    return any(call.keyword(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))


@rule
def loaded_before_zero3(source: Source) -> Iterator[Finding]:
    """from_pretrained before the arguments that switch ZeRO-3 on."""
    switches = [call for call in source.find(*ARGUMENTS) if call.keyword("deepspeed")]
    models = [c for c in source.find("from_pretrained") if "Model" in c.owner or "Causal" in c.owner]
    early = [call for call in models if switches and call.node.lineno < switches[0].node.lineno]
    if early:
        places = [source.place(call.node.lineno) for call in early]
        yield told("script-zero3-order", places, {"line": switches[0].node.lineno}, certainty="likely")


@rule
def optimizer_before_sharding(source: Source) -> Iterator[Finding]:
    """An optimizer over the parameters that sharding then replaces."""
    for optimizer in source.calls:
        if not re.search(r"\boptim\.\w+$|^(?:AdamW?|SGD|Adafactor)$", optimizer.name):
            continue
        models = {name for name in optimizer.names() if ".parameters" in ast.unparse(optimizer.node)}
        later = [
            call
            for call in source.find(*SHARDERS)
            if call.node.lineno > optimizer.node.lineno and models & call.names()
        ]
        if later:
            places = [source.place(optimizer.node.lineno), source.place(later[0].node.lineno)]
            yield told("script-optimizer-before-sharding", places)


TOGETHER = (
    "generate",
    "evaluate",
    "save_model",
    "save_state",
    "save_checkpoint",
    "state_dict",
    "save_pretrained",
)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "wait_for_everyone",
    "get_state_dict",
    "gather",
)
SHARDED = re.compile(
    r"fully_shard|FSDP|FullyShardedDataParallel|deepspeed|zero3|DTensor|Accelerator|Trainer\b"
)


@rule
def rank_guard(source: Source) -> Iterator[Finding]:
    """What all ranks have to do together, done by one."""
    places = []
    sharded = SHARDED.search(source.text)
    for call in source.calls:
        if call.guard is None or re.search(r"tok|processor|config", call.owner, re.IGNORECASE):
            continue
        gathered = call.keyword("state_dict") is not None
        if call.last in COLLECTIVES or (call.last in TOGETHER and sharded and not gathered):
            places.append(source.place(call.node.lineno))
    if places:
        yield told("script-rank-guard", places, certainty="likely")


@rule
def no_set_device(source: Source) -> Iterator[Finding]:
    """NCCL without a device for each rank."""
    groups = [
        call
        for call in source.find("init_process_group")
        if "gloo" not in ast.unparse(call.node) and not call.keyword("device_id")
    ]
    if groups and "set_device" not in source.text and "Accelerator(" not in source.text:
        line = groups[0].node.lineno
        mended = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); ' + source.lines[line - 1].strip()
        yield told("script-no-set-device", [source.place(line, mended)])


_ARGUMENTS_REMOVED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
}
REMOVED = {
    **dict.fromkeys(ARGUMENTS, _ARGUMENTS_REMOVED),
    "SFTConfig": {**_ARGUMENTS_REMOVED, "max_seq_length": "max_length"},
    "GRPOConfig": {**_ARGUMENTS_REMOVED, "max_prompt_length": ""},
    "DPOConfig": {**_ARGUMENTS_REMOVED, "max_prompt_length": "", "max_target_length": ""},
    **{name: {"tokenizer": "processing_class"} for name in TRAINERS},
    "SFTTrainer": {
        "tokenizer": "processing_class",
        "max_seq_length": "",
        "packing": "",
        "dataset_text_field": "",
    },
}
"""Keyword arguments that today's transformers and TRL do not take any more, and what took their place."""


@rule
def removed_keyword(source: Source) -> Iterator[Finding]:
    """Arguments of older versions of TRL and transformers."""
    for call in source.find(*REMOVED):
        for keyword in call.node.keywords:
            if keyword.arg in REMOVED[call.last]:
                new = REMOVED[call.last][keyword.arg]
                line = source.lines[keyword.lineno - 1]
                pattern = rf"\b{keyword.arg}(\s*=)" if new else rf"\b{keyword.arg}\s*=\s*[^,)]+,?\s*"
                place = source.place(keyword.lineno, re.sub(pattern, new + r"\1" if new else "", line))
                values = {"name": call.last, "old": keyword.arg, "new": new or "–"}
                yield told("script-removed-keyword", [place], values)


@rule
def sharded_save(source: Source) -> Iterator[Finding]:
    """save_model() under SHARDED_STATE_DICT writes no weights."""
    saves = source.find("save_model")
    if "SHARDED_STATE_DICT" in source.text and saves:
        yield told("sharded-save-model", [source.place(saves[0].node.lineno)])


@rule
def grpo(source: Source) -> Iterator[Finding]:
    """Batch arithmetic of GRPO, and tensor parallelism beside it."""
    for call in source.find("GRPOConfig"):
        line = call.node.lineno
        numbers = {key: call.constant(key) for key in GRPO_KEYS}
        yield from grpo_arithmetic(numbers, _always(source.place(line)))
    parallel = re.compile(r"\btp_size\s*=\s*([2-9]|\d\d)|tp_plan\s*=\s*['\"]auto")
    if source.find("GRPOTrainer") and (match := parallel.search(source.text)):
        yield told("grpo-tensor-parallel", [source.place(source.text.count("\n", 0, match.start()) + 1)])


def _always(place: Place) -> Callable[[str], Place]:
    return lambda key: place


GRPO_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "generation_batch_size",
)


def grpo_arithmetic(numbers: dict[str, object], place: Callable[[str], Place]) -> Iterator[Finding]:
    """Whether the batch of a generation step holds whole groups of completions; TRL's defaults for what is not said."""
    batch, steps, group, explicit = (numbers.get(key) for key in GRPO_KEYS)
    group = 8 if group is None else group
    if not isinstance(group, int) or group < 2:
        if isinstance(group, int):
            yield told("grpo-one-generation", [place("num_generations")], {"group": group})
        return
    total = explicit if isinstance(explicit, int) else None
    if total is None and isinstance(batch, int):
        total = batch * (steps if isinstance(steps, int) else 1)
    if total is None or total % group == 0:
        return
    fitting = [ranks for ranks in range(1, 65) if total * ranks % group == 0]
    if explicit is not None or fitting != list(range(1, 65)):
        values = {"total": total, "group": group, "ranks": ", ".join(map(str, fitting[:4])) or "–"}
        sure = "sure" if explicit is not None or not fitting else "possible"
        where = place("per_device_train_batch_size")
        yield told("script-grpo-arithmetic", [where], values, certainty=sure)
