"""`reshard mcp` as agents use it: the official client starts it, and talks to it over real pipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import psutil
import pytest
import yaml
from mcp import Client, StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from safetensors.numpy import load_file, save_file

import reshard as api
from reshard.runs.mcp.tool_process import AGENT_TOOLS, shortened
from tests.commandline import listing, reshard
from tests.test_docs import check_parses

LOG = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of \
which 1.20 GiB is free.
"""


class Answer(NamedTuple):
    """What a tool returned."""

    content: Any
    refused: bool
    text: str

    @property
    def codes(self) -> list[str]:
        return [each["code"] for each in self.content["problems"]]


def as_json(found: Any) -> Any:
    """What a result of the API is as JSON."""
    return json.loads(json.dumps(found.as_dict()))


async def call(client: Client, tool: str, arguments: dict[str, Any]) -> Answer:
    """Call a tool. Its text must be the same JSON as its structured content."""
    found = await client.call_tool(tool, arguments)
    (text,) = (each.text for each in found.content if each.type == "text")
    assert json.loads(text) == found.structured_content
    return Answer(found.structured_content, bool(found.is_error), text)


def environment() -> dict[str, str]:
    """The variables with which a process finds the modules that this one does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def running() -> list[psutil.Process]:
    """The processes of calls that run below this one."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if any("reshard.runs.mcp.tool_process" in word for word in each.cmdline())
    ]


async def started() -> list[psutil.Process]:
    with anyio.fail_after(20):
        while not (found := running()):
            await anyio.sleep(0.02)
    return found


async def gone(processes: list[psutil.Process]) -> None:
    with anyio.fail_after(5):
        while any(each.is_running() for each in processes):
            await anyio.sleep(0.02)


def client_of(*words: object, mode: str = "legacy") -> Client:
    """A client that starts `reshard mcp` with these arguments."""
    command = ["-m", "reshard", "mcp", *map(str, words)]
    server = StdioServerParameters(command=sys.executable, args=command, env=environment())
    return Client(stdio_client(server), mode=mode)


def answers(calls: Iterable[tuple[str, dict[str, Any]]], *words: object) -> list[Answer]:
    """The answers to several calls, which are made at the same time."""
    found: dict[int, Answer] = {}

    async def keep(client: Client, number: int, tool: str, arguments: dict[str, Any]) -> None:
        found[number] = await call(client, tool, arguments)

    async def run() -> None:
        async with client_of(*words) as client, anyio.create_task_group() as group:
            for number, (tool, arguments) in enumerate(calls):
                group.start_soon(keep, client, number, tool, arguments)

    anyio.run(run)
    return [found[number] for number in sorted(found)]


