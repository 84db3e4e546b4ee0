"""Megatron's indexed datasets: written and read by megatron-core, and trained on as in a plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core.datasets.helpers")

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from transformers import AutoModelForCausalLM, AutoTokenizer

from reshard.algebra.layout import Layout
from reshard.engines.megatron.session import run_ranks
from reshard.training.data.mix import DataMix, read_mix
from tests.commandline import reshard
from tests.train.megatron import DECAY, EPSILON, ROWS, STEPS, cosine, run_of, train, train_and_die

Tiny = Callable[..., Path]
LENGTH = 32
SEED = 1234


def write(prefix: Path, model: Path, first: int, count: int) -> Path:
    """A dataset of `count` documents, by megatron-core's own writer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for number in range(first, first + count):
        text = f"{number} plus {number * 7} is {number * 8}; " * (1 + number % 5)
        tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def prefixes(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets, the second smaller."""
    folder = tmp_path_factory.mktemp("indexed")
    return write(folder / "books", tiny("qwen3"), 0, 60), write(folder / "code", tiny("qwen3"), 500, 20)


def mix(*words: object) -> DataMix:
    return read_mix("--data", [str(word) for word in words])


class Plain:
    """A tokenizer with only the attributes that datasets of tokens use."""

    unique_identifiers = ()
    vocab_size = None
    eod = -1


def plain(model: Path, blend: tuple[list[str], list[float] | None], cache: Path) -> list[float]:
    """The losses of a plain loop over megatron-core's dataset, built and sampled as in Megatron-LM."""
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=blend,
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=Plain(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    data, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [STEPS * ROWS, 0, 0], lambda: True, config).build()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    groups = [
        {
            "params": [each for each in network.parameters() if (each.ndim > 1) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, eps=1e-8)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        rows = [data[index] for index in range(step * ROWS, (step + 1) * ROWS)]
        logits = network(torch.stack([row["tokens"] for row in rows])).logits
        labels = torch.stack([row["labels"] for row in rows])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses(*given: Any) -> list[float]:
    """The same, in a process with a process group, because megatron-core asks for the rank."""
    found: list[float] = run_ranks(1, plain, *given)[0]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "ranks", "weights"),
    [
        (Layout(tp=2), 2, (0.7, 0.3)),
        pytest.param(Layout(), 1, None, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2), 4, (1.0, 5.0), marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_a_plain_loop_over_the_same_dataset(
    layout: Layout,
    ranks: int,
    weights: tuple[float, ...] | None,
    tiny: Tiny,
    prefixes: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    used = prefixes if weights else prefixes[:1]
    words = [f"{prefix}:{weight}" for prefix, weight in zip(used, weights or ("",), strict=True)]
    given = mix(*words) if weights else mix(*used)
    run = run_of(tiny("qwen3"), given, tmp_path / "out", layout, seq_length=LENGTH, seed=SEED)  # type: ignore[arg-type]
    seen, _ = train(run, ranks)
    blend = [str(prefix) for prefix in used], list(weights) if weights else None
    assert seen.losses == pytest.approx(plain_losses(tiny("qwen3"), blend, tmp_path / "cache"), abs=EPSILON)
    assert seen.losses[-1] < seen.losses[0]
    assert not (run.output / ".rows").exists() and not (used[0].parent / "cache").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_the_samples_that_follow(
    tiny: Tiny, prefixes: tuple[Path, Path], tmp_path: Path
) -> None:
    given = mix(f"{prefixes[0]}:2", f"{prefixes[1]}:1")

    def run(name: str, **more: Any) -> Any:
        options = {"seq_length": LENGTH, "save_interval": 2, "eval_data": mix(prefixes[1]), **more}
        return run_of(tiny("qwen3"), given, tmp_path / name, **options)  # type: ignore[arg-type]

    whole, trained = train(run("whole"))
    train_and_die(run("killed"), 1, after=3)
    again, resumed = train(run("killed", resume=True))
    assert again.done == 2 and again.losses == whole.losses[2:]
    assert again.evaluations == {STEPS: whole.evaluations[STEPS]} and resumed.digests == trained.digests


def test_a_dry_run_counts_sequences(tiny: Tiny, prefixes: tuple[Path, Path], tmp_path: Path) -> None:
    data = ("--data", f"{prefixes[0]}:0.7", "--data", f"{prefixes[1]}.idx:0.3", "--eval-data", prefixes[1])
    words = (
        "--model",
        tiny("qwen3"),
        "-o",
        tmp_path / "out",
        "--engine",
        "megatron",
        "--seq_length",
        LENGTH,
        *data,
    )
    result = reshard("train", "sft", *words, "--dry-run", "--json")
    assert result.code == 0, result.out + result.err
    found = json.loads(result.out)["preflight"]
    assert found["records"] == found["lengths"]["records"] > 60
    assert found["batches"]["steps"] == -(-found["records"] // 16) and found["evaluation"]["records"] > 10


def test_datasets_that_do_not_fit_are_refused(
    tiny: Tiny, prefixes: tuple[Path, Path], tmp_path: Path
) -> None:
    foreign, cut, records = tmp_path / "foreign", tmp_path / "cut", tmp_path / "a.jsonl"
    builder = IndexedDatasetBuilder(f"{foreign}.bin", dtype=np.int32)
    builder.add_document(torch.arange(40) + 100_000, [40])
    builder.finalize(f"{foreign}.idx")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"cut{suffix}").write_bytes(prefixes[0].with_name(f"books{suffix}").read_bytes())
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-10])
    records.write_text('{"text": "a"}\n')

    def refused(*data: object, engine: str = "megatron") -> dict[str, str]:
        given = [word for each in data for word in ("--data", each)]
        words = ("--model", tiny("qwen3"), "-o", tmp_path / "out", "--engine", engine, "--seq_length", LENGTH)
        words = words[:-2] if engine == "trl" else words
        result = reshard("train", "sft", *words, *given, "--dry-run", "--json")
        assert result.code == 2 and "Traceback" not in result.err
        return {each["code"]: str(each.get("found")) for each in json.loads(result.out)["problems"]}

    found = refused(foreign, cut)
    assert found.keys() == {"indexed-data-exceed-vocabulary", "indexed-data-unreadable"}
    assert (
        "100039" in found["indexed-data-exceed-vocabulary"] and "cut.bin" in found["indexed-data-unreadable"]
    )
    assert refused(prefixes[0], records).keys() == {"indexed-data-mixed"}
    assert refused(prefixes[0], engine="trl").keys() == {"indexed-data-unsupported"}
