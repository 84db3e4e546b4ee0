"""As `tests/bad_input/remedy_cases.py`: runs that `reshard train` refuses before anything starts.

Each command is a dry run: it does everything that a run does before its ranks are started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from reshard.training.run import Run
from tests.bad_input.damage import edit_config
from tests.bad_input.remedy_cases import Case
from tests.commandline import reshard
from tests.train.conftest import chats, preferences, prompts, rated, write_lines

Change = Callable[[Path], object]
ROWS = {
    "sft": chats,
    "dpo": preferences,
    "kto": rated,
    "reward": preferences,
    **dict.fromkeys(("grpo", "rloo", "distillation"), prompts),
}
EVALUATED = {"--eval-data": "more.jsonl"}


def case(
    words: str = "",
    given: Mapping[str, str] | None = None,
    change: Change = lambda there: None,
    then: Collection[str] = (),
    *,
    method: str = "sft",
    model: str = "qwen3",
    needed: str = "--model model --data data.jsonl -o out",
) -> Case:
    """A dry run on a model and data that are in order, with more `words` and a `change`."""

    def all_changes(there: Path) -> None:
        rows = ROWS[method]()
        write_lines(there / "data.jsonl", rows)
        write_lines(there / "more.jsonl", rows[:8])
        (there / "score.py").write_text(
            "def score(completions, **columns):\n    return [0.0] * len(completions)\n"
        )
        change(there)

    command = f"train {method} {needed} --dry-run {words}"
    return Case({"model": model}, command, given or {}, all_changes, then)


def megatron(words: str, given: Mapping[str, str] | None = None, **more: Any) -> Case:
    return case(f"--engine megatron {words}", given, **more)


def rows(*content: object) -> Change:
    """Replace the data."""
    return lambda there: write_lines(there / "data.jsonl", [*content] * 8)  # type: ignore[list-item]


def config(text: str) -> Change:
    """A config file."""
    return lambda there: (there / "run.yaml").write_text(text)


def model(**changes: Any) -> Change:
    """Change the model's config.json."""
    return lambda there: edit_config(there / "model", **changes)


def tokenizer(**changes: Any) -> Change:
    """Change the tokenizer's settings: None removes one."""

    def change(there: Path) -> None:
        path = there / "model/tokenizer_config.json"
        kept = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))

    return change


def ran(there: Path) -> None:
    """An output of a run before, without a checkpoint."""
    (there / "out").mkdir()
    record = Run("sft", there / "model", there / "data.jsonl", there / "out").as_dict()
    (there / "out/run.json").write_text(json.dumps(record, default=str))


def misnamed(there: Path) -> None:
    (there / "model/model.safetensors").rename(there / "model/weights.safetensors")


def in_a_folder(there: Path) -> None:
    (there / "folder").mkdir()
    (there / "data.jsonl").rename(there / "folder/train.jsonl")
    (there / "more.jsonl").rename(there / "folder/test.jsonl")
    write_lines(there / "other.jsonl", ROWS["sft"]())


def indexed(there: Path) -> None:
    """Megatron's own dataset beside the data."""
    from tests.train.test_indexed import write

    write(there / "books", there / "model", 0, 60)


def of_a_run(there: Path) -> None:
    """The record of a run beside the model, as in a checkpoint."""
    record = Run("sft", there / "model", there / "data.jsonl", there / "out").as_dict()
    (there / "model/run.json").write_text(json.dumps(record, default=str))


def without_record(there: Path) -> None:
    assert reshard("convert", "model", "ckpt", "--to", "megatron").code == 0


def with_a_broken_record(there: Path) -> None:
    without_record(there)
    (there / "ckpt/run.json").write_text("{")


