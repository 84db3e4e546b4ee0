"""What the cases share: small models, their tokenizer and data, process groups and shards."""

import atexit
import datetime
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

MODEL = "models/qwen3"
CURED = os.environ.get("CURED") == "1"
"""Whether the case is to apply the cure of its entry, and to succeed."""
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
DATA = Path(__file__).parents[3] / "data"
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))


@atexit.register
def leave():
    """Without this gloo's threads, if they are late, abort a process that has done its work."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def join(timeout=60, backend="gloo"):
    """Join the process group; `timeout` is in seconds."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))


def load(path=MODEL, dtype=torch.float32, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def shard(model, **options):
    """FSDP2 over all processes, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tokens(length=8):
    return torch.arange(5, 5 + length).unsqueeze(0)


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def dataset():
    from datasets import Dataset

    sample = {"input_ids": list(range(5, 21)), "labels": list(range(5, 21)), "attention_mask": [1] * 16}
    return Dataset.from_list([sample] * 16)


def prompts(count=8):
    from datasets import Dataset

    return Dataset.from_list([{"prompt": "What is 1"}] * count)


def no_reward(completions, **_):
    return [0.0] * len(completions)


def arguments(**changes):
    from transformers import TrainingArguments

    usual = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments("out", **{**usual, **changes})


def copied(name):
    """A copy of a model's folder, to be spoiled."""
    return Path(shutil.copytree(Path("models") / name, Path("out") / name))


def edited(path, **changes):
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_lora(model, **options):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options}))


def remote_code(imports=""):
    """A model's folder with code of its own, whose modeling file begins with `imports`."""
    folder = copied("qwen3")
    classes = {"AutoConfig": "configuration_custom.Config", "AutoModelForCausalLM": "modeling_custom.Model"}
    edited(folder / "config.json", model_type="custom", auto_map=classes)
    (folder / "configuration_custom.py").write_text(
        "from transformers import Qwen3Config\nclass Config(Qwen3Config):\n    model_type = 'custom'\n"
    )
    (folder / "modeling_custom.py").write_text(
        f"from transformers import Qwen3ForCausalLM\n{imports}\nfrom .configuration_custom import Config\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    return folder


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
