"""The stable interface: commands, flags, exit statuses, and what is printed where."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard as api
from reshard.base.errors import listed
from reshard.base.values import parse_size
from reshard.cli import cli
from reshard.cli.options import ValueType
from reshard.families import FAMILIES
from reshard.formats import FORMATS, written
from reshard.model.quantizer import STORAGES
from tests.commandline import in_terminal, reshard
from tools import man_pages
from tools.site import commands

CONTRACT = {
    "inspect": "--json",
    "convert": "--to --base --fill-from --tp --pp --vpp --ep --etp --dp --iteration --family --trust --dtype "
    "--max-shard-size --vocab-divisible-by --memory --workers --dry-run --overwrite --no-tokenizer --json "
    "--quiet --debug",
    "verify": "--base --fill-from --logits --proof --json",
    "serve": "--port --host --token --base --dtype --merge --quantize --max-shard-size --memory --no-tokenizer --json",
    "guard": "--check --startup --stall --final --json",
    "train": "--model --data --output --lora --parallel --nproc --reward --write-only --resume --json",
    "doctor": "--lang --list --explain --json --python",
    "watch": "--to --keep --run --once --every --limit-rate --push-to-hub --private --dtype --base --merge --quantize "
    "--max-shard-size --memory --json",
    "mcp": "--time-limit --output-limit --skill --json",
    "support": "--json",
    "help": "",
}
BESIDES = {
    "inspect": "--iteration --remove-unfinished --html --quiet --debug",
    "convert": "--stages --transformer-impl --megatron-model --strict --strip --state-dict --no-checksum "
    "--with-optimizer --merge --adapter --lora-alpha --for --engine --quantize --no-resume --verify --push-to-hub "
    "--private --on --no-sync",
    "verify": "--html --memory --quiet --debug",
    "serve": "--family --fill-from --strip --adapter --lora-alpha --trust --debug",
    "guard": "--on-stall --nan-steps --output --log --merge --base --overwrite --requeue --quiet --debug",
    "train": "--eval-data --engine --merge --nnodes --tp --pp --ep --overwrite --debug",
    "doctor": "--quiet --debug",
    "watch": "--fill-from --family --strip --adapter --lora-alpha --trust --no-tokenizer --debug",
    "mcp": "--debug",
    "support": "--debug",
    "help": "",
}
INSPECT_KEYS = {
    *("format", "family", "layout", "iteration", "tensors", "parameters"),
    *("bytes", "dtypes", "problems", "next"),
}
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3")


@pytest.fixture(scope="module")
def megatron(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "megatron"
    api.convert(model, path, to="megatron", tp=2, pp=2)
    return path


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, except for one tensor with each kind of difference."""
    path = tmp_path_factory.mktemp("cli") / "other"
    api.convert(model, path, to="huggingface")
    tensors: dict[str, Any] = load_file(path / "model.safetensors")
    layer = "model.layers.1."
    tensors[f"{layer}self_attn.q_proj.weight"][0, :3] += 0.5
    tensors[f"{layer}mlp.up_proj.weight"][:] = np.nan
    tensors[f"{layer}self_attn.k_proj.weight"] = tensors[f"{layer}self_attn.k_proj.weight"].astype(np.float16)
    tensors[f"{layer}self_attn.v_proj.weight"] = tensors[f"{layer}self_attn.v_proj.weight"][:32].copy()
    tensors[f"{layer}extra.weight"] = tensors.pop(f"{layer}self_attn.o_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------- what there is


@pytest.mark.parametrize("name", CONTRACT)
def test_help_tells_every_flag_and_there_are_no_others(name: str) -> None:
    flags = {*CONTRACT[name].split(), *BESIDES[name].split()}
    result = reshard(name, "--help")
    assert result.code == 0 and result.err == ""
    assert set(re.findall(r"(?m)^ +(?:-[hoq], )?(--[a-z-]+)", result.out)) == flags | {"--help"}
    options = [each for each in command(name).params if isinstance(each, click.Option)]
    assert {flag for option in options for flag in option.opts} - {"-q", "-o"} == flags
    assert ("-q, --quiet" in result.out) == ("--quiet" in flags)
    assert all(option.help and not option.hidden for option in options)


def test_help_tells_every_command() -> None:
    result = reshard("--help")
    assert result.code == 0 and list(cli.list_commands(click.Context(cli))) == list(CONTRACT)
    assert set(re.findall(r"(?m)^  ([a-z-]+)  ", result.out)) == set(CONTRACT)
    assert "Exit status: 0 done, 1 the check failed, 2 the request is refused." in result.out


def test_formats_to_choose_from_are_those_there_are() -> None:
    to = next(each for each in command("convert").params if each.name == "to")
    assert isinstance(to.type, ValueType) and {*to.type.kind.choices} == written().keys()


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str) -> None:
    result = reshard(flag)
    assert (result.code, result.out) == (0, f"reshard, version {api.__version__}\n")