@pytest.fixture(scope="module")
def place(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve: a model, the same in Megatron's format, a tuned one and a log; besides, what is not served."""
    outside = tmp_path_factory.mktemp("mcp")
    folder = outside / "served"
    folder.mkdir()
    shutil.copytree(hf_model("qwen3"), folder / "model")
    shutil.copytree(hf_model("qwen3"), outside / "secret")
    shutil.copytree(hf_model("qwen3"), folder / "tuned")
    tensors = load_file(folder / "tuned" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "tuned" / "model.safetensors", {"format": "pt"})
    api.convert(folder / "model", folder / "run", to="megatron", tp=2, pp=2)
    (folder / "train.log").write_text(LOG)
    return folder


def sparse(folder: Path, nbytes: int) -> Path:
    """A model whose weights take long to read: a hole in a file."""
    folder.mkdir()
    tensor = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}
    head = json.dumps({"x": tensor}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(file, 8 + len(head) + nbytes)
    return folder


# ----------------------------------------------------------------------------------------------- the tools


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_an_agent_sees_the_tools_and_where_they_read(place: Path, mode: str) -> None:
    async def run() -> tuple[Any, str | None, str]:
        async with client_of(place, mode=mode) as client:
            with pytest.raises(MCPError, match="no tool is called 'convert': inspect, verify"):
                await client.call_tool("convert", {})
            return (await client.list_tools()).tools, client.instructions, client.server_info.name

    tools, instructions, name = anyio.run(run)
    assert [each.name for each in tools] == [*AGENT_TOOLS] and name == "reshard"
    assert str(place) in str(instructions)
    for each in tools:
        assert each.annotations.read_only_hint and not each.annotations.open_world_hint
        assert each.description and not each.input_schema["additionalProperties"]
        assert all(about["description"] for about in each.input_schema["properties"].values())


def test_each_tool_says_what_its_command_says(place: Path) -> None:
    before = listing(place)
    inspected, equal, checked, planned, facts, history, compared = answers(
        [
            ("inspect", {"path": "run", "iteration": None}),
            ("verify", {"a": "model", "b": str(place / "run")}),
            ("verify", {"a": "run"}),
            ("plan", {"src": "model", "dst": "out", "to": "megatron", "tp": 2}),
            ("facts", {"targets": ["train.log"]}),
            ("api_history", {"package": "trl", "name": "SFTTrainer", "before": "0.11.0", "after": "0.13.0"}),
            ("compare", {"checkpoint": "tuned", "base": "model"}),
        ],
        place,
    )
    assert not any(each.refused for each in (inspected, equal, checked, planned, facts, history, compared))
    assert inspected.content == as_json(api.inspect(place / "run")) and inspected.content["family"] == "qwen3"
    assert equal.content == reshard("verify", place / "model", place / "run", "--json").json
    assert checked.content == reshard("verify", place / "run", "--json").json
    told = api.convert(place / "model", place / "out", to="megatron", tp=2, dry_run=True)
    assert planned.content == as_json(told)
    told = reshard("doctor", place / "train.log", "--lang", "en", "--json").json
    assert facts.content == told
    assert history.content["parameters"]["renamed"] == {"tokenizer": "processing_class"}
    rows = {row["tensor"]: row["kind"] for row in compared.content["weights"]["differences"]}
    assert rows == {"model.layers.1.mlp.up_proj.weight": "values", "model.norm.weight": "only in B"}
    assert listing(place) == before


# -------------------------------------------------------------------------------------------------- paths


@pytest.mark.thorough
def test_nothing_outside_is_read(place: Path, tmp_path: Path) -> None:
    """Neither what a path leads to, nor what files below it do."""
    outside, served = place.parent / "secret", tmp_path / "served"
    linked, index, blobs = served / "linked", served / "index", served / "blobs"
    for folder, weights in ((linked, outside), (blobs, place / "model")):
        shutil.copytree(place / "model", folder)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(weights / "model.safetensors")
    index.mkdir()
    weight_map = {"model.norm.weight": os.path.relpath(outside / "model.safetensors", index)}
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (served / "run").mkdir()
    (served / "run" / "train.log").symlink_to("/proc/self/environ")
    (served / "away").symlink_to(outside)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("inspect", {"path": str(outside)}),
        ("inspect", {"path": "../secret"}),
        ("inspect", {"path": "away"}),
        ("facts", {"targets": ["linked", "run/train.log"]}),
        ("plan", {"src": "blobs", "dst": str(tmp_path / "out")}),
        ("verify", {"a": "blobs", "b": "blobs", "base": str(outside)}),
        ("inspect", {"path": "linked"}),
        ("facts", {"targets": ["run"]}),
        ("inspect", {"path": "index"}),
        ("inspect", {"path": "s3://bucket/model"}),
        ("inspect", {"path": "Qwen/Qwen3-8B"}),
        ("inspect", {"path": str(served / "no\0thing")}),
        ("inspect", {"path": "blobs"}),
    ]
    *found, allowed = answers(calls, served, place)
    assert all(each.refused for each in found)
    assert [each.codes for each in found[:8]] == [["path-outside-folders"]] * 8
    assert [each.codes[0] for each in found[8:]] == [
        *("index-unreadable", "path-outside-folders", "path-not-found", "argument-wrong"),
    ]
    assert str(served) in found[0].content["problems"][0]["expected"]
    assert "reshard mcp" in found[0].content["problems"][0]["remedy"]
    assert not allowed.refused and allowed.content["family"] == "qwen3"


CONFINED = """
import os, subprocess, socket, sys
from pathlib import Path
from reshard.base.confinement import confine

inside = sys.argv[1]
confine([inside], sys.path)
tries = {
    "read": lambda: Path("/etc/hostname").read_text(),
    "list": lambda: os.listdir("/etc"),
    "scan": lambda: [*os.scandir("/etc")],
    "write": lambda: Path(inside, "new").write_text(""),
    "remove": lambda: Path(inside, "file").unlink(),
    "rename": lambda: Path(inside, "file").rename(Path(inside, "moved")),
    "start": lambda: subprocess.run(["true"]),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    "import": lambda: __import__("tensorstore"),
    "inside": lambda: Path(inside, "file").read_text(),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "done")
    except Exception as error:
        print(name, type(error).__name__)
"""


