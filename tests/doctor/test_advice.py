"""Messages that name their remedy, files of a model that are of another release, and exceptions that tools swallow."""

from __future__ import annotations

import pytest

from reshard.diagnosis.finding import LANGUAGES
from reshard.diagnosis.logs import diagnose_text
from reshard.diagnosis.words import aside
from tests.doctor.test_classes import SITE, first, raised

PACKAGES = {
    "ImportError: Using X quantization requires Accelerate: `pip install accelerate` and the latest version of "
    "quanto: `pip install -i https://pypi.org/simple/ optimum-quanto`": "accelerate optimum-quanto",
    "ImportError: To load GPTQ weights: pip install optimum and auto-gptq": "optimum auto-gptq",
    "RuntimeError: no backend (`pip install -U torchao[dev]` or `pip install quanto`).": "'torchao[dev]'",
    "ValueError: Tracking is off. Please pip install swanlab to use it.": "swanlab",
    "ImportError: Video needs decoders, pip3 install av decord.": "av decord",
}


@pytest.mark.parametrize("said", PACKAGES)
def test_packages_that_a_message_asks_for(said: str) -> None:
    found = first(raised(said, file=f"{SITE}/loader.py"))
    assert found.code == "packages-to-install"
    assert f"-m pip install -U {PACKAGES[said]}\n" in found.remedy.en


def test_the_range_of_a_refused_version_is_in_the_command() -> None:
    said = (
        "ImportError: transformers>=4.41.2,<=4.45.0 is required for a normal functioning of this module, but found "
        "transformers==4.45.2.\nTo fix: pip install transformers>=4.41.2,<=4.45.0"
    )
    for cure in (first(said).remedy.en, first(raised(said)).remedy.zh):
        assert "install 'transformers>=4.41.2,<=4.45.0'" in cure


SETTINGS = {
    "ValueError: Please use `FORCE_FROB=1` to launch DeepSpeed training.": "FORCE_FROB=1",
    "ValueError: the eval split is too small for packing. You should set `eval_sample_packing: False`.": "False`",
    "The backend is not set, please initialize it using init_process_group()": "init_process_group()",
}


@pytest.mark.parametrize("said", SETTINGS)
def test_a_setting_that_a_message_names(said: str) -> None:
    found = first(said)
    assert (found.code, found.certainty) == ("message-names-cure", "likely")
    assert SETTINGS[said] in found.remedy.zh


def test_a_switch_for_more_messages_is_no_cure() -> None:
    said = "RuntimeError: kernel failed. Please set `CUDA_LAUNCH_BLOCKING=1` to see where."
    assert first(raised(said)).code != "message-names-cure"
    assert first(raised("ValueError: Please check your model and dataset.")).code != "message-names-cure"


SWALLOWED = {
    "'[Errno 2] No such file or directory: 'python''!": "program-missing",
    "'[Errno 2] No such file or directory: '/data/cutlass/CHANGELOG.md''!": "file-missing",
    "'No module named 'mmengine''!": "module-not-found",
}


@pytest.mark.parametrize("said", SWALLOWED)
def test_an_exception_of_which_a_command_prints_only_the_message(said: str) -> None:
    usage = (
        "\n    Arguments received: ['xtuner', 'train']. xtuner commands use this syntax:\n        xtuner MODE"
    )
    text = f"07/22 03:04:52 - mmengine - WARNING - WARNING: command error: {said}{usage}"
    assert first(text).code == SWALLOWED[said]


def test_an_exception_copied_from_a_notebook() -> None:
    said = "'MistralForCausalLM' object has no attribute 'merge_and_unload'"
    text = f'{{\n\t"name": "AttributeError",\n\t"message": "{said}",\n\t"stack": "Cell In[12], line 1\n'
    assert first(text).code == "attribute-of-other"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("i get an error:\nmodule 'fastchat.conversation' has no attribute 'x'", "module-attribute-missing"),
        ("Unsloth: No config file found - is the `model_name` correct?", "unsloth-no-config"),
        ("ImportError: libcudart.so.11.0: cannot open shared object file: No such", "cuda-library-missing"),
        (raised("FileNotFoundError: Cannot find /data/iter_864.pth"), "file-missing"),
        (
            raised("TypeError: cannot unpack non-iterable NoneType object", "a, b = build("),
            "value-is-none",
        ),
        (
            "    assert isinstance(weight, DTensor)\nAssertionError",
            "unknown-failure",
        ),
        ("RuntimeError: self and mat2 must have the same dtype", "dtypes-differ-unnamed"),
    ],
)
def test_a_message_without_the_rest(said: str, code: str) -> None:
    assert first(said).code == code


