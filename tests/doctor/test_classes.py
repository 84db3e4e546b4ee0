"""Classes of causes, computed from the words of a failure: names of weights, records, files."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.logs import diagnose_text

SITE = "/home/user/venv/lib/python3.11/site-packages"
LOAD = "RuntimeError: Error(s) in loading state_dict for Net:\n\t"


def first(text: str) -> Finding:
    return diagnose_text("log", text)[0]


def raised(said: str, code: str = "f()", file: str = "/home/user/train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in f\n    {code}\n{said}'


def lists(missing: str = "", unexpected: str = "") -> str:
    """torch's message about mismatched names; names are separated by spaces."""
    told = [("Missing", missing), ("Unexpected", unexpected)]
    quoted = (f'{how} key(s) in state_dict: "{names}". ' for how, names in told if names)
    return LOAD + "\n\t".join(quoted).replace(" h.", '", "h.').replace(" a.", '", "a.')


NAMES = {
    lists("a.0.weight a.1.weight", "module.a.0.weight module.a.1.weight".replace(" m", '", "m')): (
        "names-prefix-of-file",
        'removeprefix("module.")',
    ),
    lists("model.a.0.weight model.a.1.weight".replace(" m", '", "m'), "a.0.weight a.1.weight"): (
        "names-prefix-of-model",
        '"model." + name',
    ),
    lists("", 'epoch", "model_state_dict", "optimizer'): ("names-inside", 'checkpoint["model_state_dict"]'),
    lists("", "h.0.mlp.down_proj.weight.absmax h.0.mlp.up_proj.weight.quant_map"): (
        "names-quantized",
        "reshard convert",
    ),
    lists("h.0.fc.qweight h.0.fc.scales"): ("names-not-quantized", "quantization_config"),
    lists("", "h.0.q.lora_A.default.weight h.0.q.lora_B.default.weight"): ("names-adapter", "--base BASE"),
    lists("h.0.q.base_layer.weight h.0.q.lora_A.weight"): ("names-no-adapter", "PeftModel.from_pretrained"),
    lists("", "h.0.fc._extra_state h.1.fc._extra_state"): ("names-extra-state", "log_unexpected"),
    lists("h.0.q.bias h.1.q.bias"): ("names-bias", "--add-qkv-bias"),
    lists("", "lm_head.weight"): ("names-head", "tie_word_embeddings"),
    lists("h.12.fc.weight h.13.fc.weight"): ("names-layers-of-model", "reshard inspect"),
    lists("", "h.12.fc.weight h.13.fc.weight"): ("names-layers-of-file", "num_hidden_layers"),
    lists("", "v_head.summary.weight"): ("names-only-file", "same class"),
    lists("score.weight"): ("names-only-model", "strict=False"),
    lists("h.0.a.weight h.0.b.weight h.0.c.weight h.1.a.weight h.1.b.weight"): ("names-none", "--use-legacy"),
    lists(
        "layers.0.attn.q_proj.lora_a.weight layers.0.attn.q_proj.lora_b.weight layers.1.attn.q_proj.lora_a.weight"
    ): (
        "names-no-adapter",
        "PeftModel",
    ),
    lists("enc.conv.weight", "dec.up.gain"): ("names-other-model", "model_type"),
    raised("ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.SCB'"): (
        "names-quantized",
        "--dtype bfloat16",
    ),
    "llama_model_load: error loading model: check_tensor_dims: tensor 'blk.0.ffn_norm.weight' not found": (
        "names-gguf",
        "convert_hf_to_gguf.py",
    ),
    lists("layers.0.self_attn.q_proj.weight", "layers.0.attention.wq.weight"): (
        "names-of-program",
        "MetaCheckpointer",
    ),
    lists("model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"): (
        "names-of-program",
        "reshard convert CHECKPOINT OUT",
    ),
    lists("decoder.layers.0.mlp.linear_fc1.weight", "model.layers.0.mlp.up_proj.weight"): (
        "names-of-program",
        "--to megatron",
    ),
    'Exception: Found unexpected key: "tok_embeddings.weight". Please check the format.': (
        "names-of-program",
        "Hugging Face folder",
    ),
    "KeyError: 'visual.patch_embed.proj.weight'": ("names-lookup", "transformers<4.52"),
}