@pytest.mark.parametrize(
    ("function", "name", "own"),
    [
        (api.inspect, "inspect", {"remove_unfinished", "quiet"}),
        (api.convert, "convert", {"quiet"}),
        (api.verify, "verify", {"quiet"}),
    ],
)
def test_functions_have_the_arguments_of_their_commands(
    function: Callable[..., Any], name: str, own: set[str]
) -> None:
    signature = inspect.signature(function)
    arguments = {each: value for each, value in signature.parameters.items() if not each.startswith("on_")}
    arguments.pop("command", None)  # what was typed
    options: Mapping[str | None, click.Parameter] = {
        "path" if each.name == "paths" else each.name: each for each in command(name).params
    }
    assert arguments.keys() == options.keys() - own - {"json_output", "debug"}
    assert all(value.annotation is not inspect.Parameter.empty for value in arguments.values())
    words = ["A", "B"][
        : sum(isinstance(option, click.Argument) and option.required for option in options.values())
    ]
    given = command(name).make_context(name, words).params
    for argument, value in arguments.items():
        if value.default is not inspect.Parameter.empty:
            default = parse_size(value.default) if argument == "memory" else value.default
            assert given[argument] == default, argument


def test_open_takes_what_inspect_takes() -> None:
    opened, inspected = (inspect.signature(each).parameters for each in (api.open, api.inspect))
    assert [*opened][:2] == [*inspected][:2] == ["path", "iteration"]
    assert {*opened} - {"path"} <= {*inspect.signature(api.convert).parameters}


# ------------------------------------------------------------------------------------------- what is loaded


def loaded(program: str, *words: object) -> set[str]:
    """The modules that a program has loaded at its end."""
    code = f"import atexit, sys\natexit.register(lambda: print('\\nloaded', *sys.modules))\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def packages(modules: set[str]) -> set[str]:
    """The packages of other projects among modules."""
    top = {name.partition(".")[0] for name in modules}
    return {name for name in top - sys.stdlib_module_names if not name.startswith("_")} & REQUIRED


def parts(modules: set[str], package: str) -> set[str]:
    """What is loaded of the packages in a package of reshard, without what declares them."""
    below = (name.removeprefix(f"reshard.{package}.") for name in modules if f"reshard.{package}." in name)
    return {name.partition(".")[0] for name in below if "." in name}


REQUIRED = {"click", "isal", "jinja2", "ml_dtypes", "numpy", "packaging", "rich", "torch", "xxhash", "yaml"}
RUN = "from reshard.__main__ import main\nmain()"


def test_the_command_line_starts_without_what_it_may_not_need() -> None:
    modules = loaded(RUN, "--help")
    assert packages(modules) == {"click"}
    assert {name for name in modules if name.startswith("reshard.")} <= {
        *("reshard.__main__", "reshard.version", "reshard.base", "reshard.cli"),
        *("reshard.cli.options", "reshard.cli.usage"),
        *(name for name in modules if name.startswith("reshard.base.")),
    }
    modules = loaded("import reshard; reshard.__version__")
    assert not packages(modules)


def test_a_command_imports_what_the_format_needs(model: Path, megatron: Path, tmp_path: Path) -> None:
    """Of other formats, only their declarations; of engines, families and stores, what this one asks for."""
    modules = loaded(RUN, "inspect", model)
    assert packages(modules) == {"click", "isal", "packaging", "rich"}
    assert parts(modules, "formats") == parts(modules, "live") == parts(modules, "runs") == set()
    assert not {name for name in modules if name.startswith(("reshard.codecs.", "reshard.planning"))}
    assert {"reshard.formats.huggingface", "reshard.formats.megatron"} <= modules
    families = {name for name in modules if name.startswith("reshard.families.architectures.")}
    assert {name.rpartition(".")[2] for name in families} == {"llama", "qwen2", "qwen3"}
    modules = loaded(RUN, "inspect", megatron)
    assert parts(modules, "formats") == {"megatron"} and "yaml" not in packages(modules)
    assert not {"reshard.formats.megatron.legacy", "reshard.formats.megatron.zarr"} & modules
    modules = loaded(RUN, "convert", model, tmp_path / "out", "--to", "megatron", "--no-tokenizer")
    assert parts(modules, "formats") == {"megatron"} and "yaml" not in packages(modules)
    assert not {"reshard.model.quantizer", "reshard.planning.merged_source"} & modules


