"""What a run was given and cannot use: batches, files, names, arguments; and what a notebook needs besides a cure."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import SITE, first, raised

LOSS = "ValueError: The model did not return a loss from the inputs, only the following keys: "
GOT = ". For reference, the inputs it received are "
CELL = "Cell In[3], line 1\n----> 1 trainer.train()\n"
INPUTS = {
    f"{LOSS}logits,past_key_values{GOT}input_ids,attention_mask.": (
        "loss-missing",
        "DataCollatorForLanguage",
    ),
    f"{LOSS}last_hidden_state,pooler_output{GOT}input_ids,labels.": ("loss-missing", "AutoModelForCausalLM"),
    f"{LOSS}logits{GOT}input_ids,labels.": ("loss-missing", "signature(model.forward)"),
    "OSError: Unable to load weights from pytorch checkpoint file for '/m/a-00001-of-00007.bin' at '/m/a": (
        "weights-unreadable",
        "hf download REPOSITORY --local-dir /m ",
    ),
    "OSError: Unable to load weights from pytorch checkpoint file. If you tried to load a PyTorch model": (
        "weights-unreadable",
        "ls -la FOLDER",
    ),
    "ValueError: The state dictionary of the model you are trying to load is corrupted. Are you sure": (
        "weights-unreadable",
        "git lfs pull",
    ),
    "OSError: Can't load tokenizer for 'bert/vocab.txt'. Make sure that:": ("file-for-folder", "ls -la bert"),
    "OSError: Can't load tokenizer for 'bert-base-uncased'. If you were trying to load it from 'https://h": (
        "hub-name-not-read",
        "ls -d bert-base-uncased",
    ),
    "OSError: Can't load the configuration of 'org/name'. If you were trying to load it from": (
        "hub-name-not-read",
        "hf download org/name",
    ),
    "OSError: Can't load tokenizer for 'out/sft'. If you were trying to load it from 'https://huggingface": (
        "tokenizer-not-found",
        "cp BASE/",
    ),
    "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models. Please use": (
        "quantized-moved",
        "device_map=",
    ),
    raised("KeyError: 'pixel_values'", "x = inputs['pixel_values']"): ("key-modality", "processor.tokenizer"),
    raised("TypeError: __init__() got multiple values for argument 'model'", "T(args, model=m)"): (
        "call-twice",
        "args=training_args",
    ),
    "TypeError: __init__() got an unexpected keyword argument 'dispatch_batches'": (
        "keyword-owners",
        "-U transformers accelerate",
    ),
    raised(
        "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'enable_lora'",
        "config = config_cls(**kwargs)",
        f"{SITE}/peft/config.py",
    ): ("api-is-gone", "delete it there"),
    "TypeError: __init__() got an unexpected keyword argument 'checkpoint_callback'": (
        "lightning-arguments-gone",
        "enable_checkpointing=True",
    ),
    "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'frobnicated'": (
        "argument-of-none",
        "Delete `frobnicated`",
    ),
    "TypeError: NetForCausalLM.forward() got an unexpected keyword argument 'num_items_in_batch'": (
        "forward-refuses",
        "transformers<4.46.0",
    ),
    "TypeError: NetModel.forward() got an unexpected keyword argument 'token_type_ids'": (
        "forward-refuses",
        "return_token_type_ids",
    ),
    "TypeError: Seq2SeqTrainingArguments.init() got an unexpected keyword argument ‘evaluation_strategy’": (
        "api-is-gone",
        "eval_strategy=",
    ),
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'logging_dir'": (
        "api-is-gone",
        "project_dir=",
    ),
    "AttributeError: 'PeftModelForCausalLM' object has no attribute 'merge_and_unload'": (
        "api-came-later",
        "peft>=0.3.0",
    ),
    "AttributeError: 'FullyShardedDataParallelPlugin' object has no attribute 'activation_checkpointing'": (
        "api-came-later",
        "accelerate>=0.23.0",
    ),
    "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'enable_lora'": (
        "api-is-gone",
        "adapter_config.json",
    ),
    "AttributeError: 'DataParallel' object has no attribute 'generation_config'": (
        "attribute-of-wrapper",
        "CUDA_VISIBLE_DEVICES=0",
    ),
    "AttributeError: 'TrainingArguments' object has no attribute 'model_init_kwargs'": (
        "attribute-of-heir",
        "import SFTConfig",
    ),
    "trainer = DPOTrainer(m)\nAttributeError: 'TrainingArguments' object has no attribute 'model_init_kwargs'": (
        "attribute-of-heir",
        "import DPOConfig",
    ),
    "name ‘PeftModel’ is not defined": ("name-of-optional", "-U peft"),
    "Failed to read file 'a.json' with error <class 'pyarrow.lib.ArrowInvalid'>: Could not convert 'x' with"
    " type str: tried to convert to double\nValueError: Not able to read records in the JSON file at a.json.": (
        "data-mixed-types",
        "json.dumps",
    ),
    "ArrowTypeError: (\"Expected bytes, got a 'int' object\", 'Conversion failed for column id with type object')": (
        "data-mixed-types",
        'record["id"]',
    ),
    "ArrowInvalid: JSON parse error: Column() changed from object to array in row 0\n\nDuring handling of the above"
    " exception, another exception occurred:\n\nArrowTypeError: Expected bytes, got a 'int' object": (
        "data-mixed-types",
        "json.dumps",
    ),
    "ValueError:\nUnrecognized model in out/a. \nShould have a `model_type` key in its config.json": (
        "hf-no-config",
        "config.json",
    ),
}


@pytest.mark.parametrize("said", INPUTS, ids=lambda said: said.split("\n")[-1][-60:])
def test_what_a_run_cannot_use(said: str) -> None:
    found = first(said)
    code, cure = INPUTS[said]
    assert found.code == code and cure in found.remedy.en
    assert found.certainty != "sure" or code in SURE
    assert re.search(r"[\u4e00-\u9fff]", found.remedy.zh + found.rule.zh)


SURE = ("tokenizer-not-found", "hf-no-config")
"""Entries of the catalogue, which weigh a log's other lines."""