DATA = {
    "KeyError: 'labels'": ("key-of-batch", 'rename_column(OLD, "labels")'),
    "ArrowTypeError: (\"Expected bytes, got a 'int' object\", 'Conversion failed for column id with type object')": (
        "data-mixed-types",
        'record["id"]',
    ),
    raised("KeyError: 'prompt'", 'x = feature["prompt"]'): ("key-record", "column_names"),
    raised("KeyError: 'rms_norm_eps'", 'eps = config["rms_norm_eps"],'): ("key-config", "its architecture"),
    raised("KeyError: 'I8'", "t = DATA_TYPES[info['dtype']]"): ("key-dtype", "--dtype bfloat16"),
    raised("KeyError: 'param_groups'", "g = state['param_groups']", f"{SITE}/torch/optim/optimizer.py"): (
        "key-optimizer",
        "--no-load-optim",
    ),
    raised("KeyError: 'model_args'", "a = checkpoint['model_args']"): ("key-checkpoint", "reshard inspect"),
    raised("KeyError: 'model'", "a = old_checkpoint['model'],"): ("key-checkpoint", "reshard convert"),
    raised("KeyError: 'LOCAL_RANK'", "r = int(os.environ['LOCAL_RANK'])"): (
        "environment-rank",
        "torch.distributed.run",
    ),
    "pyarrow.lib.ArrowInvalid: JSON parse error: Column(/a) changed from string to array in row 4": (
        "data-type-changes",
        "json.dumps",
    ),
    "Couldn't cast\nid: string\nb: string\nto\n{'id': Value(dtype='string'), 'c': Value(dtype='int64')}\n"
    "because column names don't match\ndatasets.exceptions.DatasetGenerationError: An error occurred": (
        "data-columns",
        "select_columns",
    ),
    "ValueError: BuilderConfig 'x' not found. Available: ['main', 'socratic']": ("data-name", "socratic"),
    "RuntimeError: Dataset scripts are no longer supported, but found a.py": ("data-script", "datasets<4"),
    "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant": (
        "chat-refused",
        "groupby",
    ),
    "jinja2.exceptions.TemplateError: System role not supported": ("chat-refused", "messages.pop(0)"),
    "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 30)": (
        "json-broken",
        "json.loads(line)",
    ),
    "UnicodeDecodeError: 'gbk' codec can't decode byte 0x80 in position 7: illegal": (
        "text-of-platform",
        "PYTHONUTF8=1",
    ),
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte": (
        "bytes-no-text",
        "from_pretrained(FOLDER)",
    ),
    "ValueError: No file with name: consolidated.00.pth found in /models/a.": ("file-of-kind", "original/*"),
    "FileNotFoundError: [Errno 2] No such file or directory: 'a/7B/params.json'": (
        "file-of-kind",
        "ls -la a/7B",
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: 'out/10/mp_rank_00'": (
        "file-of-legacy",
        "reshard convert",
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: '/path/to/data.json'": (
        "file-placeholder",
        "your own",
    ),
    "AttributeError: Can't get local object 'main.<locals>.collate'": ("not-sendable", "num_workers=0"),
    "pyarrow.lib.ArrowInvalid: straddling object straddles two block boundaries (try to increase block size?)": (
        "data-one-object",
        "json.load",
    ),
}


@pytest.mark.parametrize("text", [*NAMES, *DATA], ids=lambda text: text[-60:])
def test_a_class_of_causes_is_computed(text: str) -> None:
    assert_class(text, *{**NAMES, **DATA}[text])


def assert_class(text: str, code: str, cure: str) -> None:
    found = first(text)
    assert found.code == code
    assert cure in found.remedy.en and found.certainty != "sure"
    for said in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", said.en + said.zh)