def test_no_framework_is_loaded_to_inspect_convert_and_verify(model: Path, tmp_path: Path) -> None:
    program = """
import reshard
model, target = sys.argv[1:]
for to in ("megatron", "megatron-legacy"):
    reshard.convert(model, target + to, to=to, tp=2, pp=2)
    assert reshard.inspect(target + to).whole
    reshard.convert(target + to, target + to + "-hf")
    assert reshard.verify(target + to, target + to + "-hf").equal
"""
    modules = {name.partition(".")[0] for name in loaded(program, model, tmp_path / "x-")}
    frameworks = {"torch", "transformers", "megatron", "safetensors", "tokenizers", "accelerate", "deepspeed"}
    assert "numpy" in modules and not modules & frameworks


# ------------------------------------------------------------------------------------------ what is printed


def test_inspect_json_has_the_keys_of_the_contract(megatron: Path, model: Path) -> None:
    found = reshard("inspect", megatron, "--json").json
    assert found.keys() >= INSPECT_KEYS
    assert found["format"] == "megatron" and found["family"] == "qwen3"
    assert found["layout"] == {"tp": 2, "pp": 2, "vpp": 1, "ep": 1, "etp": 1}
    assert found["iteration"] == "release" and found["dtypes"] == {"float32": 35}
    assert found["bytes"] == 4 * found["parameters"] and found["problems"] == []
    assert found["next"] == f"reshard convert {megatron} {megatron}-hf"
    assert reshard("inspect", model, "--json").json["tensors"] == len(load_file(model / "model.safetensors"))


@pytest.mark.parametrize(
    ("folder", "layout"),
    [
        ("peers/swift/deepseek_v3", {"tp": 1, "pp": 2, "vpp": 1, "ep": 1, "etp": 1}),  # in common.pt
        ("peers/bridge/gpt_oss", {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 1}),  # in run_config.yaml
        ("torchtitan/llama", None),
        ("deepspeed/z1_fp32", None),
        ("fsdp_ranks/torch-2.10.0/fsdp1", None),
        ("internlm/internlm2-tp2pp2", {"tp": 2, "pp": 2, "vpp": 1, "ep": 1, "etp": 1}),  # by names of files
    ],
)
def test_the_layout_of_other_formats(folder: str, layout: dict[str, int] | None) -> None:
    result = reshard("inspect", Path(__file__).parent / "data" / folder, "--json")
    assert result.json["layout"] == layout


def test_a_hugging_face_folder_has_no_layout(model: Path, tmp_path: Path) -> None:
    assert reshard("inspect", model, "--json").json["layout"] is None
    assert "layout" not in reshard("inspect", model).out
    shutil.copyfile(model / "model.safetensors", tmp_path / "model.safetensors")
    assert "layout" not in reshard("doctor", tmp_path).out


def test_inspect_tells_what_to_type_next_and_that_works(megatron: Path, model: Path) -> None:
    result = reshard("inspect", megatron)
    assert result.code == 0 and "TP2 · PP2" in result.out
    words = re.search(r"next +reshard (.*)", result.out)
    assert words is not None
    assert reshard(*words[1].split()).code == 0
    assert reshard("verify", model, f"{megatron}-hf").code == 0


def test_a_name_that_looks_like_an_option_can_be_typed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-dash").symlink_to(model)
    command = shlex.split(reshard("inspect", "--json", "--", "-dash").json["next"])
    assert command[2:4] == ["./-dash", "./-dash-megatron"]
    assert reshard(*command[1:]).code == 0 and Path("-dash-megatron").is_dir()


