"""The logits of models that transformers loads by name: `python -m tests.genuine.load_served CASES OUT`.

CASES is a JSON list of arguments of `from_pretrained`; with `auto`, of another class than AutoModelForCausalLM; with
`base`, those of an adapter's base in a list. OUT gets a list of their logits, and of the tokens that the tokenizer
makes of a text; an error is a string.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoTokenizer

TEXT = "Weights of any run, without being converted."


def model_of(case: dict[str, Any]) -> Any:
    """The model of a case, in the dtype of its files."""
    if "base" in case:
        return PeftModel.from_pretrained(model_of(case.pop("base")), case.pop("name"), **case)
    kind = getattr(transformers, case.pop("auto", "AutoModelForCausalLM"))
    return kind.from_pretrained(case.pop("name"), **{"dtype": "auto", **case})


def tokens_of(case: dict[str, Any]) -> list[int]:
    """The tokens of a text, and of a chat."""
    tokenizer = AutoTokenizer.from_pretrained(case["name"], revision=case.get("revision", "main"))
    chat = [{"role": "user", "content": TEXT}]
    plain: list[int] = tokenizer(TEXT)["input_ids"]
    return plain + list(tokenizer.apply_chat_template(chat, return_dict=False))


def found(case: dict[str, Any]) -> Any:
    """Logits and tokens."""
    try:
        tokens = [] if case.pop("bare", False) else tokens_of(case.get("base", case))
        with torch.no_grad():
            model = model_of(case).eval()
            return [model(torch.arange(24).reshape(2, 12) * 11 % 250).logits, tokens]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    torch.save([found(each) for each in json.loads(sys.argv[1])], sys.argv[2])