CONVERTED = {"CHECKPOINT": "ckpt", "DST": "dst", "DIR": "model"}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
REWARD = "--reward score.py:score"
GRPO = f"{REWARD} --num_generations 4 --per_device_train_batch_size 4"
STARTED: dict[str, dict[str, str]] = {
    "launcher-processes-differ": {"ACCELERATE_MIXED_PRECISION": "no"},
    "local-rank-not-set": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
}
"""What a launcher has set, by the code of the problem."""
CASES: dict[str, list[Case]] = {
    # -------------------------------------------------------------------------------------------- request
    "option-missing": [
        case(
            needed="--data data.jsonl -o out", given={"--config": "run.yaml"}, change=config("model: model\n")
        ),
        case(needed="--model model --dta data.jsonl -o out"),
    ],
    "train-datasets-malformed": [
        case(
            "--config run.yaml",
            {"--data": "data.jsonl"},
            config("datasets: [1]\n"),
            needed="--model model -o out",
        )
    ],
    "train-config-unreadable": [case("--config nowhere.yaml", {"--config": "run.yaml"}, config("seed: 1\n"))],
    "revision-given-twice": [
        case(
            needed="--model hf://Org/Model@main --model-revision main --data data.jsonl -o out",
            then={"hub-offline"},
        )
    ],
    "model-not-hugging-face": [
        case(needed="--model nowhere --data data.jsonl -o out", given={"--model": "model"})
    ],
    "data-not-found": [
        case(needed="--model model --data gone -o out", given={"--data": "data.jsonl"}),
        case("--eval-data gone", EVALUATED),
    ],
    "engine-method-unsupported": [megatron("", method="dpo")],
    "reward-missing": [
        case(method="grpo", words=GRPO.replace(REWARD, ""), given={"--reward": "score.py:score"})
    ],
    "reward-not-taken": [case(REWARD)],
    "run-to-resume-missing": [
        case(
            "--resume",
            {"--model": "model", "--data": "data.jsonl"},
            needed="-o out",
            then={"option-missing", "checkpoint-to-resume-missing"},
        )
    ],
    # ----------------------------------------------------------------------------------------------- data
    "columns-missing": [
        case(change=rows(PAIR)),
        case("", change=rows({"prompt": "a"}), then={"reward-missing", "script-grpo-arithmetic"}),
        case(method="dpo", change=rows({"messages": MESSAGES})),
    ],
    "record-of-several-shapes": [case(change=rows({"messages": MESSAGES, "text": "a"}))],
    "system-message-without-chats": [
        case("--system Brief.", change=rows({"text": "What is a plus b? " * 3}))
    ],
    "held-out-file-trained-on": [
        case(
            needed="--model model --data folder -o out",
            change=in_a_folder,
            given={"--data": "other.jsonl", **EVALUATED, "--eval-data": "folder/test.jsonl"},
        ),
    ],
    "tokenizer-without-end": [case("", {"--eos_token": "<|endoftext|>"}, tokenizer(eos_token=None))],
    "records-teach-nothing": [
        megatron("--seq_length 1", {"--seq_length": "64"}),
        case("--max_length 1", {"--max_length": "64"}),
    ],
    # --------------------------------------------------------------------------------- model and output
    "output-not-empty": [case(change=ran, then={"checkpoint-to-resume-missing"})],
    "checkpoint-to-resume-missing": [case("--resume")],
    "weights-misnamed": [case(change=misnamed)],
    "train-megatron-lacks-family": [megatron("", {"DST": "dst"}, model="llama4")],
    "latent-attention-tensor-parallel": [
        megatron("--tp 2 --nproc 2", {"--pp": "2", "--ep": "1"}, model="deepseek_v3")
    ],
    "packing-unsupported": [megatron("", model="gpt_oss")],
    "experts-would-drift-apart": [
        megatron("--tp 2 --nproc 2 --expert_tensor_parallel_size 1", model="qwen3_moe")
    ],
    # --------------------------------------------------------------------------------------------- planning
    "planned-gpu-unknown": [
        case("--gpus H10:8"),
        case("--gpus frob:8", {"NUMBER": "8", "SIZE": "80GB"}),
    ],
    "planned-gpus-unclear": [case("--gpus H100:many")],
    "planned-gpu-memory-missing": [case("--gpus 8", {"NAME:8": "H100:8"})],
    "planning-flags-incomplete": [
        case("--gpu-memory 80GB", {"--gpus": "8"}),
        case("--gpus H100:8 --slurm nodes=1", then={"executor-silent"}),
    ],
    "rendezvous-local": [
        case("--nnodes 2 --nproc 1", {"--node-rank": "0", "--rendezvous": "localhost:29500"})
    ],
    "launcher-processes-differ": [case("--nproc 2")],
    "local-rank-not-set": [
        case("--nproc 1", {"--nnodes": "2", "--node-rank": "0", "--rendezvous": "localhost:29500"})
    ],
    "indexed-data-unsupported": [
        case(needed="--model model --data books -o out", change=indexed, words="--nproc 1")
    ],
    "indexed-data-too-short": [
        megatron(
            "--seq_length 100000",
            {"--seq_length": "32"},
            needed="--model model --data books -o out",
            change=indexed,
        )
    ],
    "run-record-missing": [Case({"model": "qwen3"}, "export ckpt dst", CONVERTED, without_record)],
    "run-record-unreadable": [Case({"model": "qwen3"}, "export ckpt dst", CONVERTED, with_a_broken_record)],
    "final-adapter-missing": [Case({"model": "qwen3"}, "export model dst --merge", {}, of_a_run)],
    # ---------------------------------------------------------------------------------------------------- TRL
    "trl-parallelism-unsupported": [
        case("--pp 2 --nproc 2"),
        case("--cp 2 --nproc 2", then={"context-parallel-needs-transformer-engine"}),
    ],
    "ranks-not-divisible-by-tp": [case("--parallel tp --tp 4 --nproc 6", {"--tp": "2"})],
    "trl-experts-follow-tp": [case("--ep 2 --nproc 2", {"--tp": "2", "--ep": "2"}, model="qwen3_moe")],
    "tensor-and-data-parallel": [case("--parallel tp --tp 2 --nproc 4 --lora")],
    "grpo-evaluation-groups-cut": [
        case(f"{GRPO} --eval-data more.jsonl --per_device_eval_batch_size 3", method="grpo")
    ],
    "trl-method-plan-unsupported": [
        case("--parallel tp --tp 2 --nproc 2 --teacher_model_name_or_path model", method="distillation")
    ],
    "option-package-not-installed": [
        case("--use_liger_kernel"),
        case("--optim adamw_bnb_8bit"),
        case("--attn_implementation kernels-community/flash-attn"),
        case(f"{GRPO} --use_vllm", method="grpo"),
    ],
    "tracker-not-installed": [case("--report_to wandb")],
    "best-checkpoint-undefined": [case("--eval-data more.jsonl --save_strategy best")],
    "expert-adapters-tensor-parallel": [case("--lora --parallel tp --tp 2 --nproc 2", model="qwen3_moe")],
    "reward-model-adapters": [case("--lora", method="reward")],
    "padding-free-with-max-length": [case("--padding_free")],
    "reference-model-not-saved": [
        case("--resume --sync_ref_model", method="dpo", then={"checkpoint-to-resume-missing"})
    ],
    "checkpoints-without-optimizer": [
        case("--resume --save_only_model", then={"checkpoint-to-resume-missing"})
    ],
    "evaluation-data-missing": [case("--eval_steps 2", EVALUATED), megatron("--eval_interval 2", EVALUATED)],
    "option-needs-evaluation": [
        case("--eval-data more.jsonl --eval_strategy no --save_strategy best --metric_for_best_model loss")
    ],
    "lora-relative-tensor-parallel": [case("--lora --use_dora --parallel tp --tp 2 --nproc 2")],
    "model-size-not-divisible": [case("--parallel tp --tp 3 --nproc 6")],
    "lora-option-without-lora": [case("--lora_r 8"), megatron("--lora_r 8")],
    "reward-weights-disagree": [
        case(f"{GRPO} --reward_weights 1 2", {"--reward": "score.py:score:0.5"}, method="grpo")
    ],
    "adapter-unties-head": [
        case("--lora --lora_modules_to_save lm_head", change=model(tie_word_embeddings=True))
    ],
    "peft-cannot-adapt": [
        case(r"--lora --lora_target_modules .*\.q_porj", {"--lora_target_modules": "q_proj"})
    ],
    "option-not-in-config": [case("--max_step 3"), case("--frob 3")],
    "option-not-passed-on": [
        *(
            case(
                f"--{name} {value}",
                {"--save-on-signal": "60", "N": "2"},
                then={"train-package-not-installed"} if name == "deepspeed" else (),
            )
            for name, value in {
                "fsdp": "full_shard",
                "deepspeed": "zero.json",
                "push_to_hub": "true",
                "enable_jit_checkpoint": "true",
            }.items()
        ),
        megatron("--tensor_model_parallel_size 2", {"--tp": "1"}),
        megatron("--params_dtype bf16"),
        megatron("--use_megatron_fsdp"),
        megatron("--moe_use_legacy_grouped_gemm", model="qwen3_moe"),
    ],
    "model-init-kwarg-not-passed-on": [
        case('--model_init_kwargs {"dtype":"float32"}', {"--dtype": "float32"})
    ],
    "teacher-missing": [case(method="distillation", given={"DIR": "model"})],
    # ----------------------------------------------------------------------------------------------- Megatron
    "megatron-parallelism-unsupported": [megatron("--parallel fsdp2")],
    "megatron-option-unknown": [megatron("--learning_rate 1e-5"), megatron("--frobnicate 1")],
    "recompute-method-alone": [megatron("--recompute_method uniform --recompute_num_layers 1")],
    "megatron-weight-decay-without-ends": [megatron("--weight_decay_incr_style linear")],
    "megatron-weight-decay-is-constant": [
        megatron("--start_weight_decay 0.1 --end_weight_decay 0.2", {"--weight_decay": "0.1"})
    ],
    "megatron-wsd-without-steps": [megatron("--lr_decay_style WSD", {"--lr_wsd_decay_iters": "2"})],
    "batch-not-divisible": [megatron("--global_batch_size 3 --micro_batch_size 2")],
    "sequence-not-divisible": [megatron("--tp 2 --nproc 2 --seq_length 63")],
    "transformer-engine-not-installed": [megatron("--transformer_impl transformer_engine")],
    "context-parallel-needs-transformer-engine": [megatron("--cp 2 --nproc 2")],
    "ranks-not-divisible": [megatron("--tp 2 --nproc 3")],
    "ranks-not-divisible-by-experts": [megatron("--ep 2 --tp 2 --nproc 2", {"--ep": "1"}, model="qwen3_moe")],
}