def test_an_unreadable_file_for_another_reason() -> None:
    memory = raised("RuntimeError: unable to mmap 4976 bytes from file <a.bin>: Cannot allocate memory (12)")
    later = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    said = "OSError: Unable to load weights from pytorch checkpoint file for 'a.bin' at 'a.bin'"
    assert first(memory + later + raised(said)).code != "weights-unreadable"


def test_a_run_that_trains_from_scratch_had_nothing_to_resume() -> None:
    lines = "No valid checkpoint found in output directory (out), training from scratch.\n"
    found = first(lines + raised("AttributeError: 'MyTrainer' object has no attribute 'frob'"))
    assert found.code != "resume-no-checkpoint"


def test_whose_line_moved_a_quantized_model() -> None:
    said = "ValueError: `.to` is not supported for `4-bit` or `8-bit` models. Please use the model as it is"
    own = first(raised(said, "model.to(0)"))
    assert "The script moves it itself" in own.rule.en
    package = first(raised(said, "model.to(0)", f"{SITE}/accelerate/big_modeling.py"))
    assert "accelerate moves it" in package.rule.en


def test_a_notebook_is_restarted_after_an_installation() -> None:
    said = "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.20.1`: Please run `pip install`"
    assert "restart" not in first(said).remedy.en
    found = first(CELL + said)
    assert "restart the runtime" in found.remedy.en and "重启" in found.remedy.zh
    installed = first(f"{CELL}{said}\naccelerate==0.20.3")
    assert installed.remedy.en.startswith("accelerate 0.20.3 is installed and satisfies this")


def test_an_exception_named_right_after_chinese_words() -> None:
    found = first(
        "报错AttributeError: 'FullyShardedDataParallelPlugin' object has no attribute 'activation_checkpointing'"
    )
    assert found.code == "api-came-later"
