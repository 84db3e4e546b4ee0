"""What versions, GPUs and variables break together."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.doctor.environment import Environment, Gpu, diagnose_environment


def environment(tmp_path: Path, **changes) -> Environment:
    healthy = {
        "versions": {"transformers": "5.2.0", "accelerate": "1.15.0", "trl": "1.1.0", "peft": "0.21.0"}
    }
    return Environment(
        **{**healthy, "gpus": [], "driver": None, "variables": {}, "home": tmp_path, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "identifier"),
    [
        (
            {"versions": {"transformers": "4.51.3"}, "variables": {"WORLD_SIZE": "1", "RANK": "0"}},
            "env-device-map-tp",
        ),
        ({"gpus": [Gpu("Tesla V100-SXM2-32GB", 7.0, 32 << 30)]}, "env-no-bf16"),
        ({"versions": {"accelerate": "1.9.0", "peft": "0.17.0"}}, "env-accelerate-fsdp2-lora"),
        ({"versions": {"trl": "1.0.0", "transformers": "4.49.0"}}, "env-trl-transformers"),
        ({"variables": {"WORLD_SIZE": "8"}}, "env-stale-world-size"),
        (
            {
                "gpus": [Gpu("A100", 8.0, 80 << 30)] * 2,
                "variables": {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "0"},
            },
            "env-more-processes-than-gpus",
        ),
    ],
)
def test_what_an_environment_breaks(tmp_path: Path, changes: dict, identifier: str) -> None:
    assert [finding.id for finding in diagnose_environment(environment(tmp_path, **changes))] == [identifier]


def test_a_stray_accelerate_config_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("distributed_type: FSDP\n")
    (found,) = diagnose_environment(environment(tmp_path))
    assert found.id == "env-accelerate-default-config" and str(path) in found.cure.en


def test_a_healthy_environment_has_no_finding(tmp_path: Path) -> None:
    assert diagnose_environment(environment(tmp_path)) == []
