"""Remedies name the right package to install in each environment."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import packaging.requirements  # noqa: F401 - while it is installed: the fixture hides all other packages
import pytest

from reshard.base.missing_packages import install_command, remedy

REQUIRES = """\
Requires-Dist: numpy>=1.26
Requires-Dist: s3fs>=2025.2; extra == 's3'
Requires-Dist: huggingface-hub>=0.30; extra == 'hub'
Requires-Dist: huggingface-hub>=0.30; extra == 'stores'
Requires-Dist: s3fs>=2025.2; extra == 'stores'
Requires-Dist: torch>=2.6; extra == 'torch'
Requires-Dist: torch>=2.6; extra == 'megatron'
Requires-Dist: psutil>=5.9; extra == 'megatron'
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata folder of a reshard installed on its own, by a pip that a shell finds."""
    folder = tmp_path / "site" / "reshard-0.2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: reshard\nVersion: 0.2.0\n{REQUIRES}")
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    pip = folder.with_name("pip-26.0.dist-info")
    pip.mkdir()
    (pip / "METADATA").write_text("Metadata-Version: 2.1\nName: pip\nVersion: 26.0\n")
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).with_name(name)))
    return folder


COMMIT = "0" * 40
GIT = {"vcs": "git", "commit_id": COMMIT, "requested_revision": "main"}


@pytest.mark.parametrize(
    ("origin", "command"),
    {
        "a place that is not recorded": (None, "pip install 'huggingface-hub>=0.30'"),
        "editable": (
            {"url": "{uri}", "dir_info": {"editable": True}},
            "pip install -e '{here}[hub]'",
        ),
        "a folder": ({"url": "{uri}", "dir_info": {}}, "pip install 'reshard[hub] @ {uri}'"),
        "a wheel that is gone": (
            {"url": "file:///gone/reshard-0.2.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'huggingface-hub>=0.30'",
        ),
        "a URL": (
            {"url": "https://host/reshard-0.2.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'reshard[hub] @ https://host/reshard-0.2.0-py3-none-any.whl'",
        ),
        "git": (
            {"url": "https://host/reshard", "vcs_info": GIT, "subdirectory": "python"},
            f"pip install 'reshard[hub] @ git+https://host/reshard@{COMMIT}#subdirectory=python'",
        ),
    }.values(),
)
def test_a_package_comes_from_where_reshard_came(
    installed: Path, tmp_path: Path, origin: dict[str, object] | None, command: str
) -> None:
    here = tmp_path / "a folder"
    here.mkdir()
    if origin:
        (installed / "direct_url.json").write_text(json.dumps(origin).replace("{uri}", here.as_uri()))
    assert install_command("huggingface_hub") == command.replace("{here}", str(here)).replace(
        "{uri}", here.as_uri()
    )
    assert shlex.split(command)


def test_the_extra_follows_from_the_packages(installed: Path) -> None:
    assert install_command("s3fs") == "pip install 's3fs>=2025.2'"
    assert install_command("torch") == "pip install 'torch>=2.6'"
    assert install_command("torch", "psutil") == "pip install 'torch>=2.6' 'psutil>=5.9'"
    assert install_command("numpy") == "pip install 'numpy>=1.26'"
    assert install_command("pyarrow") == "pip install pyarrow"


def test_a_module_is_never_taken_for_a_package_that_nobody_named(installed: Path) -> None:
    def told(module: str) -> str:
        return remedy(ModuleNotFoundError(f"No module named {module!r}", name=module))

    assert told("s3fs.core") == "pip install 's3fs>=2025.2'"
    assert (
        told("megatron.core")
        == "pip install 'torch>=2.6' 'psutil>=5.9' && pip install --no-deps megatron-core"
    )
    assert told("google.protobuf") == "install the package that has the module 'google'"
    assert remedy(ImportError("no symbol")) == "see which package cannot be loaded"


def test_a_checkout_on_the_path_names_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert install_command("s3fs", "boto3").endswith(" s3fs boto3")


def test_the_command_is_of_the_python_that_runs(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/elsewhere/{name}")
    assert install_command("s3fs") == f"{sys.executable} -m pip install 's3fs>=2025.2'"
    shutil.rmtree(installed.with_name("pip-26.0.dist-info"))
    assert install_command("s3fs") == f"uv pip install --python {sys.executable} 's3fs>=2025.2'"


def test_every_package_that_is_asked_for_has_an_extra() -> None:
    """Compared with the metadata of this reshard."""
    from reshard.cluster.slurm_executor import PACKAGE
    from reshard.containers import orbax_arrays
    from reshard.stores.registry import SCHEMES

    assert orbax_arrays.OrbaxStore in SCHEMES.values()
    packages = {PACKAGE, *(each.kind.package for each in SCHEMES.values())}
    assert [name for name in packages - {""} if "[" not in install_command(name)] == []
