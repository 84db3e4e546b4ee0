"""Models by their names on the Hub, and options by the names that TRL and Hugging Face use."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as arrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants, snapshot_download

from reshard.stores.hub import name_of, url_of
from reshard.training.data import read_records
from reshard.training.run import Run
from tests.commandline import Result, reshard
from tests.stores.hub_server import Hub, Repository, hub_server

NAME = "Org/Model"


@pytest.fixture
def hub(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, which also has weights in a second format, and an empty cache."""
    with hub_server() as server:
        for name, value in server.constants().items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_reads")
        files = {each.name: each.read_bytes() for each in tiny("qwen2").iterdir()}
        server.repositories[NAME] = Repository(files={**files, "pytorch_model.bin": bytes(1 << 20)})
        yield server


def dry(tmp_path: Path, *words: object) -> Result:
    return reshard("train", "sft", *words, "--dry-run", "--json")


def problems(result: Result) -> list[tuple[str, str, str]]:
    """Code, found value, and remedy of each problem of a refused run."""
    assert result.code == 2 and "Traceback" not in result.err, result.out + result.err
    found = json.loads(result.out)["problems"]
    return [(each["code"], each.get("found") or "", each.get("remedy") or "") for each in found]


@pytest.mark.parametrize(
    "typed",
    [(NAME,), (f"hf://{NAME}@main",), (NAME, "--model-revision", "main"), (NAME, "--model_revision=main")],
)
def test_a_model_is_trained_by_its_name(
    hub: Hub, data: dict[str, Path], tmp_path: Path, typed: tuple[str, ...]
) -> None:
    result = dry(tmp_path, "--model", *typed, "--data", data["sft"], "-o", tmp_path / "out")
    assert result.code == 0, result.out + result.err
    run = json.loads(result.out)["preflight"]["run"]
    commit = hub.repositories[NAME].sha
    assert Path(run["model"]) == tmp_path / "cache" / "models--Org--Model" / "snapshots" / commit
    assert (url_of(Path(run["model"])), name_of(Path(run["model"]))) == (f"hf://{NAME}@{commit}", NAME)
    assert not (Path(run["model"]) / "pytorch_model.bin").exists(), "the same weights once more"