def test_a_page_in_place_of_code() -> None:
    file = "/home/user/.cache/huggingface/modules/transformers_modules/glm/tokenization_chatglm.py"
    for start, kind in (
        ("<!DOCTYPE html>", "a web page"),
        ("version https://git-lfs.github.com/spec/v1", "Git LFS"),
    ):
        found = first(f'  File "{file}", line 1\n    {start}\n    ^\nSyntaxError: invalid syntax')
        assert found.code == "page-for-file" and kind in found.message.en and file in found.message.zh


CONFIG = f"{SITE}/transformers/models/llama/configuration_llama.py"


def test_a_config_of_another_release() -> None:
    said = "ValueError: `rope_scaling` has {'factor': 8.0, 'rope_type': 'llama3'}"
    found = first(f"- Transformers version: 4.42.3\n{raised(said, 'raise ValueError(', CONFIG)}")
    assert found.code == "config-of-other-release" and "transformers 4.42.3 " in found.message.en
    assert "'transformers>=4.43'" in found.remedy.en
    own = raised("ValueError: bad", "Config(x=1)").replace(
        "ValueError: bad", f'  File "{CONFIG}", line 9, in g\n'
    )
    assert first(f"{own}    raise ValueError()\nValueError: bad").code != "config-of-other-release"


def test_tokenizer_code_of_before_4_34() -> None:
    said = "AttributeError: 'BaichuanTokenizer' object has no attribute 'sp_model'"
    found = first(f"transformers==4.36.0\n{said}")
    assert found.code == "tokenizer-code-older" and "`sp_model`" in found.rule.zh
    assert first(f"transformers==4.30.0\n{said}").code != "tokenizer-code-older"
    known = "AttributeError: 'LlamaTokenizer' object has no attribute 'sp_model'"
    assert first(known).code != "tokenizer-code-older"
    assert (
        first("AttributeError: ChatGLMTokenizer has no attribute vocab_size").code == "tokenizer-code-older"
    )


def test_a_model_of_another_kind() -> None:
    said = (
        "ValueError: Unrecognized configuration class <class 'transformers.models.{}'> for this kind of AutoModel: "
        "AutoModelForCausalLM."
    )
    sees = first(raised(said.format("llava.configuration_llava.LlavaConfig")))
    assert sees.code == "auto-class-of-other-kind" and "AutoModelForImageTextToText" in sees.remedy.zh
    assert "Seq2SeqLM" in first(raised(said.format("t5.configuration_t5.T5Config"))).remedy.en


def test_a_model_that_a_program_does_not_know() -> None:
    file = "/root/ms-swift/swift/megatron/utils/convert.py"
    found = first(
        raised("AssertionError: Model: /models/Qwen3-Next is not supported.", "assert meta, f'{x}'", file)
    )
    assert found.code == "model-not-supported" and "-U ms-swift" in found.remedy.en
    assert first(raised("ValueError: Model X is not supported with ZeRO-3.")).code != "model-not-supported"


def test_a_weight_that_no_file_has() -> None:
    said = "ValueError: lm_head.weight is on the meta device, we need a `value` to put in on 0."
    assert first(raised(said)).code == "weight-without-value" and "lm_head.weight" in first(said).message.en


def test_certainties_are_told_in_both_languages() -> None:
    (found,) = diagnose_text("log", "RuntimeError: self and mat2 must have the same dtype")
    assert [aside(found).of(language) for language in LANGUAGES] == [
        "(dtypes-differ-unnamed, likely)",
        "（dtypes-differ-unnamed，很可能）",
    ]


def test_a_title_above_a_log_of_preparations() -> None:
    said = "ValueError: The number of images does not match the number of <image> tokens in [{'content': '<image>a'"
    found = first(
        f"{said}\n\nConverting format of dataset: 100%|##########| 1/1 [00:00<00:00, 483 examples/s]"
    )
    assert found.code == "modal-marks" and '.count("<image>")' in found.remedy.zh


def test_frames_in_the_order_of_a_debugger() -> None:
    said = "FinetuningConfig.__init__() got an unexpected keyword argument 'combine'"
    frames = [
        ("from_dict", "return cls(**kwargs)"),
        ("main", "c = FinetuningConfig.from_file(f)"),
        ("<module>", "app()"),
    ]
    shown = "".join(
        f'  File "/home/user/tune.py", line {at}, in {name}\n    {code}\n'
        for at, (name, code) in enumerate(frames)
    )
    found = first(f"Exception has occurred: TypeError\n{said}\n{shown}TypeError: {said}")
    assert found.code == "config-key-of-other" and "tune.py:0 from_dict" in found.rule.en