def test_the_memory_that_is_said_to_be_enough_is_hardly_more(model: Path, tmp_path: Path) -> None:
    words = ("convert", model, tmp_path / "out", "--to", "megatron", "--json", "--memory")
    (problem,) = reshard(*words, "1MiB").json["problems"]
    number = int(problem["remedy"].removeprefix("pass --memory ").removesuffix("MiB"))
    assert reshard(*words, f"{number - 2}MiB").code == 2
    assert reshard(*words, f"{number}MiB").code == 0


def _as_another_user(*words: str) -> str:
    """The messages of a command of a user who is not root, who may look into any folder."""
    reshard(*words)  # imports what it needs, which the other user may not

    def run(sender: Any) -> None:
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        result = reshard(*words)
        sender.send(f"{result.code} {' '.join(result.err.split())}")

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(sender,))
    process.start()
    process.join(60)
    return str(receiver.recv())


@pytest.mark.parametrize(
    ("mode", "lacking"), [(0o744, "search"), (0o711, "read"), (0o700, "read or to search")]
)
def test_a_closed_folder_is_named_with_the_permission_that_lacks(
    model: Path, mode: int, lacking: str
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        shutil.copytree(model, folder / "model")
        (folder / "model").chmod(mode if os.getuid() == 0 else mode >> 6 & mode)
        told = _as_another_user("inspect", str(folder / "model"))
        assert told.startswith("2 error: no permission to read the folder"), told
        assert f"file: {folder / 'model'} " in told and f"no permission to {lacking} it" in told
    finally:
        (folder / "model").chmod(0o755)
        shutil.rmtree(folder)


INTERRUPTED = """
import os, signal, sys

module = sys.argv.pop()

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from reshard.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module", ["click", "reshard.cli", "reshard.cli.inspect", "rich", "reshard.formats.huggingface"]
)
def test_an_interrupt_while_modules_are_imported_is_silent(model: Path, module: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED, "inspect", str(model), module]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_an_iteration_is_known_by_any_path(
    megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config and the tokenizer are above it, even if the path does not show its name."""
    root = Path(shutil.copytree(megatron, tmp_path / "run"))
    (tmp_path / "latest").symlink_to(root / "release")
    monkeypatch.chdir(root / "release")
    for path in (".", "../release/", tmp_path / "latest"):
        assert reshard("convert", path, tmp_path / "out", "--overwrite").code == 0
        assert reshard("inspect", path, "--json").json["iteration"] == "release"
    monkeypatch.chdir(root)
    assert reshard("inspect", ".", "--json").json["next"] == f"reshard convert . {root}-hf"


def test_a_run_that_changed_its_format(model: Path, tmp_path: Path) -> None:
    for step, to in enumerate(("megatron", "megatron-legacy", "megatron"), 1):
        assert reshard("convert", model, tmp_path / to, "--to", to, "--overwrite").code == 0
        shutil.copytree(tmp_path / to / "release", tmp_path / "run" / f"iter_{step:07d}")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    found = [reshard("inspect", tmp_path / "run", "--iteration", step, "--json").json for step in (1, 2, 3)]
    assert [each["format"] for each in found] == ["megatron", "megatron-legacy", "megatron"]
    assert reshard("inspect", tmp_path / "run", "--json").json["iteration"] == 2


def test_a_release_is_chosen_like_a_step(model: Path, megatron: Path, tmp_path: Path) -> None:
    """A run that began from converted weights keeps them next to its own steps; `next` names the selected one."""
    run = Path(shutil.copytree(megatron, tmp_path / "run"))
    api.convert(model, tmp_path / "later", to="megatron", dtype="bfloat16")
    shutil.copytree(tmp_path / "later" / "release", run / "iter_0000005")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    assert reshard("inspect", run, "--json").json["iteration"] == 5
    found = reshard("inspect", run, "--iteration", "release", "--json").json
    assert (found["iteration"], found["next"].split()[2]) == ("release", f"{run}/release")
    assert reshard("convert", run, tmp_path / "hf", "--iteration", "release").code == 0
    assert reshard("verify", tmp_path / "hf", run / "release").code == 0
    assert reshard("verify", tmp_path / "hf", run).code == 1
    for wrong in ("latest", "1.5"):
        result = reshard("inspect", run, "--iteration", wrong)
        assert result.code == 2 and "expected: a step number, or 'release'" in result.err


def test_convert_json_lists_what_was_written(model: Path, tmp_path: Path) -> None:
    result = reshard("convert", model, tmp_path / "dst", "--to", "megatron", "--tp", 2, "--json")
    assert result.err == ""
    found = result.json
    written = {path.relative_to(tmp_path / "dst").as_posix() for path in (tmp_path / "dst").rglob("*.*")}
    files = {file["path"]: file["bytes"] for file in found["files"]}
    assert files.keys() >= written - {"release"} and sum(files.values()) == found["bytes"]
    assert all((tmp_path / "dst" / path).stat().st_size == size for path, size in files.items())
    assert found["layout"]["tp"] == 2 and found["family"] == "qwen3" and found["nonfinite"] == []


def test_dry_run_prints_the_plan_and_writes_nothing(model: Path, megatron: Path, tmp_path: Path) -> None:
    result = reshard("convert", model, tmp_path / "dst", "--to", "megatron", "--tp", 2, "--dry-run")
    assert result.code == 0 and not list(tmp_path.iterdir())
    assert "release/__1_0.distcp" in result.out and "config.json" in result.out
    assert "unmatched: none" in result.out and re.search(r"buffers: at most .* in \d+ threads", result.out)
    result = reshard("convert", megatron, tmp_path / "dst", "--dry-run")
    assert "dropped: vocabulary padding" in result.out and "model.safetensors" in result.out
    planned = reshard("convert", megatron, tmp_path / "dst", "--dry-run", "--json").json
    assert planned["written"] == 0 and planned["dropped"]["vocabulary padding"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--max-shard-size", "0"), "--max-shard-size is not a size"),
        (("--max-shard-size", "0GB"), "--max-shard-size is not a size"),
        (("--memory", "0"), "--memory is not a size"),
        (("--lora-alpha", "nan"), "expected: a finite number"),
        (("--to", "megatron", "--pp", str(10**30)), "an integer of at least 1, and below 2^31"),
    ],
)
def test_a_number_that_means_nothing_is_refused(
    words: tuple[str, ...], told: str, model: Path, tmp_path: Path
) -> None:
    result = reshard("convert", model, tmp_path / "hf", *words)
    assert result.code == 2 and told in result.err and not list(tmp_path.iterdir())


