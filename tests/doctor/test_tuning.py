"""Messages of tuning tools, of datasets and of the services that record a run."""

from __future__ import annotations

import pytest

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
        "ls -d org/data",
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
        "tokenizer-code-pads",
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
}


@pytest.mark.parametrize("said", TUNING, ids=lambda said: said[:60])
def test_what_a_tuning_tool_reports_is_named(said: str) -> None:
    code, cure = TUNING[said]
    for text in (said, raised(said, "trainer.train()")):
        found = first(text)
        assert (found.code, found.certainty) == (code, "likely")
        assert cure in found.remedy.en


def test_a_decoder_that_counts_lines_names_the_place() -> None:
    said = (
        "pyarrow.lib.ArrowInvalid: JSON parse error: Missing a comma or } after an object member. in row 21"
    )
    own = "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 213 column 5 (char 18392)"
    during = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    found = first(raised(said, "paj.read_json(x)") + during + raised(own, "json.load(f)"))
    assert found.code == "data-unreadable" and "line 213, column 5" in found.rule.en


def test_records_ignored_without_an_error_are_reported() -> None:
    found = first("WARNING: tokenization mismatch: 1 vs. 63. (ignored)\n{'loss': 0.0, 'epoch': 0.01}\n")
    assert found.code == "records-ignored" and found.severity == "warning"
