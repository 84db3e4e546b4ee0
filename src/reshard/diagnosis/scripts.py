"""Diagnose a training script by reading it: each rule looks for one mistake."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from reshard.checks import grpo
from reshard.diagnosis.exporters import export_device_map, first_rank_only
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.history.scripts import history_findings
from reshard.diagnosis.rules import in_words, told
from reshard.diagnosis.source import Call, Source, rank_side, read_source
from reshard.diagnosis.spread import device_map_findings
from reshard.diagnosis.words import words

Rule = Callable[[Source], Iterator[Finding]]
RULES: list[Rule] = [device_map_findings, export_device_map, first_rank_only, history_findings]
SHARDERS = ("fully_shard", "FSDP", "FullyShardedDataParallel", "parallelize_module")


def rule(function: Rule) -> Rule:
    """Register a rule of scripts."""
    RULES.append(function)
    return function


def diagnose_script(path: str) -> list[Finding]:
    """The findings about a script. Raises ReshardError if it is not Python."""
    return diagnose_source(read_source(path))


def diagnose_source(source: Source) -> list[Finding]:
    """The findings about a parsed script."""
    return [finding for each in RULES for finding in each(source)]


def _swapped(source: Source, first: Call, second: Call) -> list[Place]:
    """Two single-line statements in reverse order; without fixed lines if they are longer."""
    lines = [source.lines[call.line - 1] for call in (first, second)]
    whole = all(
        call.node.end_lineno == call.line and "(" in line
        for call, line in zip((first, second), lines, strict=True)
    )
    level = len({len(line) - len(line.lstrip()) for line in lines}) == 1
    if not (whole and level and all(_parses(line) for line in lines)):
        return [source.place(first.line), source.place(second.line)]
    return [source.place(first.line, lines[1]), source.place(second.line, lines[0])]


def _parses(line: str) -> bool:
    try:
        ast.parse(line.strip())
    except SyntaxError:
        return False
    return True


_MODEL = re.compile(r"Model\b|ModelFor|ForCausalLM|ForConditionalGeneration|LMHead")
_PARSED = (
    "parse_args_into_dataclasses",
    "parse_args_and_config",
    "parse_yaml_file",
    "parse_json_file",
    "parse_dict",
)


@rule
def loaded_before_zero3(source: Source) -> Iterator[Finding]:
    """from_pretrained before the arguments that enable ZeRO-3."""
    explicit = [
        call
        for call in source.calls
        if call.keyword("deepspeed") and call.last.endswith(("Arguments", "Config"))
    ]
    parsed = source.find(*_PARSED) if re.search("zero3|deepspeed", source.text, re.IGNORECASE) else []
    plugins = [call for call in source.find("Accelerator") if call.keyword("deepspeed_plugin")]
    loads = [c for c in source.find("from_pretrained") if _MODEL.search(c.owner) and not _low_memory(c)]
    for switch in (*explicit, *parsed, *plugins):
        early = [call for call in loads if call.line < switch.line and call.scope == switch.scope]
        if early:
            places = _swapped(source, early[-1], switch)
            sure = "possible" if switch in parsed else "likely"
            yield told("script-zero3-order", places, {"line": switch.line}, certainty=sure)
            return


def _low_memory(call: Call) -> bool:
    """Whether a model is not the trained one: a teacher or tokenizer on its own device."""
    return "Tokenizer" in call.owner or "Config" in call.owner or "Processor" in call.owner


_OPTIMIZER = re.compile(r"\boptim(?:izers?)?\.[A-Z]\w+$|^(?:AdamW?(?:8bit)?|SGD|Adafactor|FusedAdam|Lion)$")


@rule
def optimizer_before_sharding(source: Source) -> Iterator[Finding]:
    """An optimizer with the parameters that sharding then replaces."""
    if re.search(r"""\[["']params["']\]\s*=""", source.text):
        return  # the script passes the new parameters to the optimizer itself
    for optimizer in source.calls:
        if not _OPTIMIZER.search(optimizer.name):
            continue
        models = {name for name in optimizer.names() if f"{name}.parameters" in ast.unparse(optimizer.node)}
        later = [
            call
            for call in source.find(*SHARDERS)
            if call.line > optimizer.line and call.scope == optimizer.scope and models & call.names()
        ]
        if later:
            yield told("script-optimizer-before-sharding", _swapped(source, optimizer, later[0]))


ON_ALL_RANKS = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce_scatter",
)
OF_ACCELERATE = ("get_state_dict", "save_state", "gather", "gather_for_metrics", "wait_for_everyone")
OF_SHARDED = (
    "save_pretrained",
    "generate",
    "state_dict",
    "save_checkpoint",
    "save_16bit_model",
    "full_tensor",
)
OF_TRAINER = ("save_model", "evaluate", "predict")
STRONG = re.compile(
    r"\bfully_shard\(|\bFSDP\(|FullyShardedDataParallel\(|deepspeed\.initialize\(|\bDTensor\b|zero_?3|ZeRO-?3|deepspeed\s*="
    r"|fsdp\s*=|FullyShardedDataParallelPlugin"
)


@rule
def rank_guard(source: Source) -> Iterator[Finding]:
    """Operations that all ranks must perform together, performed by one."""
    if not re.search(r"Accelerator|Trainer\b|FSDP|torch\.distributed|deepspeed|fully_shard", source.text):
        return
    sharded = bool(STRONG.search(source.text))
    alone = [call for call in source.calls if call.guard is not None and _together(call, source, sharded)]
    surely = [
        call for call in alone if sharded or call.last in ON_ALL_RANKS or call.last in ("evaluate", "predict")
    ]
    for calls, sure in ((surely, True), ([call for call in alone if call not in surely], False)):
        if calls:
            guards = [_without_guard(source, line) for line in sorted({c.guard for c in calls if c.guard})]
            yield told(
                "script-rank-guard",
                [*(source.place(call.line) for call in calls), *guards],
                severity="error" if sure else "warning",
                certainty="likely" if sure else "possible",
                evidence=() if sure else [words("harmless-under-ddp")],
            )


def _together(call: Call, source: Source, sharded: bool) -> bool:
    """Whether this call, made by one rank only, must be made by all ranks."""
    if call.last in ON_ALL_RANKS or call.last in OF_ACCELERATE:
        return bool(call.owner) and not _both_sides(call, source) and _of_a_group(call)
    owner = call.owner.lower()
    if not owner or re.search(
        r"tok|process|config|pipe|ema|lora_state|optimizer|sched|base_model$|vae|ref_", owner
    ):
        return False
    if call.last in OF_TRAINER:
        return "trainer" in owner
    if call.last not in OF_SHARDED or call.keyword("state_dict") or call.keyword("is_main_process"):
        return False
    if call.last == "state_dict":
        return (
            sharded
            and "module" not in owner
            and bool(re.search("fsdp|model", owner))
            and not _saved_by_hand(source)
        )
    return bool(re.search("model|unwrap|engine|fsdp", owner)) and (sharded or "Accelerator(" in source.text)


def _of_a_group(call: Call) -> bool:
    """Whether a function with this name is torch.distributed's or accelerate's."""
    return (
        bool(re.search(r"dist\b|distributed|accelerator|funcol", call.owner, re.IGNORECASE))
        or call.owner == "comm"
    )


def _saved_by_hand(source: Source) -> bool:
    """Whether the script itself gathers the weights before it saves."""
    return bool(
        re.search(
            r"GatheredParameters|state_dict_type\(|FullStateDictConfig|full_state_dict|summon_full",
            source.text,
        )
    )


def _both_sides(call: Call, source: Source) -> bool:
    """Whether the other ranks make the same call under another condition."""
    return any(
        each.last == call.last
        and each.scope == call.scope
        and (each.guard is None or each.guard != call.guard or each.others != call.others)
        for each in source.calls
        if each.node is not call.node and (each.guard is not None) and each.others != call.others
    )


def _without_guard(source: Source, line: int) -> Place:
    """The line of a guard, with a condition that includes all ranks."""
    text = source.lines[line - 1]
    if text.strip().startswith("@"):
        return source.place(line, f"# {text.strip()}")
    match = re.match(r"(\s*(?:el)?if )(.+):\s*(?:#.*)?$", text)
    if match is None or not _parses(f"if {match[2]}: pass"):
        return source.place(line)
    test = ast.parse(match[2].strip(), mode="eval").body
    kept = [each for each in test.values if rank_side(each) is None] if isinstance(test, ast.BoolOp) else []
    leaves = re.match(r"\s*(?:return|sys\.exit|exit|os\._exit|continue)\b", source.lines[line])
    condition = " and ".join(map(ast.unparse, kept)) or str(not leaves)
    return source.place(line, f"{match[1]}{condition}:  # all ranks take part")


@rule
def no_set_device(source: Source) -> Iterator[Finding]:
    """NCCL without a device for each rank."""
    told_elsewhere = re.compile(
        r"set_device|device_id\s*=|init_device_mesh|deepspeed\.init|init_distributed|Accelerator\(|PartialState|cuda:\{|\"cuda:\""
        r"|device\([^)]*rank|\.(?:to|cuda)\([^)]*rank|CUDA_VISIBLE_DEVICES|import_module|parallel_state"
    )
    runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in source.tree.body)
    for call in source.find("init_process_group"):
        backend = call.constant("backend") or next(
            (each.value for each in call.node.args[:1] if isinstance(each, ast.Constant)), None
        )
        default = not call.node.args and call.keyword("backend") is None
        if told_elsewhere.search(source.text) or not (runs or not call.scope):
            return
        if "nccl" in str(backend) or (default and "cuda" in source.text):
            line = source.lines[call.line - 1].strip()
            imports = "" if re.search(r"^[ \t]*import .*\bos\b", source.text, re.MULTILINE) else "import os; "
            fixed = f'{imports}torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); {line}'
            yield told("script-no-set-device", [source.place(call.line, fixed * line.startswith(call.name))])
            return