def test_quiet_prints_nothing_but_errors(megatron: Path, tmp_path: Path) -> None:
    result = reshard("convert", megatron, tmp_path / "dst", "--quiet")
    assert result == (0, "", "")
    result = reshard("convert", megatron, tmp_path / "dst", "--quiet")
    assert result.code == 2 and result.out == "" and "error: the destination is not empty" in result.err


@pytest.mark.thorough
def test_without_quiet_the_result_is_told_on_stdout(megatron: Path, tmp_path: Path) -> None:
    result = reshard("convert", megatron, tmp_path / "dst")
    assert result.err == ""
    assert re.search(rf"{tmp_path}/dst: huggingface, .* parameters in 47 tensors, .* in .* s \(", result.out)


def test_names_are_counted_only_where_there_are_more(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    assert listed(["a"], 1) == "a" and listed(["a", "b"], 1) == "a and 1 more" and listed([], 1) == ""
    sized = {"num_hidden_layers": 2, "first_k_dense_replace": 1}  # one layer of experts, so one buffer
    model = hf_model("deepseek_v3", **sized)
    told = reshard("convert", model, tmp_path / "dst", "--to", "deepspeed", "--dry-run").err
    assert "has model.layers.1.mlp.gate.e_score_correction_bias" in told and "more" not in told


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (("inspect", "Qwen/Qwen3-8B"), "name Qwen3-8B"),
        (("convert", "megatron", "dst", "--base", "Qwen/Qwen3-8B"), "--base Qwen3-8B"),
        (("verify", "megatron", "model", "--base", "Qwen/Qwen3-8B"), "--base Qwen3-8B"),
    ],
)
def test_an_id_of_the_hub_is_no_folder_and_how_to_get_it_is_said(
    words: tuple[str, ...],
    then: str,
    model: Path,
    megatron: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    Path("megatron").symlink_to(megatron)
    result = reshard(*words)
    assert result.code == 2 and "Qwen/Qwen3-8B looks like a model id on the Hub" in result.err
    assert f"hf download Qwen/Qwen3-8B --local-dir Qwen3-8B, and then {then};" in result.err
    for path in ("Qwen", "./a/b/c", "/nothing/here", "model/nothing"):
        assert "hf download" not in reshard(*(path if "Qwen" in word else word for word in words)).err


@pytest.fixture(scope="module")
def without_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages, except those of the Hub."""
    folder = tmp_path_factory.mktemp("site")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("huggingface_hub", "hf_")):
            (folder / package.name).symlink_to(package)
    return folder


@pytest.mark.core("words0")
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "Org/Model"),
        ("convert", "Org/Model", "dst"),
        ("convert", "megatron", "dst", "--base", "Org/Model"),
    ],
)
def test_an_id_of_the_hub_needs_its_package_first(
    words: tuple[str, ...], without_hub: Path, model: Path, megatron: Path, tmp_path: Path
) -> None:
    """Also if the model is in the local cache, which only that package can read."""
    snapshot = tmp_path / "hub" / "models--Org--Model" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (tmp_path / "hub" / "models--Org--Model" / "refs").mkdir()
    (tmp_path / "hub" / "models--Org--Model" / "refs" / "main").write_text("0" * 40)
    (tmp_path / "megatron").symlink_to(megatron)
    paths = [str(Path(api.__file__).parents[1]), str(without_hub)]
    code = f"import sys; sys.path += {paths}; from reshard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *words],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Org/Model looks like a model id on the Hub" in told
    assert "which reshard reads with huggingface_hub: " in told and "hf download" not in told
    assert " install " in told.partition("huggingface_hub: ")[2]
    assert not (tmp_path / "dst").exists()


def test_the_page_of_a_model_is_its_id() -> None:
    told = reshard("convert", "https://huggingface.co/Qwen/Qwen3-8B", "dst")
    assert told.code == 2 and "HF_HUB_OFFLINE is set" in told.err and "hf download Qwen/Qwen3-8B" in told.err


def test_verify_equal(model: Path, megatron: Path) -> None:
    assert api.verify(model, megatron)
    result = reshard("verify", model, megatron)
    assert result.code == 0 and result.out.startswith("equal: 47 tensors, 835.8 kB, bit for bit")
    found = reshard("verify", megatron, model, "--json").json
    assert found["equal"] and found["differences"] == [] and found["tensors"] == 47


def test_verify_tells_what_it_took_for_granted(model: Path, megatron: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(megatron, tmp_path / "bare"))
    (bare / "config.json").unlink()
    assert not reshard("verify", bare, megatron, "--json").json["notes"]  # the other side has a config
    (tmp_path / "other").mkdir()
    shutil.copytree(bare / "release", tmp_path / "other" / "release")
    (tmp_path / "other" / "latest_checkpointed_iteration.txt").write_text("release")
    words = ("verify", bare, tmp_path / "other")
    notes = reshard(*words, "--json").json["notes"]
    assert {note[:3] for note in notes} == {"A: ", "B: "} and "derived" in " ".join(notes)
    assert notes[0] in reshard(*words).err


def test_verify_different(model: Path, other: Path) -> None:
    assert not api.verify(model, other)
    result = reshard("verify", model, other)
    assert result.code == 1 and result.out.startswith("different: 5 tensors; 45 were compared\n")
    layer = "model.layers.1."
    rows = {
        f"{layer}self_attn.q_proj.weight": ("values", "3 of 8,192 elements, largest difference 0.5"),
        f"{layer}mlp.up_proj.weight": ("values", "6,144 of 6,144 elements, largest difference nan"),
        f"{layer}self_attn.v_proj.weight": ("shape", "float32 [64, 64] and float32 [32, 64]"),
        f"{layer}self_attn.o_proj.weight": ("only in A", "float32 [64, 128]"),
        f"{layer}extra.weight": ("only in B", "float32 [64, 128]"),
    }
    for tensor, cells in rows.items():
        (line,) = [line for line in result.out.splitlines() if line.startswith(f"{tensor} ")]
        assert all(cell in line for cell in cells), line
    told = "values are equal after rounding to float16, the dtypes differ: 1 tensor, float32 in A and float16 in B"
    assert told in result.out
    rows[f"{layer}self_attn.k_proj.weight"] = ("dtype", "")
    machine = reshard("verify", model, other, "--json")
    assert machine.code == 1 and not machine.json["equal"]
    assert {row["tensor"]: row["kind"] for row in machine.json["differences"]} == {
        tensor: cells[0] for tensor, cells in rows.items()
    }
    largest = {
        row["kind"]: row["largest"] for row in machine.json["differences"] if "up_proj" not in row["tensor"]
    }
    assert 0 < largest.pop("dtype") < 1e-3
    counted = {row["kind"]: (row["differ"], row["elements"]) for row in machine.json["differences"]}
    assert counted["values"] in ((3, 8192), (6144, 6144)) and counted["shape"] == (None, None)
    sides = {row["tensor"]: (row["a"], row["b"]) for row in machine.json["differences"]}
    assert sides[f"{layer}self_attn.q_proj.weight"] == ("float32 [128, 64]", "float32 [128, 64]")
    assert sides[f"{layer}self_attn.o_proj.weight"] == ("float32 [64, 128]", "")
    assert largest.pop("values") == pytest.approx(0.5) and set(largest.values()) == {None}


def test_verify_of_what_cannot_be_read(model: Path, tmp_path: Path) -> None:
    result = reshard("verify", model, tmp_path / "nothing")
    assert result.code == 2 and "no such file or directory" in result.err


def test_names_of_tensors_are_whole_on_a_terminal(model: Path, other: Path) -> None:
    shown = in_terminal("verify", model, other, COLUMNS="80", NO_COLOR="1")
    lines = re.sub(rf"{ESCAPE}\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()
    name = "model.layers.1.self_attn.q_proj.weight"
    (row,) = [line for line in lines if line.startswith(f"│ {name} │ values ")]
    assert "│ 3 of 8,192 elements," in row
    assert {len(line) for line in lines if line.startswith(("│", "┃", "┏"))} <= {*range(81)}


def test_a_narrow_terminal_gets_a_record_for_each_row(model: Path, other: Path) -> None:
    shown = in_terminal("verify", model, other, COLUMNS="40", NO_COLOR="1")
    lines = re.sub(rf"{ESCAPE}\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()
    at = lines.index("model.layers.1.self_attn.q_proj.weight")
    assert "different: 5 tensors; 45 were compared" in lines and not any("│" in line for line in lines)
    assert lines[at + 1] == "  what differs: values"
    assert lines[at + 2].startswith("  A and B: 3 of 8,192 elements,")


def test_every_package_that_logits_need_is_named_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reshard("convert", model, tmp_path / "ckpt", "--to", "megatron").code == 0
    monkeypatch.setattr("reshard.oracle.agreement.find_spec", lambda module: None)
    told = reshard("verify", tmp_path / "ckpt", model, "--logits").err
    assert "megatron-core is not installed" in told and "transformers is not installed" in told
    assert told.count("pip install") == 3  # megatron-core comes without its requirements


def test_a_pipe_gets_plain_columns(model: Path, other: Path) -> None:
    for words in (("verify", model, other), ("support",), ("doctor", "--list", "--lang", "en")):
        out = reshard(*words).out
        assert not set(out) & set("│┃━─┏╇"), words
    columns = [line.split()[0] for line in reshard("support").out.splitlines() if line]
    assert columns[0] == "FORMAT" and {*FORMATS, *FAMILIES} <= {*columns}


def test_the_site_shows_options_and_examples_as_they_are_typed() -> None:
    page = commands.page()
    assert "UNSET" not in page
    code = "\n".join(re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S))
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    for context in man_pages.contexts():
        for example in re.findall(r"^ +(reshard .*)", context.command.help or "", re.M):
            assert example in code
        for option in context.command.params:
            assert isinstance(option, click.Argument) or option.opts[-1] in prose


def test_man_pages_say_what_the_help_says() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in man_pages.FOLDER.glob("*.1")}
    assert written == man_pages.pages(), "run `python -m tools.man_pages`"
    groff = shutil.which("groff")
    for path in man_pages.FOLDER.glob("*.1") if groff else ():
        done = subprocess.run(
            [groff, "-man", "-Tutf8", "-ww", "-k", "-z", path], capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b""), path.name


def test_support(model: Path) -> None:
    result = reshard("support")
    assert result.code == 0 and all(name in result.out for name in [*FORMATS, *FAMILIES])
    found = reshard("support", "--json").json
    assert {row["name"] for row in found["formats"] if row["read"] and row["written"]} == written().keys()
    assert {row["name"]: row["architecture"] for row in found["families"]} == {
        name: family.architecture for name, family in FAMILIES.items()
    }
    values = {each for row in found["quantizations"] for each in (row["written"] or "").split(", ") if each}
    assert values == set(STORAGES) == set(FORMATS["huggingface"].target.dtypes.quantizes)
    assert "not tested" in result.out
