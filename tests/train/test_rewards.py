"""Several rewards of GRPO: their names, weights and sum."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.base.errors import ReshardError
from reshard.training import trl
from reshard.training.launching.run_record import words_of
from reshard.training.rewards import named_rewards
from reshard.training.run import Run
from reshard.training.run_request import run_of as asked
from reshard.training.trl.trainer_arguments import arguments_of
from tests.train.test_trl_options import FOLDER, loaded, run_of
from tests.train.trl_plans import run_of as run_on
from tests.train.trl_runs import train

BOTH = ("rewards.py:variety:0.75", "rewards:length:0.25")


@pytest.fixture(autouse=True)
def _where_rewards_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_reward_is_named_by_module_or_file_with_a_weight() -> None:
    by_file, by_module = map(named_rewards, BOTH)
    assert (by_file.file, by_file.function, by_file.weight) == (Path("rewards.py"), "variety", 0.75)
    assert (by_module.file, by_module.in_file, by_module.weight) == (Path("rewards.py"), False, 0.25)
    assert named_rewards("a.b:c").file == Path("a/b.py") and named_rewards("a.b:c").weight is None


def test_the_weights_reach_trl() -> None:
    run = replace(run_of("grpo"), reward=(*BOTH, "tests.train.rewards:length"))
    assert arguments_of(run, trl.ENGINE.options(run)).reward_weights == [0.75, 0.25, 1.0]
    plain = run_of("grpo", reward_weights="0.5")
    assert arguments_of(plain, trl.ENGINE.options(plain)).reward_weights == [0.5]


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (("rewards:variety:heavy",), {}, "reward-weight-no-number"),
        (("nowhere.py:variety",), {}, "reward-module-missing"),
        (("rewards:variety", "rewards:variety"), {}, "reward-named-twice"),
        (BOTH, {"reward_weights": "1,2"}, "reward-weights-disagree"),
        (("rewards:variety",), {"reward_weights": "1,2"}, "reward-weights-disagree"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(
    names: tuple[str, ...], options: dict[str, str], code: str
) -> None:
    with pytest.raises(ReshardError) as refused:
        loaded(replace(run_of("grpo", **options), reward=names))
    assert [problem.code for problem in refused.value.problems] == [code]


def test_several_rewards_come_from_flags_and_yaml_and_into_the_command(tmp_path: Path) -> None:
    flags = {"model": tmp_path, "data": tmp_path, "output": tmp_path / "out"}
    run = asked("grpo", {**flags, "reward": BOTH})
    config = tmp_path / "run.yaml"
    config.write_text("reward:\n" + "".join(f"- {each}\n" for each in BOTH))
    assert run.reward == BOTH == asked("grpo", flags, config=config).reward
    assert Run.of_dict(run.as_dict()) == run
    words = words_of(run)
    assert [words[place + 1] for place, word in enumerate(words) if word == "--reward"] == list(BOTH)


@pytest.mark.thorough
def test_the_reward_is_the_weighed_sum(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    run = run_on("one", "grpo", tiny("qwen3"), data["grpo"], tmp_path / "out", False, 1, {"max_steps": 1})
    ran = train(replace(run, reward=BOTH), 1)
    assert not ran.failed, ran.log
    (row,) = ran.rows
    parts = [row[f"rewards/{name}/mean"] for name in ("variety", "length")]
    assert parts[0] != parts[1]
    assert row["reward"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
