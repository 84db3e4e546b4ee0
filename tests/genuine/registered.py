"""What mcore-bridge and Megatron-Bridge register: model types of config.json, and architectures, as JSON.

python -m tests.genuine.registered mcore-bridge           in the environment "ms-swift"
python -m tests.genuine.registered megatron-bridge        in the environment "megatron-bridge"
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.genuine import fake_te
from tests.genuine.make_bridge import import_what_is_there


def mcore_bridge(trackers: list[str]) -> list[Any]:
    importlib.import_module("mcore_bridge")
    if trackers:
        ours = importlib.import_module("swift.megatron.utils.megatron_lm_utils")
        return [f"iter_{ours._load_iteration(each):07d}" for each in trackers]
    models = importlib.import_module("mcore_bridge.model.register").MODEL_MAPPING.values()
    return sorted({name for model in models for name in model.model_types})


def megatron_bridge(trackers: list[str]) -> list[Any]:
    import_what_is_there()
    if not trackers:
        found: list[str] = importlib.import_module("megatron.bridge").AutoBridge.list_supported_models()
        return found
    read = importlib.import_module("megatron.bridge.training.checkpointing").read_metadata
    name = importlib.import_module("megatron.bridge.training.utils.checkpoint_utils").get_checkpoint_name
    return [name("", *read(each)) for each in trackers]


if __name__ == "__main__":
    fake_te.install()
    print(
        json.dumps(
            {"mcore-bridge": mcore_bridge, "megatron-bridge": megatron_bridge}[sys.argv[1]](sys.argv[2:])
        )
    )
