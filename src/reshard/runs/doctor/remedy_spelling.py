"""Spells the settings in remedies for the program that was run.

For example, `<<micro-batch>>` is `--per_device_train_batch_size 1` for ms-swift, `micro_batch_size: 1` for Axolotl, an
override for verl (`settings.yaml`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from reshard.base.data_files import data_beside
from reshard.base.languages import Text
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.precision import has_bfloat16

USUAL_TOOL = "script"
"""The tool that has a spelling for every setting: the user's own script."""
SEARCHED_CHARACTERS = 1 << 18
"""Characters of a text that are searched for tools."""
WITH_BFLOAT16 = "<<with-bf16>>"
"""The mark of a line for GPUs that have bfloat16."""
_HOLE = re.compile(r"<<(?!with-bf16)(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>[^<>\n]*))?>>")
_FP16 = re.compile(
    r"\bfp16['\"]?\s*[=:]\s*['\"]?[Tt]rue|--fp16\b(?! (?:[Ff]alse|0))|mixed_precision['\"]?(?:\s*[=:]\s*|\s+)['\"]?fp16"
    r"|(?:dtype|DTYPE)['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?:torch\.)?(?:float16|fp16|half)\b"
)
_BF16 = re.compile(r"\bbf16['\"]?\s*[=:]\s*['\"]?[Tt]rue|--bf16\b(?! (?:[Ff]alse|0))|\bbfloat16\b")


@dataclass
class RunTools:
    """What was run, by the texts about it: the tools by precedence, a GPU, and whether in float16."""

    found: set[str] = field(default_factory=set)
    fp16: bool = False
    bf16: bool = False
    gpu: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    """The scripts and configs that were given, by their path."""

    def see(self, text: str, target: str = "") -> None:
        """Record what a log, or the script or config at `target`, shows."""
        begin = text[:SEARCHED_CHARACTERS]
        if target:
            self.texts[target] = begin
        self.found |= {
            name for name, shows in tool_patterns().items() if name not in self.found and shows.search(begin)
        }
        self.fp16 = self.fp16 or bool(_FP16.search(begin))
        self.bf16 = self.bf16 or bool(_BF16.search(begin))

    @property
    def tools(self) -> list[str]:
        """The tools that were seen, the most specific first, and the usual one."""
        return [name for name in tool_settings()["tools"] if name in self.found or name == USUAL_TOOL]

    @property
    def lacks_bf16(self) -> bool:
        """Whether the GPU is known to have no bfloat16."""
        return self.gpu is not None and has_bfloat16(self.gpu) is False

    def spelled(self, text: str) -> str:
        """A text with its settings as the tools write them, without what the GPU cannot do."""
        lines = (line for line in text.split("\n") if not (WITH_BFLOAT16 in line and self.lacks_bf16))
        plain = "\n".join(lines).replace(WITH_BFLOAT16, "")
        return _HOLE.sub(lambda hole: self._setting(hole["name"], hole["value"]), plain)

    def _setting(self, name: str, value: str | None) -> str:
        if name == "bf16" and self.lacks_bf16:
            name = "fp16"
        setting = tool_settings()["settings"][name]
        given = value if value is not None else setting.get("value")
        if value is None and given == "bfloat16" and (self.lacks_bf16 or (self.fp16 and not self.bf16)):
            given = "float16"
        for tool in self.tools:
            spelling = setting.get(
                tool, setting.get("key") if tool_settings()["tools"][tool].get("trainer") else None
            )
            if spelling is not None:
                return _written(tool, spelling, given)
        raise KeyError(name)


def _written(tool: str, spelling: str, value: object) -> str:
    """A key with its value in a tool's syntax; a spelling that is not a bare key is used as it is."""
    form = tool_settings()["tools"][tool]
    text = str(value) if form.get("titled") or not isinstance(value, bool) else str(value).lower()
    if _KEY.fullmatch(spelling):
        return str(form["form"]).format(key=spelling, value=text)
    return spelling.replace("{value}", text)


def spelled(findings: Iterable[Finding], usage: RunTools) -> list[Finding]:
    """Findings whose causes and remedies use the spelling of the tools that were run."""
    return [replace(each, rule=_of(each.rule, usage), remedy=_of(each.remedy, usage)) for each in findings]


def _keys_in(spelling: str) -> set[str]:
    if _KEY.fullmatch(spelling):
        return {spelling}
    flags = re.findall(r"(?<!\S)--([\w-]+)|(?:^|(?<=\s))\+?([a-z][\w.]*)(?==|: )", spelling)
    return {name for pair in flags for name in pair if name}


def keys_of(tool: str) -> set[str]:
    """The keys that a tool has for settings, as it writes them."""
    keys: set[str] = set()
    for setting in tool_settings()["settings"].values():
        shared = setting.get("key") if tool_settings()["tools"][tool].get("trainer") else None
        keys |= _keys_in(setting.get(tool, shared) or "")
    return keys


_KEY = re.compile(r"\w[\w.-]*")


def _of(text: Text, usage: RunTools) -> Text:
    return Text(usage.spelled(text.en), usage.spelled(text.zh))


@lru_cache(maxsize=1)
def tool_patterns() -> dict[str, re.Pattern[str]]:
    tools = tool_settings()["tools"]
    return {name: re.compile(tool["shows"], re.MULTILINE) for name, tool in tools.items() if "shows" in tool}


tool_settings = data_beside(__file__, "settings.yaml")
