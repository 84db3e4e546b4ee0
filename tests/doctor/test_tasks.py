"""Labels, widths and texts that do not fit a task, and arguments that reached a model's constructor."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.rules import rules
from tests.doctor.test_classes import first, raised

TASKS = {
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x768 and 1024x2)": (
        "layer-width",
        "model.config.hidden_size",
    ),
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (22x2048 and 1x2097152)": (
        "weight-packed",
        "pretraining_tp = 1",
    ),
    "ValueError: Expected input batch_size (16) to match target batch_size (8192).": (
        "labels-count",
        "AutoModelForTokenClassification",
    ),
    "ValueError: Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 2]))": (
        "labels-shape",
        "single_label_classification",
    ),
    "ValueError: Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 1]))": (
        "labels-shape",
        "logits.squeeze(-1)",
    ),
    "IndexError: Target 3 is out of bounds.": ("label-beyond", "num_labels=4"),
    "RuntimeError: Found dtype Long but expected Float": ("label-dtype", "labels.float()"),
    "RuntimeError: \"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Float'": (
        "label-dtype",
        "labels.long()",
    ),
    "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'": ("half-on-cpu", "torch.float32"),
    "TypeError: Object of type float32 is not JSON serializable": ("json-number", "{name: float(value)"),
    "KeyError: 'eval_loss'": ("eval-metric-missing", "label_names"),
    "ValueError: text input must be of type `str` (single example), `List[str]` (batch)": (
        "tokenizer-no-text",
        "isinstance",
    ),
    "RuntimeError: Trying to backward through the graph a second time": ("graph-twice", "detach()"),
    "AssertionError: No inf checks were recorded for this optimizer.": (
        "scaler-without-gradients",
        "requires_grad",
    ),
    "ValueError: Mixed precision training with AMP or APEX (`--fp16`) can only be used on CUDA devices.": (
        "precision-needs-gpu",
        "torch.cuda.is_available()",
    ),
    "ValueError: Unable to avoid copy while creating an array as requested.": ("numpy-two-copy", "numpy<2"),
    "NotImplementedError: Loading a dataset cached in a LocalFileSystem is not supported.": (
        "releases-clash",
        "datasets>=2.14.6",
    ),
    "ValueError: expected sequence of length 128 at dim 1 (got 256)": ("collate-ragged", "padding=True"),
    "TypeError: LlamaForCausalLM.__init__() got an unexpected keyword argument 'load_in_4bit'": (
        "keyword-of-loading",
        "transformers>=4.30.0,<5'",
    ),
    "TypeError: MistralForCausalLM.__init__() got an unexpected keyword argument 'attn_implementation'": (
        "keyword-of-loading",
        "transformers>=4.36.0'",
    ),
}


@pytest.mark.parametrize("said", TASKS, ids=lambda said: said[:60])
def test_what_does_not_fit_a_task_is_named(said: str) -> None:
    code, cure = TASKS[said]
    for text in (said, raised(said, "loss = model(**batch).loss")):
        found = first(text)
        assert (found.code, found.certainty) == (code, rules().get(code, {}).get("certainty", "likely"))
        assert cure in found.remedy.en
        for told in (found.message, found.rule, found.remedy):
            assert not re.search(r"\{[a-z]+\}", told.en + told.zh)


def test_a_kernel_that_a_gpu_lacks_is_no_matter_of_the_cpu() -> None:
    said = "RuntimeError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    assert first(said).code != "half-on-cpu"