def test_the_cache_is_used_where_the_hub_may_not_be_asked(
    hub: Hub, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", NAME, "--data", data["sft"], "-o", tmp_path / "out")
    assert dry(tmp_path, *words).code == 0
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert dry(tmp_path, *words).code == 0 and len(hub.requests) == asked
    shutil.rmtree(tmp_path / "cache")
    ((code, _, remedy),) = problems(dry(tmp_path, *words))
    assert code == "model-not-local" and f"hf download {NAME}" in remedy
    ((code, _, remedy),) = problems(dry(tmp_path, "--model", f"hf://{NAME}@v2", *words[2:]))
    assert code == "hub-offline" and f"hf download {NAME} --revision v2" in remedy


def test_a_hub_that_does_not_answer_is_told_from_a_model_that_is_not_there(
    hub: Hub, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--data", data["sft"], "-o", tmp_path / "out")
    ((code, _, remedy),) = problems(dry(tmp_path, "--model", "Org/Absent", *words))
    assert code == "hub-not-found" and "check the name" in remedy
    assert dry(tmp_path, "--model", NAME, *words).code == 0
    monkeypatch.setattr("reshard.stores.store_errors.FIRST_WAIT_SECONDS", 0)
    hub.fails = lambda method, path: 503
    assert dry(tmp_path, "--model", NAME, *words).code == 0, "the cache has it"
    shutil.rmtree(tmp_path / "cache")
    ((code, _, remedy),) = problems(dry(tmp_path, "--model", NAME, *words))
    assert code == "hub-not-reached" and f"hf download {NAME}" in remedy
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    ((code, _, remedy),) = problems(dry(tmp_path, "--model", NAME, *words))
    assert code == "hub-not-reached" and f"hf download {NAME}" in remedy


def test_a_folder_has_no_revision(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> None:
    words = ("--model", tiny("qwen2"), "--data", data["sft"], "-o", tmp_path / "out", "--model-revision")
    assert dry(tmp_path, *words, "main").code == 0
    assert problems(dry(tmp_path, *words, "v2"))[0][0] == "revision-of-a-folder"


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: test
    path: data/test-*
- config_name: small
  data_files:
  - split: train
    path: small/train.jsonl
---
"""


@pytest.fixture
def sets(hub: Hub, data: dict[str, Path]) -> Hub:
    """The same hub with a dataset: a split in two Parquet files, and another configuration in JSONL."""
    lines = [json.loads(line) for line in data["sft"].read_text().splitlines()]

    def parquet(rows: list[Any]) -> bytes:
        table = io.BytesIO()
        arrow.parquet.write_table(arrow.Table.from_pylist(rows), table)
        return table.getvalue()

    files = {
        "README.md": CARD.encode(),
        "data/train_sft-00000-of-00002.parquet": parquet(lines[:40]),
        "data/train_sft-00001-of-00002.parquet": parquet(lines[40:]),
        "data/test-00000-of-00001.parquet": parquet(lines[:8]),
        "small/train.jsonl": data["sft-eval"].read_bytes(),
    }
    hub.repositories["Org/Set"] = Repository(files=files)
    return hub


def test_data_are_named_by_their_dataset_and_split(
    sets: Hub,
    data: dict[str, Path],
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ("--model", tiny("qwen2"), "-o", tmp_path / "out")
    split = ("--dataset_train_split", "train_sft")
    small = ("--data", "hf://datasets/Org/Set@main", "--dataset-config", "small")
    for words in (
        ("--dataset_name", "Org/Set", *split),
        ("--data", "Org/Set", *split, "--eval-data", "Org/Set"),
        small,
    ):
        result = dry(tmp_path, *model, *words)
        assert result.code == 0, result.out + result.err
        found = json.loads(result.out)["preflight"]
        (path,) = Run.of_dict(found["run"]).data.paths
        if words is small:
            expected = [json.loads(line) for line in data["sft-eval"].read_text().splitlines()]
        else:
            folder = str(snapshot_download("Org/Set", repo_type="dataset"))
            expected = list(datasets.load_dataset(folder, split="train_sft"))
        assert list(read_records(path, "sft")) == expected
    assert found["records"] == 11
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert dry(tmp_path, *model, *small).code == 0, "the cache has it"
    shutil.rmtree(tmp_path / "cache")
    ((code, _, remedy),) = problems(dry(tmp_path, *model, *small))
    assert (
        code == "hub-dataset-not-cached"
        and "hf download Org/Set --repo-type dataset --revision main" in remedy
    )


def test_a_mixture_of_trl_names_splits(
    sets: Hub, data: dict[str, Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = tmp_path / "sft.yaml"
    listed = (
        f"  - path: Org/Set\n    split: test\n  - {{path: Org/Set, name: small}}\n  - path: {data['sft']}\n"
    )
    config.write_text(
        f"model_name_or_path: {tiny('qwen2')}\noutput_dir: {tmp_path / 'out'}\ndatasets:\n{listed}"
    )
    result = dry(tmp_path, "--config", config)
    assert result.code == 0, result.out + result.err
    told = json.loads(result.out)["preflight"]
    assert [each["records"] for each in told["sources"]] == [8, 11, 64]


def test_a_dataset_takes_no_more_than_its_split(sets: Hub, tiny: Callable[..., Path], tmp_path: Path) -> None:
    words = (
        "--model",
        tiny("qwen2"),
        "-o",
        tmp_path / "out",
        "--data",
        "Org/Set:1",
        "--dataset-train-split",
        "test",
    )
    assert dry(tmp_path, *words).code == 0
    fetched = {
        path.rpartition("/")[2] for method, path in sets.requests if method == "GET" and "/resolve/" in path
    }
    assert fetched == {"README.md", "test-00000-of-00001.parquet"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("Org/Set",), "hub-dataset-split-missing", "did you mean train_sft?"),
        (("Org/Set", "--dataset-config", "large"), "hub-dataset-unreadable", "--dataset-config"),
        (("Org/Absent",), "hub-dataset-not-found", "check the name or path"),
        (("hf://datasets/Org/Set@v9",), "hub-dataset-not-found", "check the name or path"),
        (("no/where.jsonl",), "data-not-found", "--data"),
    ],
)
def test_datasets_that_are_not_there_are_told_apart(
    sets: Hub, tiny: Callable[..., Path], tmp_path: Path, words: tuple[str, ...], code: str, said: str
) -> None:
    result = dry(tmp_path, "--model", tiny("qwen2"), "-o", tmp_path / "out", "--data", *words)
    found = [(each, remedy) for each, _, remedy in problems(result)]
    assert [each for each, _ in found] == [code] and said in found[0][1]


def test_a_config_of_trl_is_taken_as_it_is(
    hub: Hub, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"(?s)```yaml\n(model_name_or_path: .*?)```", page)
    config = tmp_path / "sft.yaml"
    config.write_text(f"{shown}model_revision: main\nload_in_4bit: false\nresume_from_checkpoint: null\n")
    hub.repositories["Qwen/Qwen3-0.6B"] = hub.repositories[NAME]
    (tmp_path / "chats.jsonl").symlink_to(data["sft"])
    monkeypatch.chdir(tmp_path)
    result = dry(tmp_path, "--config", config)
    assert result.code == 0, result.out + result.err
    run = json.loads(result.out)["preflight"]["run"]
    assert name_of(Path(run["model"])) == "Qwen/Qwen3-0.6B" and run["output"] == str(tmp_path / "out")
    assert run["lora"] and run["options"]["learning_rate"] == 2e-4


def test_flags_have_dashes_or_underscores(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    words = [
        "--model_name_or_path",
        tiny("qwen2"),
        "--dataset-name",
        data["sft"],
        "--output_dir",
        tmp_path / "out",
    ]
    result = reshard(
        "train", "sft", *words, "--nan_steps", 3, "--eval_data", data["sft-eval"], "--dry_run", "--json"
    )
    assert result.code == 0, result.out + result.err
    run = Run.of_dict(json.loads(result.out)["preflight"]["run"])
    assert (run.nan_steps, str(run.eval_data)) == (3, str(data["sft-eval"]))


def test_misspelled_names_are_named_with_the_right_ones(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    found = problems(dry(tmp_path, "--modle", "x", "--dataset_nam", "y", "--output-dri=z"))
    assert [remedy for _, _, remedy in found] == [
        f"did you mean --{name}?" for name in ("model", "data", "output")
    ]
    words = ("--model", tiny("qwen2"), "--data", data["sft"], "-o", tmp_path / "out")
    found = problems(dry(tmp_path, *words, "--eval_dta", "x", "--learnin_rate", 1, "--dryrun"))
    assert [remedy for _, _, remedy in found] == [
        f"did you mean --{name}?" for name in ("eval-data", "learning_rate", "dry-run")
    ]
    config = tmp_path / "run.yaml"
    config.write_text("model: a\nmodel_name_or_path: b\n")
    ((code, said, _),) = problems(dry(tmp_path, "--config", config))
    assert code == "option-given-twice" and said == "model: a, model_name_or_path: b"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trl", "megatron"])
def test_an_adapter_names_its_base_as_the_hub_does_and_is_resumed_on_another_machine(
    hub: Hub, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    out = tmp_path / "out"
    of_engine = {
        "trl": ("--per_device_train_batch_size", 8, "--save_steps", 4),
        "megatron": ("--seq_length", 64, "--global_batch_size", 8, "--save_interval", 1),
    }[engine]
    words = (
        "--model",
        NAME,
        "--data",
        data["sft"],
        "-o",
        out,
        "--engine",
        engine,
        "--lora",
        "--nproc",
        1,
        *of_engine,
    )
    result = reshard("train", "sft", *words)
    assert result.code == 0, result.err
    config = json.loads((out / "final" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == NAME
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "cache")
    result = reshard("train", "sft", "--resume", "-o", out)
    assert result.code == 0, result.err
    assert (tmp_path / "elsewhere").is_dir()
