"""The command that continues: in the words of each tool, and for scripts by what they parse."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from reshard.final.saved_checkpoints import FoundCheckpoint
from reshard.runs.checks.command.read_command import StartedProgram
from reshard.runs.guard.end.resume import Resume, resume_of

OUT = Path("/out")
TOOLS = {
    "swift sft --model m --resume_from_checkpoint /old --learning_rate 1e-4": (
        "swift.cli.sft",
        "swift sft --model m --learning_rate 1e-4 --resume_from_checkpoint /out/checkpoint-20",
    ),
    "megatron sft --mcore_model base --finetune true --no_load_optim true --tp 2": (
        "swift.cli._megatron.sft",
        "megatron sft --tp 2 --mcore_model /out/checkpoint-20 --finetune false",
    ),
    "megatron sft --mcore_model base --tuner_type lora": (
        "swift.cli._megatron.sft",
        "megatron sft --mcore_model base --tuner_type lora --mcore_adapter /out/checkpoint-20 --finetune false",
    ),
    "llamafactory-cli train sft.yaml learning_rate=1e-5": (
        "llamafactory.launcher",
        "llamafactory-cli train sft.yaml learning_rate=1e-5 resume_from_checkpoint=/out/checkpoint-20",
    ),
    "llamafactory-cli train --stage sft --overwrite_output_dir --do_train": (
        "llamafactory.launcher",
        "llamafactory-cli train --stage sft --do_train --resume_from_checkpoint /out/checkpoint-20",
    ),
    "axolotl train cfg.yaml --launcher torchrun -- --nproc-per-node 2": (
        "axolotl.cli.train",
        "axolotl train cfg.yaml --launcher torchrun --resume-from-checkpoint /out/checkpoint-20 -- --nproc-per-node 2",
    ),
    "python -m verl.trainer.main_ppo trainer.resume_mode=auto a.b=1": (
        "verl.trainer.main_ppo",
        "python -m verl.trainer.main_ppo a.b=1 trainer.resume_mode=resume_path "
        "trainer.resume_from_path=/out/checkpoint-20",
    ),
    "torchrun -m torchtitan.train --module llama3 --config debug": (
        "torchtitan.train",
        "torchrun -m torchtitan.train --module llama3 --config debug --checkpoint.load_step 20",
    ),
}


def found(step: int = 20, folder: Path = OUT) -> FoundCheckpoint:
    return FoundCheckpoint(folder / f"checkpoint-{step}", step, "huggingface", 0.0)


@pytest.mark.parametrize("typed", TOOLS)
def test_a_tool_continues_in_its_own_words(typed: str) -> None:
    module, expected = TOOLS[typed]
    resume = resume_of(StartedProgram(tuple(shlex.split(typed)), module=module), found())
    assert resume.words and shlex.join(resume.words) == expected


def test_an_ms_swift_run_goes_on_in_its_own_folder() -> None:
    folder = OUT / "v0-20250101-120000"
    words = ("swift", "sft", "--output_dir", "/out", "--model", "m")
    resume = resume_of(StartedProgram(words, module="swift.cli.sft"), found(20, folder))
    assert resume.words and shlex.join(resume.words) == (
        f"swift sft --model m --resume_from_checkpoint {folder}/checkpoint-20 --output_dir {folder} --add_version false"
    )


def test_old_scripts_of_trl_start_again() -> None:
    words = ("trl", "sft", "--model_name_or_path", "m")
    started = StartedProgram(words, module="trl.scripts.sft", versions={"trl": "1.14.0"})
    assert 'trainer.train(resume_from_checkpoint="/out/checkpoint-20")' in resume_of(started, found()).advice
    started = StartedProgram(words, module="trl.scripts.sft", versions={"trl": "1.15.0"})
    assert resume_of(started, found()).words == (*words, "--resume_from_checkpoint", "/out/checkpoint-20")


def of_script(folder: Path, text: str, *words: str) -> Resume:
    script = folder / "train.py"
    script.write_text(text)
    return resume_of(StartedProgram(("torchrun", "train.py", *words), script), found())


PARSES = (
    "from transformers import HfArgumentParser\n(args,) = HfArgumentParser(T).parse_args_into_dataclasses()\n"
)


def test_a_trainer_script_continues_only_if_it_passes_the_option_on(tmp_path: Path) -> None:
    passes = PARSES + "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)\n"
    resume = of_script(tmp_path, passes, "--overwrite_output_dir", "--lr", "1")
    assert resume.words == (
        *("torchrun", "train.py", "--lr", "1"),
        *("--resume_from_checkpoint", "/out/checkpoint-20"),
    )
    resume = of_script(tmp_path, passes, "args.json")
    assert resume.advice == "set resume_from_checkpoint to /out/checkpoint-20 in args.json"
    resume = of_script(tmp_path, PARSES + "trainer.train()\n")
    assert resume.words is None and f"in {tmp_path}/train.py:3, write " in resume.advice
    assert '`trainer.train(resume_from_checkpoint="/out/checkpoint-20")`' in resume.advice


@pytest.mark.parametrize(
    ("option", "added"),
    [
        ('"--resume_from_checkpoint", type=str', ("--resume_from_checkpoint", "/out/checkpoint-20")),
        ('"--load-dir", default=None', ("--load-dir", "/out/checkpoint-20")),
        ('"-r", "--resume", action="store_true"', ("--resume",)),
        ('"--load_in_8bit", action="store_true"', None),
    ],
)
def test_a_script_with_an_option_of_its_own(
    option: str, added: tuple[str, ...] | None, tmp_path: Path
) -> None:
    text = f"import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({option})\n"
    resume = of_script(tmp_path, text, "--lr", "1")
    assert resume.words == (added and ("torchrun", "train.py", "--lr", "1", *added))
    assert added or "has no option for that" in resume.advice


def test_megatron_lm_loads_the_folder_of_the_run(tmp_path: Path) -> None:
    text = "from megatron.training import pretrain\npretrain()\n"
    resume = of_script(tmp_path, text, "--finetune", "--load", "/base", "--no-load-optim", "--bf16")
    assert resume.words == ("torchrun", "train.py", "--bf16", "--load", "/out")


def test_a_shell_script_is_not_given_options_that_it_does_not_pass_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PARSES + "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)\n")
    resume = resume_of(StartedProgram(("bash", "run.sh"), script), found())
    added = ("--resume_from_checkpoint", "/out/checkpoint-20")
    assert resume == Resume(advice=f"add {'='.join(added)} to its command", options=added)