def test_a_confined_process_can_only_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    ran = subprocess.run(
        [sys.executable, "-c", CONFINED, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    outcome = dict(line.split() for line in ran.stdout.splitlines())
    assert outcome.pop("inside") == "done"
    outside = {outcome.pop(each) for each in ("read", "list", "scan", "import")}
    assert outside == {"ReshardError"} and {*outcome.values()} == {"PermissionError"}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


# ------------------------------------------------------------------------------------- limits and mistakes


@pytest.mark.thorough
def test_a_tool_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    sparse(tmp_path / "big", 1 << 38)
    (slow,) = answers([("verify", {"a": "big", "b": "big"})], tmp_path, "--time-limit", "2s")
    assert slow.refused and slow.codes == ["tool-without-answer"] and running() == []
    assert "within 2s" in slow.text and "--time-limit" in slow.text


@pytest.mark.thorough
def test_a_long_answer_is_cut(place: Path) -> None:
    (cut,) = answers([("facts", {"targets": ["train.log"]})], place, "--output-limit", "1000")
    assert not cut.refused and len(cut.text) <= 1000
    assert cut.content.keys() == {"answer", "findings", "unknown", "facts"} and " more" in cut.text


@pytest.mark.thorough
def test_a_process_ends_when_the_client_cancels_or_disconnects(tmp_path: Path) -> None:
    sparse(tmp_path / "big", 1 << 38)

    async def verify(client: Client) -> None:
        with suppress(MCPError):  # the connection is closed
            await call(client, "verify", {"a": "big", "b": "big"})

    async def run() -> None:
        async with anyio.create_task_group() as outer:
            async with client_of(tmp_path) as client:
                async with anyio.create_task_group() as group:
                    group.start_soon(verify, client)
                    children = await started()
                    group.cancel_scope.cancel()
                await gone(children)
                outer.start_soon(verify, client)
                children = await started()
            await gone(children)
            outer.cancel_scope.cancel()

    anyio.run(run)


@pytest.mark.thorough
def test_wrong_arguments_are_named(place: Path) -> None:
    found = answers(
        [
            ("inspect", {}),
            ("inspect", {"path": 1}),
            ("inspect", {"path": "model", "pth": "x"}),
            ("plan", {"src": "model", "dst": "out", "tp": 0}),
            ("plan", {"src": "model", "dst": "out", "dtype": "int8"}),
            ("facts", {"targets": []}),
            ("facts", {"targets": "train.log"}),
            ("plan", {"src": "model", "dst": "out", "to": "megatorn"}),
            ("api_history", {"package": "trll", "name": "SFTTrainer"}),
        ],
        place,
    )
    assert all(each.refused for each in found)
    assert [each.codes for each in found[:7]] == [["tool-argument-wrong"]] * 7
    assert "'path' is a required property" in found[0].text and "path, iteration" in found[0].text
    assert "megatron" in found[7].text and "trl" in found[8].text


def test_cutting_keeps_json_within_the_limit_and_counts_the_rest() -> None:
    answer = {
        "path": "x" * 500,
        "findings": [{"evidence": ["y" * 100] * 50, "certainty": "sure"}] * 40,
        "dtypes": {f"tensor.{number}": number for number in range(900)},
        "none": None,
    }
    assert json.loads(shortened(answer, 1 << 20)) == answer
    for characters in (1000, 2000, 5000, 20_000, 100_000):
        text = shortened(answer, characters)
        kept = json.loads(text)
        assert len(text) <= characters and kept.keys() == answer.keys()
        *findings, left = kept["findings"]
        assert left == f"… {40 - len(findings)} more" or (len(findings), left) == (39, kept["findings"][0])
        assert len(kept["dtypes"]) - 1 + int(kept["dtypes"]["…"].split()[1]) == 900


# ------------------------------------------------------------------------------------------ the command


def test_the_command_refuses_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "name the folders" in reshard("mcp").err
    for each in (tmp_path / "file", tmp_path / "nothing"):
        result = reshard("mcp", each, "--json")
        assert result.code == 2 and str(each) in result.json["problems"][0]["found"]
    assert "did you mean --time-limit?" in reshard("mcp", tmp_path, "--timeout", "3s").err


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "reshard.runs.mcp.server", raising=False)
    (problem,) = reshard("mcp", tmp_path, "--json").json["problems"]
    assert problem["code"] == "package-not-installed" and "mcp" in problem["found"]


def test_the_skill_is_a_skill_file() -> None:
    """Its front matter is what agents index, and its commands are commands."""
    skill = reshard("mcp", "--skill").out
    assert skill == reshard("mcp", "--skill", "--json").json["skill"]
    _, front, text = skill.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["name"] == "reshard" and 50 < len(about["description"]) < 1024
    assert [name for name in AGENT_TOOLS if f"`{name}`" not in text] == []
    commands = re.findall(r"`(reshard \w+ [^`]+)`", text)
    assert len(commands) > 6
    for each in commands:
        check_parses(each.split()[1:])


@pytest.mark.thorough
def test_tokens_in_logs_are_not_told(tmp_path: Path) -> None:
    token = "hf_" + "aB3dE5fG7h" * 3 + "jKlM"
    (tmp_path / "run.log").write_text(f"ValueError: {token} cannot read the repository\n")
    (tmp_path / "a.yaml").write_text(f"hub_token: {token}\n")
    (found,) = answers([("facts", {"targets": ["run.log", "a.yaml"]})], tmp_path)
    assert not found.refused and token not in found.text and "<secret>" in found.text
