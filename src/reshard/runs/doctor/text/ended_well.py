"""Whether a log says that its run ended well: only this, and not silence, is evidence that nothing failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.runs.doctor.text.free_text import is_contrast, is_question
from reshard.runs.doctor.text.progress_lines import DATA_LENGTH
from reshard.runs.doctor.text.tracebacks import LogLine

LAST_LINES = 5
"""Lines at the end in which any words for an end count."""

_ENDED = re.compile(
    r"""\btrain_runtime\b                                         # the last record of transformers' Trainer
      | \b(?i:training|fine-?tuning|run|job|conversion|export|merge|merging|evaluation|quantization|upload)
        \ (?:\w+\ ){0,2}(?i:completed?|finished|done|succeeded|successful)\b
      | \b(?i:trainer\.fit)`?\ stopped:                           # Lightning
      | \bworker\ group\ successfully\ finished\b | \bexits\ successfully\b | \[success\] | \(success\)
      | (?i:exit(?:ed)?(?:\ with)?(?:\ exit)?\ ?(?:code|status)|return\ code)\s*(?:is|of)?\s*[:=]?\s*0\b
      | \b(?i:successfully\ (?!saved\ checkpoint)(?:installed|exported|converted|saved|merged|finished|completed
        |quantized|trained|uploaded|written|wrote|tagged|pushed))\b
      | \bsuccessfully\ exported\b | \bEnd\ time\ of\ running\ main\b
      | \btraining\ is\ done\b | \bProcess\ group\ destroyed\b   # Megatron-LM, torchtitan
      | \bnothing\ wrong\ found\b | \bin\ \d[\d.,]*\ tensors,\ .*\ in\ [\d.]+\ s\b                # reshard
      | \bBuilt\ target\ \w | ^=+\ \d+\ passed\b(?!.*\b(?:failed|errors?)\b)
      | 训练(?:已经?)?(?:完成|结束) | (?:转换|导出|合并|评测)(?:已经?)?(?:完成|成功|结束)""",
    re.VERBOSE,
)
"""A program's own last words, wherever they are."""
_AT_END = re.compile(
    r"""^\W*(?i:(?:all|everything\ is)?\ ?(?:done|finished|completed?|success|succeeded|ok|passed|bye))\b
        (?!\s*(?:[:=]\s*)?\d+\s*/)
      | \b(?i:sav(?:ed|ing)|wrote|written|export(?:ed|ing)|convert(?:ed|ing)|stored|uploaded)\b
        (?!.*(?i:checkpoint[-_ /]?\d|\bsteps?\b|iteration|global_step))
        .*(?:/|\bto\b|\bin\b|\.(?:safetensors|gguf|bin|pt)\b)
      | ^(?!.*\b(?:built|loaded|initiali[sz]ed|imported|connected|created|registered|started)\b)
        .*\b(?i:is\ complete|completed|finished|done|succeeded|success(?:ful(?:ly)?)?)[.!]*$
      | ^/[\w./-]+/[\w.-]+$                                   # a folder or file alone: what was written
      | \bCOMPLETED\b | \bSUCCEEDED\b | \bRequirement\ already\ satisfied\b | \bReal\ time:
      | ^-[rwx-]{9}[.+@]?\s.*\.(?:safetensors|distcp|bin|pth?|gguf|metadata)$    # ls after the run
      | 完成|成功|已保存|保存到|(?:已|正常)结束|没有问题""",
    re.VERBOSE,
)
"""What programs and people write last."""
_NOT = re.compile(
    r"\b(?i:not|n['’]t|never|un\w*(?:able|successful)|fail\w*|errors?|before|until|will be|when|once"
    r"|after(?! training is done))\b"
    r"|未|没(?!有问题)|失败|不能|无法|之后|以后"
)
_LAST_STEP = re.compile(
    r"^(?!.{0,200}\b(?:Loading|Map|Filter|Fetching|Download|Generating|[Tt]okeniz|Resolving|Capturing|Convert|Packing"
    r"|Grouping|[Ee]val\w*|[Vv]alidat\w*|Writing|Processing"
    r"|[Ee]poch:?\s\d+(?![\d\s]*/))\b).*?(?<![\d.])(?P<step>\d{1,9})\s?/\s{0,9}(?P=step)(?![\d.])"
)
_OTHER_STEP = re.compile(r"(?<![\d./])(?P<step>\d{1,9})\s?/\s{0,9}(?P<of>\d{1,9})(?![\d./])")
_OF_TRAINING = re.compile(r"\bloss\b|^\W{0,3}(?:Train|Steps?|Iter)\w*\b.*100%")
_STEP = re.compile(
    r"(?<!_)\bloss['\"]?\s*[:=]\s*['\"]?[\d.]|\b(?:lm|train(?:ing)?)[ _/]loss\b"
    r"|\b(?i:step|iteration)\W{0,3}\d.{0,500}\bloss\b"
)
"""A line of training: what comes after its run's last words is another run."""


def ended_well(lines: Sequence[LogLine]) -> LogLine | None:
    """The line in which a log says that its run ended well; None if no line does, or training went on after it."""
    printed = [line for line in lines if line.text.strip() and len(line.text) < DATA_LENGTH]
    last = {line.number for line in printed[-LAST_LINES:]}
    for line in reversed(printed):
        if _is_last_step(line.text) or (
            (_ENDED.search(line.text) or (line.number in last and _AT_END.search(line.text)))
            and not (_NOT.search(line.text) or is_contrast(line.text) or is_question(line.text))
        ):
            return line
        if _STEP.search(line.text):
            return None
    return None


def _is_last_step(text: str) -> bool:
    """Whether a line counts the last of all steps, as in `iteration 500/500`."""
    is_last = _LAST_STEP.match(text) and _OF_TRAINING.search(text)
    return bool(is_last) and all(match["step"] == match["of"] for match in _OTHER_STEP.finditer(text))