@pytest.mark.parametrize(
    ("said", "code", "cure"),
    [
        (
            "[ERROR:swift] import vllm_utils error: No module named 'openai.types'",
            "submodule-missing",
            "-U openai",
        ),
        ("ModuleNotFoundError: No module named 'flask.types'", "submodule-missing", "print(flask.__path__)"),
        ("PPO fails: a.b()got an unexpected keyword argument'mask'", "unexpected-keyword", ""),
        (
            "AttributeError: 'LLMEngine' object has no attribute 'model_executor'",
            "vllm-engine-of-v0",
            "VLLM_USE_V1=0",
        ),
        (
            "ValueError: no. Please make sure you have installed `bitsandbytes>=0.37.0`.",
            "version-required",
            "0.37.0",
        ),
        (
            "ValueError: This takes no images. Please check whether the correct `template` is used.",
            "message-names-cure",
            "",
        ),
        (raised("KeyError: 'messages'", "m = inputs['messages']"), "key-record", "column_names"),
        (
            "ValueError: There is no module or parameter named 'score' in Qwen2VLModel",
            "vllm-unexpected-weights",
            "pooling",
        ),
    ],
)
def test_causes_in_few_words(said: str, code: str, cure: str) -> None:
    found = first(said)
    assert found.code == code and cure in found.remedy.en


def test_what_an_object_is_valid_for_is_no_setting() -> None:
    said = "TypeError: Only nested objects that are valid for `is_torch_tensor` should be passed."
    assert first(raised(said)).code != "setting-not-given"


REQUIRED = {
    "ValueError: For safety, we now require users to upgrade torch to at least v2.6 in order to load.": "torch>=2.6",
    "ImportError: This kernel works with PyTorch 2.4.1 or newer only.": "torch>=2.4.1",
    "RuntimeError: transformers version must be at least 4.51.3 for this model": "transformers>=4.51.3",
}


@pytest.mark.parametrize("said", REQUIRED)
def test_a_release_that_is_required_in_prose(said: str) -> None:
    found = first(raised(said, file=f"{SITE}/transformers/loader.py"))
    assert found.code == "version-required" and f"install '{REQUIRED[said]}'" in found.remedy.en


def test_a_module_that_only_looks_up_is_not_to_be_updated() -> None:
    said = "AttributeError: 'FrobForCausalLM' object has no attribute 'hf_frob'"
    assert (
        "-U torch"
        not in first(
            raised(said, file=f"{SITE}/torch/nn/modules/module.py").replace("in f", "in __getattr__")
        ).remedy.en
    )


def test_an_exception_of_a_program_that_embeds_python() -> None:
    said = "CSnakes.Runtime.PythonRuntimeException: module 'torch.frob' has no attribute 'tensor'"
    assert first(f"12:00:00 [ERR] failed\n{said}").code == "module-attribute-missing"


def test_a_package_whose_file_is_no_python_is_installed_again() -> None:
    said = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    import frob\n'
        '  File "/x/lib/python3.12/site-packages/frob/models/rl.py", line 372\n    except Exception as e:\n    ^\n'
        "IndentationError: expected an indented block after 'try' statement on line 371"
    )
    (found,) = diagnose_text("log", said)
    assert (
        found.code == "package-at-fault"
        and "--force-reinstall --no-deps --no-cache-dir frob" in found.remedy.en
    )
    assert "frob/models/rl.py" in found.message.zh


def test_a_name_that_a_package_forgot_is_its_fault() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/x/lib/python3.12/site-packages/frob/a.py", line 3, in f\n'
        "    wibble()\nNameError: name 'wibble' is not defined"
    )
    assert diagnose_text("log", said)[0].code == "package-at-fault"
    assert diagnose_text("log", "NameError: name 'TypeAdapter' is not defined")[0].code == "name-of-optional"


@pytest.mark.parametrize("module", ["training.tokenizer.tokenizer", "optimizer", "legacy.model"])
def test_what_only_the_sources_of_megatron_have_is_no_release_of_its_package(module: str) -> None:
    said = f"    from megatron.{module} import X\nModuleNotFoundError: No module named 'megatron.{module}'"
    assert diagnose_text("log", said)[0].code == "megatron-training-missing"
