"""Causes computed across frameworks: keys of files and templates, options that are None, shells, shards, processors."""

from __future__ import annotations

import pytest

from reshard.diagnosis.finding import UNKNOWN
from tests.doctor.test_classes import SITE, first, raised

FSDP = "distributed_type: FSDP\n"
NO_DIMENSIONS = raised("RuntimeError: 'weight' must be 2-D", "return torch.embedding(weight, input)")
CAUSES = {
    raised("KeyError: 'model'", "net.load_state_dict(torch.load(args.ckpt)['model'])"): (
        "key-of-file",
        "`module.`",
    ),
    raised("KeyError: 'state_dict'", "model.load_state_dict(checkpoint['state_dict'])"): (
        "key-of-file",
        "print(list(torch.load",
    ),
    raised("KeyError: '\\n  \"answer\"'", "TEMPLATE.format(question=q)"): ("key-formatted", "{{` and `}}"),
    raised("KeyError: '\"name\"'", "m = t.format(s)", f"{SITE}/unsloth/save.py"): (
        "key-formatted",
        "install -U unsloth",
    ),
    raised(
        "TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType'",
        "a = cfg.batch_size // cfg.micro_size",
    ): ("setting-is-none", "`batch_size`, `micro_size`"),
    raised(
        "TypeError: unsupported operand type(s) for %: 'int' and 'NoneType'",
        "if step % args.save_steps == 0:",
    ): (
        "setting-is-none",
        "`save_steps`",
    ),
    "'llamafactory-cli' is not recognized as an internal or external command,\noperable program or batch file.": (
        "program-missing",
        "python -m llamafactory.cli",
    ),
    "swift : The term 'swift' is not recognized as the name of a cmdlet, function, script file, or": (
        "program-missing",
        "ms-swift",
    ),
    "'deepspeed' 不是内部或外部命令，也不是可运行的程序\n或批处理文件。": (
        "program-missing",
        "python -m deepspeed",
    ),
    "deepspeed : 无法将“deepspeed”项识别为 cmdlet、函数、脚本文件或可运行程序的名称。": (
        "program-missing",
        "deepspeed",
    ),
    FSDP + NO_DIMENSIONS: ("fsdp-bypassed", "summon_full_params"),
    FSDP + "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.": (
        "fsdp-bypassed",
        "summon_full_params",
    ),
    FSDP + "deepspeed_config: zero3.json\n" + NO_DIMENSIONS: ("zero3-weight-2d", "prepare_deepspeed"),
    NO_DIMENSIONS: ("zero3-weight-2d", "prepare_deepspeed"),
    "ValueError: Processor was not found, please check and update your model file.": (
        "processor-not-loaded",
        "preprocessor_config.json",
    ),
    "AttributeError: 'NetForCausalLM' object has no attribute 'generate'": (
        "attribute-generate",
        "transformers<4.50",
    ),
    raised("AttributeError: 'Net' object has no attribute 'generate'"): (
        "object-attribute-missing",
        "pip check",
    ),
    "AttributeError: 'DynamicCache' object has no attribute 'detach'": (
        "output-for-tensor",
        "use_cache = False",
    ),
    "AttributeError: module 'google.protobuf.descriptor' has no attribute '_internal_create_key'": (
        "protobuf-older",
        "-U 'protobuf",
    ),
    raised("ValueError: PEFT backend is required for this method."): (
        "packages-to-install",
        "install -U peft",
    ),
    "AssertionError: Input and cos/sin must have the same dtype, got torch.float32 and torch.bfloat16": (
        "dtypes-differ",
        "dtype=torch.bfloat16",
    ),
    "RuntimeError: expected self and mask to be on the same device, but got mask on cuda:0 and self on cuda:1": (
        "devices-mixed",
        "CUDA_VISIBLE_DEVICES=0",
    ),
    "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5',)": (
        "dtype-of-newer-gpu",
        "--kv-cache-dtype auto",
    ),
    "ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer (<class 'apex.FusedAdam'>)": (
        "offload-optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    "AssertionError: {'id': 853, 'status': 'NOT_AVAILABLE', 'numel': 0}": (
        "part-failed",
        "set_z3_leaf_modules",
    ),
    "OverflowError: out of range integral type conversion attempted": ("ids-not-decodable", "np.where(ids"),
    "IndexError: piece id is out of range.": ("ids-not-decodable", "len(tokenizer)"),
    "TypeError: argument 'tokens': 'NoneType' object cannot be converted to 'PyString'": (
        "ids-not-decodable",
        "vocab_size",
    ),
    "ValueError: Adapter name pop not found in the model.": ("adapter-not-added", 'set_adapter("pop")'),
    "ValueError: The adapter pop does not exist": ("adapter-not-added", "model.peft_config"),
    "KeyError: 'NetForCausalLM'": ("model-not-supported", "--model_type"),
    "KeyError: 'auto_map'": ("key-of-config", "transformers_version"),
    "NotImplementedError: Unsloth: org/Net-8B is not supported in your current Unsloth version!": (
        "model-not-supported",
        "unsloth",
    ),
    "ValueError: Received 3 parameters not in model:\nmodel.a.weight,\nmodel.b.weight": (
        "names-only-file",
        "strict=False",
    ),
    "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)": (
        "device-of-index",
        ".to(",
    ),
}


@pytest.mark.parametrize("text", CAUSES, ids=lambda text: text[-60:])
def test_causes_across_frameworks(text: str) -> None:
    found = first(text)
    assert found.code == CAUSES[text][0]
    assert CAUSES[text][1] in found.remedy.en and CAUSES[text][1].split(" ")[0] in found.remedy.zh


def test_a_key_without_code_is_told_only_if_its_kind_is_known() -> None:
    for key in ("frob", "type", "name", "Frob"):
        assert first(f"KeyError: '{key}'").code == UNKNOWN


@pytest.mark.parametrize("backend", ["CUDA", "This", "NCCL"])
def test_not_everything_required_is_a_package(backend: str) -> None:
    assert first(f"ValueError: {backend} backend is required for this method.").code != "packages-to-install"


def test_one_name_shows_more_layers_only_if_every_layer_has_such_a_part() -> None:
    deeper = "KeyError: 'layers.61.self_attn.q_proj.weight'"
    assert first(raised(deeper)).code == "names-layers-of-file"
    shared = "KeyError: 'layers.11.shared_transformer.self_attn.qkv_proj.weight'"
    assert first(raised(shared)).code != "names-layers-of-file"


def test_a_name_that_only_the_newest_release_lacks_may_also_be_too_new() -> None:
    module = "transformers.models.qwen2_vl.modeling_qwen2_vl"
    found = first(f"ImportError: cannot import name 'Qwen2VLModelOutputWithPast' from '{module}'")
    assert (found.code, found.certainty) == ("api-between", "possible") and ">=4.52.1" in found.remedy.en


def test_a_frame_after_the_marks_of_a_quotation_is_read() -> None:
    quoted = '```File "/app/config.py", line 43, in normalize\n    cfg.a // cfg.b\n'
    found = first(f"{quoted}TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType'\n```")
    assert "config.py:43 normalize" in found.rule.en
