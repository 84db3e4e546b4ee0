"""The script of a recipe for TRL: a complete program of at most 60 lines, and accelerate's config for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.runs.train.methods import TrainingMethod
from reshard.runs.train.run_data import RecipeData, quoted


@dataclass(frozen=True)
class TrlScript:
    """What differs between scripts. `masks` says that the chat template does not mark the assistant's turns."""

    method: TrainingMethod
    data: RecipeData
    eval_data: RecipeData | None = None
    rewards: tuple[tuple[str, str], ...] = ()
    """File and function of each."""
    masks: bool = False

    def text(self) -> str:
        """The source code."""
        return (
            "\n".join([*self._imports(), "", *self._settings(), "", *self._data(), *self._training()]) + "\n"
        )

    def _imports(self) -> Iterator[str]:
        name = self.method.name
        yield f'"""{name} with TRL, written by `reshard train`. Change anything, and start it again: bash run.sh"""'
        yield ""
        if self.rewards:
            yield "import sys"
            yield ""
        yield "import reshard.guard"
        yield f"from datasets import {'Image, List, ' if self.data.images else ''}load_dataset"
        if self._rewrites:
            yield "from reshard.runs.guard.data.records import as_trl_reads"
        if self.masks:
            yield "from reshard.runs.train.assistant_labels import assistant_labels"
            yield "from transformers import AutoTokenizer"
        yield (
            f"from trl import ModelConfig, TrlParser, {name}Config, {name}Trainer, get_peft_config, "
            "get_quantization_config"
        )
        if self.rewards:
            yield ""
            for folder in dict.fromkeys(str(Path(file).parent) for file, _ in self.rewards):
                yield f"sys.path.insert(0, {quoted(folder)})"
        for file, function in self.rewards:
            yield f"from {Path(file).stem} import {function}"

    def _settings(self) -> Iterator[str]:
        yield "# Options in run.sh are fields of these classes."
        yield f"config, model = TrlParser(({self.method.name}Config, ModelConfig)).parse_args_and_config()"
        yield "config.model_init_kwargs = {"
        yield "    **(config.model_init_kwargs or {}),"
        yield '    "device_map": None,  # the launcher and the Trainer place the model'
        yield '    "dtype": model.dtype,'
        yield '    "revision": model.model_revision,'
        yield '    "attn_implementation": model.attn_implementation,'
        yield "}"

    def _data(self) -> Iterator[str]:
        yield f"train_data = {self.data.loading('train')}"
        if self.eval_data:
            yield f"eval_data = {self.eval_data.loading('test')}"
        sets = {"train_data": self.data, **({"eval_data": self.eval_data} if self.eval_data else {})}
        if self._rewrites:
            yield f'method = {{"method": {quoted(self.method.name.lower())}}}'
            for name in sets:  # to the columns and roles that TRL knows
                yield f"{name} = {name}.map(as_trl_reads, fn_kwargs=method, remove_columns={name}.column_names)"
        for name in sets if self.data.images else ():
            yield f'{name} = {name}.cast_column("images", List(Image()))'
        if self.masks:
            yield "tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)"
            yield "labels = assistant_labels(tokenizer)  # the loss covers what the assistant says"
            for name in sets:
                yield f"{name} = {name}.map(labels, remove_columns={name}.column_names)"
        yield ""

    @property
    def _rewrites(self) -> bool:
        """Whether the script brings records into the shape that TRL reads."""
        return self.data.rewritten or bool(self.eval_data and self.eval_data.rewritten)

    def _training(self) -> Iterator[str]:
        yield f"trainer = {self.method.name}Trainer("
        yield "    model=model.model_name_or_path,"
        yield "    args=config,"
        yield "    train_dataset=train_data,"
        if self.eval_data:
            yield "    eval_dataset=eval_data,"
        if self.rewards:
            yield f"    reward_funcs=[{', '.join(function for _, function in self.rewards)}],"
        yield from (f"    {line}" for line in self.method.more)
        yield "    peft_config=get_peft_config(model),"
        yield "    quantization_config=get_quantization_config(model),"
        yield "    callbacks=[reshard.guard.callback()],  # saves on a signal, and never saves NaN"
        yield ")"
        yield "trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)"
        yield "trainer.end()"


def accelerate_config(
    parallel: str, method: TrainingMethod, nproc: int, nnodes: int, *, cpu: bool = False
) -> dict[str, Any]:
    """accelerate's config for a plan, as `accelerate config` writes it."""
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"distributed_type": "MULTI_GPU"},
        "fsdp2": {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": True,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                # One rank of a node reads the weights; but a second model would stay empty on the others.
                "fsdp_cpu_ram_efficient_loading": not method.second_model,
            },
        },
        "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
        "zero3": {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": 3,
                "zero3_init_flag": True,
                "zero3_save_16bit_model": False,
            },
        },
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        **plans[parallel],
        "mixed_precision": "no",  # the Trainer's bf16 and fp16 decide
        "num_machines": nnodes,
        "num_processes": nproc * nnodes,
        "machine_rank": 0,
        "use_cpu": cpu,
    }