@rule
def preloaded_model(source: Source) -> Iterator[Finding]:
    """A model that every process loads onto the same GPU before a trainer gets it."""
    for trainer in source.calls:
        given = trainer.keyword("model")
        value = given.value if given else (trainer.node.args[0] if trainer.node.args else None)
        if not (trainer.last.endswith("Trainer") and isinstance(value, ast.Name)):
            continue
        for load in source.assignments(value.id, trainer.line):
            device = load.keyword("device_map")
            if load.last == "from_pretrained" and device is not None and _is_one_device(device.value):
                places = [source.replaced(device.value, "None"), source.place(trainer.line)]
                yield told("script-preloaded-model", places, certainty="possible")
                return


def _is_one_device(value: ast.expr) -> bool:
    """Whether a device_map is a single GPU, the same for all processes."""
    if isinstance(value, ast.Dict):
        return len(value.values) == 1 and _is_one_device(value.values[0])
    return isinstance(value, ast.Constant) and (value.value == 0 or value.value in ("cuda", "cuda:0"))


@rule
def sharded_save(source: Source) -> Iterator[Finding]:
    """save_model() under SHARDED_STATE_DICT writes no weights."""
    saves = [
        call for call in source.find("save_model") if "trainer" in call.owner.lower() or call.owner == "self"
    ]
    chosen = [
        node for call in source.calls for each in call.node.keywords for node in _sharded_type(each.value)
    ]
    chosen += [node for value in source.values.values() for each in value for node in _sharded_type(each)]
    if saves and chosen:
        full = ast.unparse(chosen[0]).replace("SHARDED_STATE_DICT", "FULL_STATE_DICT").replace("'", '"')
        yield told("sharded-save-model", [source.replaced(chosen[0], full), source.place(saves[0].line)])


