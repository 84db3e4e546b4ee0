"""What transformers' Trainer, generation, tokenizers and loading report in known words, and what the Hub answers."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import first, raised

RULES = {
    # records and metrics
    "ValueError: setting an array element with a sequence. The requested array has an inhomogeneous shape after 2 "
    "dimensions. The detected shape was (2, 100) + inhomogeneous part.": (
        "arrays-of-different-shapes",
        "predictions[0]",
    ),
    "ValueError: Labels' sequence length 512 cannot exceed the maximum allowed length of 448 tokens.": (
        "labels-too-long",
        "len(labels) <= 448",
    ),
    "TypeError: argument 'ids': 'list' object cannot be interpreted as an integer": (
        "decode-of-batch",
        "batch_decode",
    ),
    # the Trainer and generation
    "ValueError: The train_dataset does not implement __len__, max_steps has to be specified.": (
        "dataset-without-length",
        "max_steps=",
    ),
    "ValueError: You have set `args.eval_strategy` to IntervalStrategy.EPOCH but you didn't pass an `eval_dataset` to "
    "`Trainer`.": ("eval-dataset-missing", "train_test_split"),
    "ValueError: Input length of input_ids is 1547, but `max_length` is set to 1024. This can lead to unexpected "
    "behavior.": ("generation-length", "max_new_tokens=256"),
    "ValueError: The following `model_kwargs` are not used by the model: ['token_type_ids'] (note: typos in the "
    "generate arguments will also show up in this list)": ("generation-keyword", "in ['token_type_ids']:"),
    "RuntimeError: FlashAttention only support fp16 and bf16 data type": (
        "flash-attention-dtype",
        "torch.bfloat16",
    ),
    # files of a model
    "ValueError: `rope_scaling` must be a dictionary with two fields, `type` and `factor`, got {'factor': 8.0, "
    "'rope_type': 'llama3'}": ("rope-scaling-newer", "transformers>=4.45"),
    "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require "
    "users to upgrade torch to at least v2.6": ("torch-load-refused", "torch>=2.6"),
    "OSError: The safetensors archive passed at out/model.safetensors does not contain the valid metadata.": (
        "safetensors-without-format",
        'format="pt"',
    ),
    "OSError: out/checkpoint-200 does not appear to have a file named preprocessor_config.json. Checkout": (
        "processor-file-missing",
        'save_pretrained("out/checkpoint-200")',
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: 'out/checkpoint-5/trainer_state.json'": (
        "resume-file-missing",
        "ls out/checkpoint-5",
    ),
    "RuntimeError: Internal: src/sentencepiece_processor.cc(1101) [model_proto->ParseFromArray(serialized.data(), "
    "serialized.size())]": ("sentencepiece-file-broken", "git lfs pull"),
    "TypeError: not a string": ("tokenizer-model-absent", "AutoTokenizer"),
    "ModuleNotFoundError: No module named 'transformers_modules.Qwen2'": (
        "remote-folder-name",
        "transformers_modules",
    ),
    "TypeError: ChatGLM4Tokenizer._pad() got an unexpected keyword argument 'padding_side'": (
        "tokenizer-pads-older",
        "transformers<4.45",
    ),
    "AttributeError: 'ChatGLMTokenizer' object has no attribute 'tokenizer'. Did you mean: 'tokenize'?": (
        "tokenizer-code-older",
        "transformers<4.34",
    ),
    "ImportError: \nLlamaTokenizer requires the SentencePiece library but it was not found in your environment.": (
        "packages-to-install",
        "import sentencepiece, google.protobuf",
    ),
    # the Hub
    "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with "
    "url: /a (Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] x')))": (
        "hub-certificate",
        "SSL_CERT_FILE",
    ),
    "requests.exceptions.ProxyError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max "
    "retries exceeded with url: /a (Caused by ProxyError('Cannot connect to proxy.'))\"))": (
        "proxy-broken",
        "unset http_proxy",
    ),
    "requests.exceptions.ReadTimeout: (ReadTimeoutError(\"HTTPSConnectionPool(host='cdn-lfs.huggingface.co', "
    'port=443): Read timed out. (read timeout=10)"))': ("download-interrupted", "HF_HUB_DOWNLOAD_TIMEOUT=60"),
    "OSError: Consistency check failed: file should be of size 49 but has size 15 (model.safetensors).": (
        "download-incomplete",
        "--force-download",
    ),
    "RuntimeError: Data processing error: CAS service error : Reqwest Error: HTTP status client error (401 "
    "Unauthorized)": ("hub-xet", "HF_HUB_DISABLE_XET=1"),
    "FileMetadataError: Distant resource does not seem to be on huggingface.co.": (
        "hub-mirror-other",
        "HF_ENDPOINT",
    ),
    "OSError: PermissionError at /.cache/huggingface when downloading gpt2.": (
        "hub-cache-not-writable",
        "HF_HOME",
    ),
    "huggingface_hub.errors.LocalTokenNotFoundError: Token is required (`token=True`), but no token found.": (
        "hub-no-token",
        "hf auth login",
    ),
    "OfflineModeIsEnabled: Cannot reach https://huggingface.co/a: offline mode is enabled. To disable it": (
        "hub-offline-mode",
        "unset HF_HUB_OFFLINE",
    ),
    "FileNotFoundError: Couldn't find a module script at /root/rouge/rouge.py. Module 'rouge' doesn't exist on the "
    "Hugging Face Hub either.": ("metric-script-missing", "evaluate/metrics/rouge"),
    "HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2 (Request ID: a)": (
        "hub-answers",
        "unset HF_TOKEN",
    ),
    "HfHubHTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/api/repos/create (Request ID: a)": (
        "hub-answers",
        '"write"',
    ),
    "RepositoryNotFoundError: 401 Client Error. (Request ID: a)\n\nRepository Not Found for url: "
    "https://huggingface.co/api/models/llama.\n": ("hub-answers", "OWNER/NAME"),
}


@pytest.mark.parametrize("said", RULES, ids=lambda said: said[:60])
def test_messages_of_transformers_and_the_hub_are_explained(said: str) -> None:
    code, cure = RULES[said]
    found = first(said)
    assert (found.code, found.certainty) == (code, "likely")
    assert cure in found.remedy.en
    for told in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", told.en + told.zh)


def test_a_broken_proxy_is_no_missing_model() -> None:
    """The Hub that cannot be reached is another cause than a certificate or a proxy on the way."""
    said = "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in"
    assert first(said).code == "hub-unreachable"


def test_the_address_below_a_status_is_named() -> None:
    said = next(said for said in RULES if said.startswith("RepositoryNotFoundError"))
    assert "https://huggingface.co/api/models/llama" in first(said).message.en


MODELS = {
    "ValueError: You are trying to save a non contiguous tensor: `encoder.q.weight` which is not allowed.": (
        "tensor-not-contiguous",
        ".contiguous()",
    ),
    "OSError: It looks like the config file at 'm/config.json' is not a valid JSON file.": (
        "config-file-broken",
        "json.tool m/config.json",
    ),
    "OSError: [WinError 1314] A required privilege is not held by the client: 'a' -> 'b'": (
        "windows-symlink",
        "HF_HUB_DISABLE_SYMLINKS",
    ),
    "ValueError: Non-consecutive added token '<pad>' found. Should have index 32000 but has index 0 in saved "
    "vocabulary.": ("added-token-elsewhere", "transformers>=4.34"),
    "RuntimeError: The expanded size of the tensor (873) must match the existing size (512) at "
    "non-singleton dimension 1.": (
        "shape-positions",
        "truncation=True, max_length=512",
    ),
    "ValueError: Unable to infer channel dimension format": ("image-channels", 'convert("RGB")'),
    "ValueError: Invalid image type. Must be either PIL.Image.Image, numpy.ndarray, or list": (
        "image-not-opened",
        "Image.open",
    ),
    "RuntimeError: Tensor on device cpu is not on the expected device meta!": (
        "offloaded-weight-used",
        "is_meta",
    ),
    "bash: huggingface-cli: command not found": ("hub-command-absent", "hf auth login"),
    "TypeError: hf_hub_download() got an unexpected keyword argument 'use_auth_token'": (
        "auth-token-renamed",
        "huggingface_hub<1.0",
    ),
}


@pytest.mark.parametrize("said", MODELS, ids=lambda said: said[:60])
def test_messages_about_files_and_inputs_of_models_are_explained(said: str) -> None:
    code, cure = MODELS[said]
    found = first(said)
    assert (found.code, found.certainty) == (code, "likely")
    assert cure in found.remedy.en


IN_CODE = {
    ("AttributeError: 'list' object has no attribute 'keys'", "a + list(extra_special_tokens.keys())"): (
        "special-tokens-of-five"
    ),
    ("AttributeError: 'NoneType' object has no attribute 'get'", 'if metadata.get("format") == "pt":'): (
        "safetensors-metadata-none"
    ),
    ("AttributeError: 'NoneType' object has no attribute 'endswith'", 'if t.vocab_file.endswith("a"):'): (
        "tokenizer-without-files"
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 19.57 GiB (GPU 0; 23.7 GiB total capacity; "
        "12.21 GiB already allocated; 9.78 GiB free; 12.90 GiB reserved in total by PyTorch)",
        "nested_concat(a, b)",
    ): "evaluation-out-of-memory",
}


@pytest.mark.parametrize(("said", "code"), IN_CODE, ids=lambda text: text[:40])
def test_words_of_many_meanings_need_the_line_of_code(said: str, code: str) -> None:
    at = "/venv/lib/python3.11/site-packages/transformers/a.py"
    assert first(raised(said, code, at)).code == IN_CODE[said, code]
    assert first(raised(said, "f()", at)).code != IN_CODE[said, code]
