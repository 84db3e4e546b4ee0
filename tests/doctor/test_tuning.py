"""Messages of tuning tools, of datasets and of the services that record a run."""

from __future__ import annotations

import pytest

from reshard.diagnosis.rules import rules
from tests.doctor.test_classes import first, raised

TUNING = {
    "ValueError: Undefined dataset my_train in dataset_info.json.": ("dataset-undefined", '"my_train": {'),
    "ValueError: Cannot open data/dataset_info.json due to [Errno 2] No such file or directory: 'x'.": (
        "dataset-info-missing",
        "dataset_dir",
    ),
    "ValueError: Template llama-3 does not exist.": ("template-unknown", "sorted(TEMPLATES)"),
    "RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable"
    " multiprocessing.": ("map-worker-died", "preprocessing_num_workers: 1"),
    "pyarrow.lib.ArrowInvalid: Column 3 named input_ids expected length 1000 but got length 1127": (
        "map-changes-rows",
        "remove_columns=dataset.column_names",
    ),
    "TypeError: Couldn't cast array of type string to null": ("data-null-type", "features=Features("),
    "pyarrow.lib.ArrowNotImplementedError: Unsupported cast from string to null using function cast_null": (
        "data-null-type",
        "features=Features(",
    ),
    "datasets.exceptions.DatasetNotFoundError: Dataset 'org/data' doesn't exist on the Hub or cannot be accessed.": (
        "dataset-not-found",
        "ORG/NAME",
    ),
    "FileNotFoundError: Couldn't find a dataset script at /w/data/data.py or any data file in the same directory.": (
        "dataset-not-found",
        "data_files=",
    ),
    "ValueError: Loading squad_it requires you to execute the dataset script in that repo on your local machine.": (
        "data-needs-trust",
        'load_dataset("squad_it", trust_remote_code=True)',
    ),
    "pandas.errors.ParserError: Error tokenizing data. C error: Expected 1 fields in line 6, saw 2": (
        "csv-fields",
        "1,2p;6p",
    ),
    "ValueError: Failed to retrieve the dataset. You can avoid this issue by increasing `max_length` or modifying the"
    " `truncation_strategy`.": ("rows-too-long", "--truncation_strategy delete"),
    "swift.llm.template.base.MaxLengthError: Current length of row(5321) is larger than the max_length(2048).": (
        "rows-too-long",
        "--max_length 8192",
    ),
    "ValueError: You should supply an encoding or a list of encodings to this method that includes input_ids, but you"
    " provided ['label']": ("batch-not-tokenized", "remove_unused_columns=False"),
    "ValueError: The input provided to the model are wrong. The number of image tokens is 0 while the number of image"
    " given to the model is 1.": ("modal-none", "apply_chat_template"),
    "RuntimeError: shape mismatch: value tensor of shape [7168, 896] cannot be broadcast to indexing result of shape"
    " [3328, 896]": ("modal-counts", "maximum length"),
    "ValueError: Mismatch in `image` token count between text and `input_ids`. Got ids=[2038] and text=[2691].": (
        "modal-counts",
        "max_length=None",
    ),
    "wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])": (
        "tracker-without-key",
        "WANDB_MODE=offline",
    ),
    "wandb.errors.CommError: Run initialization has timed out after 90.0 sec.": (
        "wandb-unreachable",
        "WANDB_MODE=offline",
    ),
    "mlflow.exceptions.MlflowException: INVALID_PARAMETER_VALUE: Changing param values is not allowed. Param with"
    " key='lr' was already logged with value='1' for run ID='3f1'.": (
        "mlflow-parameter-changed",
        "mlflow.end_run()",
    ),
    "MisconfigurationException: `ModelCheckpoint(monitor='val_loss')` could not find the monitored key in the returned"
    " metrics: ['train_loss'].": ("lightning-metric-missing", 'self.log("val_loss"'),
    "TypeError: Trainer.__init__() got an unexpected keyword argument 'gpus'": (
        "lightning-arguments-gone",
        'accelerator="gpu"',
    ),
    "ValueError: unhandled prompt tokenization strategy: sharegpt": (
        "axolotl-strategy-unknown",
        "type: chat_template",
    ),
    "ValueError: Please use `FORCE_TORCHRUN=1` to launch DeepSpeed training.": (
        "launch-by-torchrun",
        "FORCE_TORCHRUN=1 llamafactory-cli train",
    ),
    "RuntimeError: Lightning can't create new processes if CUDA is already initialized.": (
        "notebook-cuda-initialized",
        "Restart the kernel",
    ),
    "TypeError: ChatGLMTokenizer._pad() got an unexpected keyword argument 'padding_side'": (
        "tokenizer-pads-older",
        "transformers<4.45",
    ),
    "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 173)": (
        "json-broken",
        "json.loads(line)",
    ),
    "ValueError: Unknown split \"validation\". Should be one of ['train'].": (
        "data-name",
        "train_test_split",
    ),
    "ValueError: remaining_argv: ['--model_id_or_path', 'Qwen/Qwen2-7B']": (
        "unknown-argument",
        "`--model` now",
    ),
    "ValueError: The train_dataset does not implement __len__, max_steps has to be specified. The number of steps"
    " needs to be known in advance for the learning rate scheduler.": (
        "dataset-without-length",
        "max_steps=10_000",
    ),
    "ValueError: num_samples should be a positive integer value, but got num_samples=0": (
        "dataset-empty",
        "remove_unused_columns=False",
    ),
    "datasets.exceptions.EmptyDatasetError: The directory at /w/train doesn't contain any data files": (
        "data-folder-unknown",
        "data_files=",
    ),
    "datasets.exceptions.NonMatchingSplitsSizesError: [{'expected': 1, 'recorded': 2}]": (
        "dataset-not-as-declared",
        'verification_mode="no_checks"',
    ),
    "ValueError: Feature type 'List' not found. Available feature types: ['Value']": (
        "feature-of-later-release",
        "-U datasets",
    ),
    "ImportError: To support decoding audio data, please install 'torchcodec'.": (
        "datasets-needs-torchcodec",
        "install torchcodec",
    ),
    "RuntimeError: stack expects each tensor to be equal size, but got [3, 336, 336] at entry 0 and [3, 448, 448] at"
    " entry 1": ("batch-not-stacked", '.convert("RGB")'),
    "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class"
    " 'NoneType'>": ("batch-of-none", "if each is not None"),
    "ValueError: absolute aspect ratio must be smaller than 200, got 251.0": ("image-too-thin", "< 200"),
    "PIL.UnidentifiedImageError: cannot identify image file '/data/1.jpg'": ("image-unreadable", "rglob"),
    "pyarrow.lib.ArrowInvalid: offset overflow while concatenating arrays": (
        "arrow-offset-overflow",
        "writer_batch_size=100",
    ),
    "AttributeError: 'DatasetDict' object has no attribute 'train_test_split'": (
        "dataset-has-splits",
        'split="train"',
    ),
    'TypeError: can only concatenate str (not "NoneType") to str': ("text-is-none", "is not None"),
    "OSError: --checkpoint_dir '/w/Llama-2-7b-hf' is missing the files: ['lit_model.pth'].": (
        "litgpt-not-converted",
        "litgpt convert_to_litgpt /w/Llama-2-7b-hf",
    ),
    "wandb.errors.CommError: permission denied": ("wandb-denied", "wandb login --relogin"),
    "TypeError: `model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got `Model`": (
        "lightning-twice",
        "import lightning.pytorch as pl",
    ),
    "ValueError: When localhost is not accessible, a shareable link must be created. Please set share=True": (
        "gradio-localhost",
        "NO_PROXY=localhost",
    ),
    "modelscope.hub.errors.NotExistError: The file path : configuration.json not exist": (
        "modelscope-not-found",
        "USE_HF=1",
    ),
    "AttributeError: module 'distutils' has no attribute 'version'": (
        "tensorboard-of-old-torch",
        "setuptools==59.5.0",
    ),
    "ValueError: The features can't be aligned because the key messages of features {'a': 1} has unexpected type": (
        "features-not-aligned",
        "cast(first.features)",
    ),
    "OSError: [Errno 37] No locks available: '/nfs/.cache/huggingface/datasets/x.lock'": (
        "locks-not-supported",
        "HF_DATASETS_CACHE=",
    ),
    "RuntimeError: Already borrowed": ("tokenizer-borrowed", "copy.deepcopy(tokenizer)"),
    "ValueError: Adding unknown special tokens is not supported": (
        "special-tokens-refused",
        "tokenizer.eod_id",
    ),
    "ValueError: Only returning PyTorch tensors is currently supported.": (
        "image-tensors-only",
        'return_tensors="pt"',
    ),
    "TypeError: LlavaLlamaForCausalLM.forward() got an unexpected keyword argument 'cache_position'": (
        "forward-of-older-model",
        "transformers==4.37.2",
    ),
    "AttributeError: 'ChatGLMForConditionalGeneration' object has no attribute '_extract_past_from_model_output'": (
        "chatglm-cache",
        "transformers==4.41.2",
    ),
    "AttributeError: module 'pyarrow' has no attribute 'PyExtensionType'. Did you mean: 'ExtensionType'?": (
        "pyarrow-newer",
        "-U datasets",
    ),
    "ImportError: cannot import name 'load_metric' from 'datasets'": ("metric-loader-gone", "evaluate.load"),
    "AttributeError: module 'wandb' has no attribute 'init'": ("folder-hides-tracker", "install -U wandb"),
    "wandb.errors.errors.Error: You must call wandb.init() before wandb.log()": (
        "wandb-not-started",
        "wandb.run is not None",
    ),
    "IndexError: Invalid key: 512 is out of bounds for size 0": (
        "dataset-empty",
        "remove_unused_columns=False",
    ),
    "ValueError: Cannot merge adapters to a quantized model.": ("merge-into-quantized", "quantization_bit"),
    "ValueError: Original column name answer not in the dataset. Current columns in the dataset: ['response']": (
        "data-name",
        "['response']",
    ),
}


