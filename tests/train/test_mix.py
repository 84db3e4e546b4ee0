"""Several sources: how often an epoch uses each record, and a run that resumes among them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import ReshardError
from reshard.training.data import (
    digest,
    digest_of,
    load_dataset,
)
from reshard.training.data.mix import mix_of, read_mix
from reshard.training.run import Run
from tests.train.test_data import lines
from tests.train.trl_runs import STEPS, train


@pytest.mark.parametrize(
    ("weights", "sizes", "seen"),
    [
        (("", ""), (10, 3), [10, 3]),
        ((":0.7", ":0.3"), (70, 30), [70, 30]),
        ((":0.7", ":0.3"), (70, 10), [70, 30]),
        ((":1", ":3"), (10, 7), [10, 30]),
        ((":2", ":1"), (0, 5), [0, 5]),
    ],
)
def test_an_epoch_sees_every_record_and_each_source_by_its_weight(
    tmp_path: Path, weights: tuple[str, str], sizes: tuple[int, int], seen: list[int]
) -> None:
    mix = read_mix(
        "--data", [f"{tmp_path}/{name}{weight}" for name, weight in zip("ab", weights, strict=True)]
    )
    assert mix.seen(sizes) == seen
    picks = mix.picks(sizes)
    assert (picks is None) == (seen == list(sizes))
    if picks is not None:
        counts = [list(picks).count(index) for index in range(sum(sizes))]
        assert [sum(counts[: sizes[0]]), sum(counts[sizes[0] :])] == seen
        assert max(counts[sizes[0] :]) - min(counts[sizes[0] :]) <= 1
        again = mix_of(mix.recorded()).picks(sizes)
        assert again is not None and list(picks) == list(again)


def test_a_colon_belongs_to_the_path_that_is_there(tmp_path: Path) -> None:
    lines(tmp_path / "a:2", {"text": "a"})
    mix = read_mix("--data", [f"{tmp_path}/a:2", f"{tmp_path}/b:c.jsonl"])
    assert [source.weight for source in mix.sources] == [None, None]
    assert [path.name for path in mix.paths] == ["a:2", "b:c.jsonl"]
    weighted = read_mix("--data", [f"{tmp_path}/a:2:3", f"{tmp_path}/b:c.jsonl:0.5"])
    assert [source.weight for source in weighted.sources] == [3, 0.5] and weighted.paths == mix.paths
    assert read_mix("--data", weighted.words) == weighted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a:0", "b:1"], "a weight of data must be greater than 0"),
        (["a:nan", "b:1"], "a weight of data must be greater than 0"),
        (["a:1", "b"], "some of the data have a weight"),
        (["a", "b", "a"], "the same data are passed twice"),
        ([{"a": 1}], "--data is not a path"),
    ],
)
def test_a_wrong_mix_is_refused(words: list[Any], message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        read_mix("--data", words)


def test_a_mix_is_an_epoch_of_its_sources(tmp_path: Path) -> None:
    few = lines(tmp_path / "few.jsonl", {"text": "a"}, {"text": "b"})
    many = lines(tmp_path / "many.jsonl", *({"text": str(number)} for number in range(9)))
    mix = read_mix("--data", [f"{few}:1", f"{many}:1"])
    found = [row["text"] for row in load_dataset(mix, "sft")]
    assert sorted(found[9:]) == [str(number) for number in range(9)]
    assert sorted(found[:8]) == ["a"] * 4 + ["b"] * 4 and found[8] in "ab"
    assert digest_of(mix) != digest_of(read_mix("--data", [f"{few}:2", f"{many}:1"]))
    assert digest_of(mix_of(few)) == digest(few)


@pytest.mark.slow
def test_a_run_goes_on_in_a_weighted_mix_as_if_it_had_not_been_killed(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The records of one source are used several times."""
    sources = [
        lines(
            tmp_path / f"{name}.jsonl",
            *({"text": f"{name} {number} " * (number + 2)} for number in range(count)),
        )
        for name, count in (("few", 3), ("many", 7))
    ]
    mix = read_mix("--data", [f"{path}:1" for path in sources])
    assert mix.seen([3, 7]) == [7, 7]
    options = {**STEPS, "per_device_train_batch_size": 2, "max_steps": 9, "save_steps": 4}
    run = Run("sft", tiny("qwen2"), mix, tmp_path / "whole", token_cache=False, options=options)
    whole = train(run, 1)
    assert not whole.failed, whole.log
    shutil.copytree(run.output / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")
    again = train(replace(run, output=tmp_path / "resumed", resume=True), 1)
    assert not again.failed, again.log
    assert again.losses == whole.losses[4:]
    assert again.trained.digests == whole.trained.digests
