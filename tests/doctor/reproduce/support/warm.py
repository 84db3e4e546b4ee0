"""Run scripts in forks of a process that has imported the frameworks once.

Reads one JSON object a line from standard input, {"script", "folder", "log", "environment"}, runs the script in that
folder with what it prints going to the log, and answers with a line that holds its exit status.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

FRAMEWORKS = (
    *("torch", "torch.distributed.checkpoint", "safetensors.torch", "datasets", "accelerate", "peft"),
    *("transformers.trainer", "transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3"),
    *("trl.trainer.sft_trainer", "trl.trainer.grpo_trainer", "trl.trainer.dpo_trainer"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)
TIMEOUT = 100


def main():
    for name in FRAMEWORKS:
        importlib.import_module(name)
    sys.path.insert(0, str(Path(__file__).parent))
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(**request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(script, folder, log, environment):
    """Become the script. Returns its exit status."""
    signal.alarm(TIMEOUT)
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(old, new)
    sys.argv = [script]
    with open(script) as source:
        code = compile(source.read(), script, "exec")
    status = 0
    try:
        exec(code, {"__name__": "__main__", "__file__": script})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # as if the script had been started by itself
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