def _sharded_type(value: ast.expr) -> Iterator[ast.expr]:
    """Where SHARDED_STATE_DICT occurs in a value, unless it is only compared."""
    nodes = [value, *(value.values if isinstance(value, ast.Dict) else ())]
    for node in nodes:
        if (isinstance(node, ast.Constant) and node.value == "SHARDED_STATE_DICT") or (
            isinstance(node, ast.Attribute) and node.attr == "SHARDED_STATE_DICT"
        ):
            yield node


@rule
def groups_of_grpo(source: Source) -> Iterator[Finding]:
    """Batch sizes of GRPO, and tensor parallelism combined with it."""
    for call in source.find("GRPOConfig"):
        if numbers := grpo.numbers_of({key: _number(call, key) for key in grpo.KEYS}):
            place = _spot(source, call, *grpo.better(numbers))
            yield from (in_words(fact, [place]) for fact in grpo.cut_groups(numbers))
    parallel = re.compile(r"\btp_size\s*=\s*(?:[2-9]|\d\d)|tp_plan\s*=\s*['\"]auto['\"]")
    for node in ast.walk(source.tree) if source.find("GRPOTrainer") else ():
        if isinstance(node, ast.keyword) and (match := parallel.fullmatch(ast.unparse(node))):
            off = "1" if match[0].startswith("tp_size") else "None"
            yield told("grpo-tensor-parallel", [source.replaced(node.value, off)])
            return


def _number(call: Call, key: str) -> object:
    """A number, None if it is not given, and the expression if it is known only at run time."""
    keyword = call.keyword(key)
    if keyword is None:
        return None if all(each.arg for each in call.node.keywords) else "**"
    return keyword.value.value if isinstance(keyword.value, ast.Constant) else ast.unparse(keyword.value)


def _spot(source: Source, call: Call, key: str, better: int | None) -> Place:
    """The place of a keyword, with a better value; that of the call, if it does not have the keyword."""
    keyword = call.keyword(key)
    if keyword is None:
        return source.place(call.line)
    return source.replaced(keyword.value, str(better)) if better else source.place(keyword.lineno)
