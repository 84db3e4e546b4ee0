"""The published files: the wheel, the sdist, and the files that GitHub reads."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.specifiers import SpecifierSet

from reshard.version import __version__
from tests import environments, first_run
from tests.first_run import Fresh

REPOSITORY = Path(__file__).parents[1]
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
ZERO = REPOSITORY / "tests" / "data" / "deepspeed" / "z2"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_the_version_is_one() -> None:
    changes = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert changes[0] == citation["version"] == __version__


def test_ci_covers_the_pythons_that_are_declared() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    whole = next(step for step in jobs["test"]["steps"] if "setup-python" in step.get("uses", ""))
    others = [jobs[name]["strategy"]["matrix"]["python"] for name in ("smoke", "oldest")]
    tried = {whole["with"]["python-version"], *chain(*others)}
    declared = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert tried == declared
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in declared)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= targets
    assert all((REPOSITORY / name).exists() for name in re.findall(r"\btests/[\w./]+", commands))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_for_what_reshard_sees(path: Path) -> None:
    labels = " ".join(
        each["attributes"].get("label", "") for each in yaml.safe_load(path.read_text())["body"]
    )
    assert re.search(r"`reshard inspect \S+ --json`", labels)
    assert re.search(r"`reshard doctor (\S+ )?--json`", labels)


SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.citation-file-format": [REPOSITORY / "CITATION.cff"],
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_of_github_are_valid(schema: str) -> None:
    done = tool("check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout


def tool(name: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment in which releases are made; its output is in `stdout`."""
    program = Path(environments.python("release")).with_name(name)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(program), *map(str, words)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables | environment,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = tool("python", "-m", "build", "--no-isolation", "-o", folder, REPOSITORY)
    assert done.returncode == 0, done.stdout
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_what_runs_and_the_sdist_what_tests_it(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {member.filename: member.file_size for member in archive.infolist()}
    source = {name.removeprefix("src/") for name in inside if name.startswith("src/")}
    assert source == {name for name in packed if name.startswith("reshard/")}
    assert {"reshard/py.typed", "reshard/runs/checks/rules/code.yaml"} <= source
    assert inside.keys() - {"PKG-INFO"} == tracked()
    assert max([*inside.values(), *packed.values()]) < 1 << 20
    assert wheel.stat().st_size < 5 << 20 and sdist.stat().st_size < 30 << 20


def tracked() -> set[str]:
    """The files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if (REPOSITORY / name).is_file()}


@pytest.mark.slow
def test_an_index_takes_them(built: tuple[Path, Path]) -> None:
    done = tool("twine", "check", "--strict", *built)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_links_on_the_page_of_the_index_lead_somewhere(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        page = archive.read(f"reshard-{__version__}.dist-info/METADATA").decode()
    links = re.findall(r'(?:\]\(|href="|src(?:set)?=")([^)"\s]+)', page)
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_an_archive_runs_where_nothing_else_is_installed(
    kind: str, built: tuple[Path, Path], tmp_path: Path
) -> None:
    fresh = Fresh(tmp_path, built[kind == "wheel"])
    assert fresh.run("reshard", "--version").strip().endswith(__version__)
    assert "megatron" in fresh.run("reshard", "support")
    assert json.loads(fresh.run("reshard", "doctor", "--json"))["environment"]["torch"] is None
    fresh.run("reshard", "convert", str(ZERO), "model", "--no-tokenizer")
    fresh.run("reshard", "verify", str(ZERO), "model", "--json")
    assert (tmp_path / "venv" / "share" / "man" / "man1" / "reshard-convert.1").is_file()


@pytest.mark.slow
def test_the_first_page_works_outside_of_the_clone(
    built: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first_run.main([*built], extras=False)
    assert capsys.readouterr().out.count("bit for bit") == len(built)


@pytest.mark.slow
def test_a_remedy_that_installs_works_as_printed(built: tuple[Path, Path], tmp_path: Path) -> None:
    fresh = Fresh(tmp_path, built[1])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    convert = ("reshard", "convert", str(model), "out", "--on", "slurm:partition=debug", "--json")
    remedy = json.loads(fresh.run(*convert, status=2))["problems"][0]["remedy"]
    command = remedy.removesuffix(", here and on all nodes")
    assert command == f"pip install 'reshard[slurm] @ {built[1].as_uri()}'"
    fresh.run("bash", "-c", command)
    after = json.loads(fresh.run(*convert, status=2))["problems"][0]
    assert "remedy" not in after or "pip install" not in after["remedy"]


RUNNERS = [
    shlex.split(line)
    for line in (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith(("uv ", "pipx "))
]


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNNERS, ids=lambda words: " ".join(words[:2]))
def test_it_installs_from_a_clone_as_the_readme_says(tmp_path: Path, words: list[str]) -> None:
    homes = {"UV_CACHE_DIR": "uv", "UV_TOOL_DIR": "tools", "PIPX_HOME": "pipx", "PIPX_SHARED_LIBS": "shared"}
    programs = {"PIPX_BIN_DIR": "bin", "UV_TOOL_BIN_DIR": "bin"}
    places = {name: str(tmp_path / folder) for name, folder in {**homes, **programs}.items()}
    done = tool(*words, **places)
    assert done.returncode == 0, done.stdout
    program = [tmp_path / "bin" / "reshard", "inspect", ZERO]
    assert "deepspeed" in subprocess.run(program, capture_output=True, text=True, check=True).stdout
    shutil.rmtree(tmp_path)
