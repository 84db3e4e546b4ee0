"""An exception that a program has caught is no failure of a run that went on; one that ended it is."""

from __future__ import annotations

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

CAUGHT = """\
2026-01-01 10:00:05 - WARNING - could not send metrics, will retry
Traceback (most recent call last):
  File "/home/me/train.py", line 33, in send
    requests.post(url, json=row)
requests.exceptions.ConnectionError: HTTPConnectionPool(host='m', port=80): Max retries exceeded
"""
EVALUATION = """\
ERROR:root:eval of sample 7 failed
Traceback (most recent call last):
  File "/home/me/eval.py", line 12, in score
    return float(text)
ValueError: could not convert string to float: 'n/a'
accuracy 0.83
All done, wrote results.json
"""
LINE = "2026-01-01 10:00:06,123 ERROR my.module: caught exception: ValueError: bad sample 12\n"


@pytest.mark.parametrize("log", [f"{CAUGHT}done.\n", EVALUATION, f"step 1\n{LINE}step 2\nbye\n"])
def test_a_run_that_went_on_has_not_failed(log: str) -> None:
    assert diagnose_text("log", log) == []


@pytest.mark.parametrize(
    "log",
    [
        CAUGHT,
        CAUGHT.replace("in send", "in <module>") + "done.\n",
        f"{CAUGHT}step 2\nRuntimeError: CUDA error: an illegal memory access was encountered\n",
        LINE,
    ],
)
def test_a_run_that_ended_with_it_has(log: str) -> None:
    assert [found.severity for found in diagnose_text("log", log)][:1] == ["error"]


def test_what_python_ignores_in_a_destructor_is_no_failure() -> None:
    """As DeepSpeed's CPUAdam prints it after its build was refused."""
    log = """\
  File "/usr/lib/python3.7/dist-packages/deepspeed/ops/op_builder/builder.py", line 60, in assert_no_cuda_mismatch
    raise Exception(
Exception: Installed CUDA version 11.0 does not match the version torch was compiled with 10.1
Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f30c6ca0830>
Traceback (most recent call last):
  File "/usr/lib/python3.7/dist-packages/deepspeed/ops/adam/cpu_adam.py", line 91, in __del__
    self.ds_opt_adam.destroy_adam(self.opt_id)
AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'
"""
    (found,) = diagnose_text("log", log)
    assert found.places[0].line == 3 and "Installed CUDA version 11.0" in found.rule.en


def test_a_title_that_repeats_the_message_is_not_the_failure() -> None:
    failed = "KeyError: 'layers.0.lora_A.weight'"
    log = f'{failed}\nServing it gives\n  File "/u/serve.py", line 3, in load\n    params[name]\n{failed}\n'
    (found,) = diagnose_text("log", log)
    assert found.places[0].line == 5