@pytest.mark.parametrize("said", TUNING, ids=lambda said: said[:60])
def test_what_a_tuning_tool_reports_is_named(said: str) -> None:
    code, cure = TUNING[said]
    found = first(raised(said, "trainer.train()"))
    assert (found.code, found.certainty) == (code, rules().get(code, {}).get("certainty", "likely"))
    assert cure in found.remedy.en


def test_a_message_alone_is_enough() -> None:
    for said in list(TUNING)[::8]:
        assert first(said).code == TUNING[said][0]
    found = first("AttributeError: 'QWenTokenizer' object has no attribute 'IMAGE_ST'")
    assert found.code == "tokenizer-code-older"


def test_a_decoder_that_counts_lines_names_the_place() -> None:
    said = (
        "pyarrow.lib.ArrowInvalid: JSON parse error: Missing a comma or } after an object member. in row 21"
    )
    own = "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 213 column 5 (char 18392)"
    during = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    found = first(raised(said, "paj.read_json(x)") + during + raised(own, "json.load(f)"))
    assert found.code == "data-unreadable" and "line 213, column 5" in found.rule.en


def test_a_web_interface_whose_packages_do_not_fit_is_told_from_other_code() -> None:
    said = "TypeError: argument of type 'bool' is not iterable"
    assert first(raised(said, 'if "const" in schema:', "/s/gradio_client/utils.py")).code == "gradio-pydantic"
    assert first(raised(said, "if key in value:")).code != "gradio-pydantic"
