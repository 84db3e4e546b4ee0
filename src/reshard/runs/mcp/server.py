"""A server of the Model Context Protocol over standard input and output.

Each call runs in a process of its own, which is killed at the time limit, and when the client cancels the call or
disconnects.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from jsonschema import Draft202012Validator
from mcp import types
from mcp.server.lowlevel import Server as Protocol
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

import reshard
from reshard.base.confinement import located
from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.base.interrupts import end_at_once
from reshard.base.plain_yaml import yaml_of
from reshard.base.values import words_of_seconds
from reshard.runs.mcp.options import ServerOptions
from reshard.runs.mcp.tool_process import refusal, shortened

CONCURRENT_CALLS = 4
"""Calls that run at the same time. Others wait."""
CHILD_PROGRAM = "import sys; sys.path[:] = {path!r}; from reshard.runs.mcp.tool_process import main; main()"
"""What the process of a call runs. `python -m` would also import modules from the current folder."""


DESCRIPTIONS = yaml_of(Path(__file__).with_name("tools.yaml").read_bytes())
"""What clients see of each tool."""


class Server:
    """Tools that read below some folders, for one client."""

    def __init__(self, folders: Sequence[Path], options: ServerOptions) -> None:
        self._folders = [str(each.resolve()) for each in folders]
        self._options = options
        self._turns = anyio.Semaphore(CONCURRENT_CALLS)

    def start(self) -> None:
        """Answer the client until it disconnects."""
        end_at_once()  # the thread that reads standard input cannot be interrupted
        anyio.run(self._serve)

    async def _serve(self) -> None:
        about = f"The tools read below {listed(self._folders)}. Relative paths begin at {self._folders[0]}."
        handlers: Any = {"on_list_tools": _list_tools, "on_call_tool": self._call}
        protocol = Protocol("reshard", version=reshard.__version__, instructions=about, **handlers)
        async with stdio_server() as (reading, writing):
            await protocol.run(reading, writing, protocol.create_initialization_options())

    async def _call(self, context: Any, call: types.CallToolRequestParams) -> types.CallToolResult:
        if call.name not in DESCRIPTIONS:
            raise MCPError(
                types.INVALID_PARAMS, f"no tool is called {call.name!r}: {', '.join(DESCRIPTIONS)}"
            )
        try:
            text = await self._answer(call.name, self._checked(call.name, call.arguments or {}))
        except ReshardError as error:
            text = shortened(refusal(error.problems), self._options.output_limit)
        answer = json.loads(text)
        refused = answer.keys() == {"problems"}
        return types.CallToolResult(
            content=[types.TextContent(text=text)], structured_content=answer, is_error=refused
        )

    def _checked(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that a tool has, with real paths. Raises ReshardError."""
        schema, given = _schema(tool), {name: each for name, each in arguments.items() if each is not None}
        raise_all(
            Problem(
                "tool-argument-wrong",
                f"{tool}: wrong arguments",
                expected=f"the arguments {', '.join(schema['properties'])}",
                found=f"{error.json_path}: {error.message}",
                remedy="correct them as the schema of the tool says",
            )
            for error in Draft202012Validator(schema).iter_errors(given)
        )
        return {name: self._located(schema["properties"][name], value) for name, value in given.items()}

    def _located(self, schema: Mapping[str, Any], value: Any) -> Any:
        if isinstance(value, list):
            return [self._located(schema["items"], each) for each in value]
        return located(value, self._folders) if schema.get("format") == "path" else value

    async def _answer(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The answer of a tool as JSON, from a process of its own. Raises ReshardError."""
        limit = self._options.time_limit
        call = {"tool": tool, "arguments": arguments, "folders": self._folders, "seconds": math.ceil(limit)}
        content = json.dumps({**call, "characters": self._options.output_limit}).encode()
        command, ended = [sys.executable, "-B", "-c", CHILD_PROGRAM.format(path=_packages())], None
        async with self._turns:
            with anyio.move_on_after(limit):
                ended = await anyio.run_process(command, input=content, check=False)
        if ended is not None and ended.returncode == 0:
            return ended.stdout.decode()
        raise ReshardError(
            "tool-without-answer",
            f"{tool} was ended before it had an answer",
            expected=f"an answer within {words_of_seconds(limit)}",
            found="the time limit" if ended is None else f"exit status {ended.returncode}",
            remedy="run the command in a shell, without a limit, or start the server with a longer --time-limit",
        )


def _packages() -> list[str]:
    """Where modules are found, except in the current folder."""
    others = [each for each in sys.path if each not in ("", str(Path.cwd()))]
    return [str(Path(reshard.__file__).parents[1]), *others]


def _schema(tool: str) -> dict[str, Any]:
    schema = {name: DESCRIPTIONS[tool][name] for name in ("properties", "required")}
    return {"type": "object", **schema, "additionalProperties": False}


async def _list_tools(context: Any, request: Any) -> types.ListToolsResult:
    reads = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    tools = [
        types.Tool(name=name, description=each["description"], input_schema=_schema(name), annotations=reads)
        for name, each in DESCRIPTIONS.items()
    ]
    return types.ListToolsResult(tools=tools)
