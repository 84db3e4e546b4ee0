"""The parts in which continuous integration runs the tests: `pytest --part NAME`, or `make part PART=NAME`.

A file that no other part names is in "rest". "smoke" repeats some files of all parts, for the other Pythons.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent
PARTS: dict[str, tuple[str, ...]] = {
    "formats": (
        *("families/*", "formats/*", "genuine/*", "internlm/*", "test_families.py", "test_more_families.py"),
        *(
            "test_dcp_format.py",
            "test_deepspeed.py",
            "test_fsdp_ranks*.py",
            "test_gguf*.py",
            "test_megatron_*.py",
        ),
        *(
            "test_huggingface_format.py",
            "test_litgpt.py",
            "test_mistral.py",
            "test_mlx.py",
            "test_nanotron.py",
        ),
        *("test_olmo_core.py", "test_optimizer*.py", "test_orbax.py", "test_paddle.py", "test_torchtitan.py"),
    ),
    "doctor": ("bad_input/*", "doctor/*", "faults/*", "fuzz/*"),
    "training": ("guard/*", "live/*", "memory/*", "train/*", "test_demo.py", "test_guard.py"),
    "rest": (),
}
SMOKE = (
    *("bad_input/test_damaged_files.py", "doctor/test_catalogue.py", "doctor/test_diagnosis.py"),
    *(
        "doctor/test_log.py",
        "families/test_config.py",
        "formats/test_torchfile.py",
        "formats/test_torchwrite.py",
    ),
    *("guard/test_checkpoints.py", "guard/test_command.py", "live/test_streams.py", "stores/test_web.py"),
    *("test_api.py", "test_cli.py", "test_dcp_format.py", "test_execute.py", "test_fsdp_ranks.py"),
    *(
        "test_huggingface_format.py",
        "test_json.py",
        "test_mcp.py",
        "test_megatron_ranks.py",
        "test_output.py",
    ),
    *(
        "test_peft.py",
        "test_resume.py",
        "test_staging.py",
        "test_threads.py",
        "test_usage.py",
        "test_views.py",
    ),
    *("train/test_data.py", "train/test_recipe.py", "train/test_trainer_callback.py"),
)
"""What depends most on the version of Python: pickles, processes, signals, terminals, annotations and frameworks."""


def parts_of(file: str) -> list[str]:
    """The parts of a file, which is relative to this folder."""
    named = [name for name, patterns in PARTS.items() if any(fnmatch(file, each) for each in patterns)]
    return named or ["rest"]


def is_in(part: str, path: Path) -> bool:
    """Whether a test file belongs to a part."""
    file = path.relative_to(TESTS).as_posix()
    return file in SMOKE if part == "smoke" else part in parts_of(file)
