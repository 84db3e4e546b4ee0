"""A vLLM server that takes new weights, and what it answers.

Run where vLLM is installed, `python -m tests.genuine.vllm_server OUT DTYPE TP FOLDER…` writes what vLLM answers once it
has loaded each folder by itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

PROMPTS = ([5, 17, 99, 3, 41], [200, 11, 7])
TRANSFERS = ("--weight-transfer-config", '{"backend": "reshard"}')
TOKENS = 8
READY_SECONDS = 240


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def post(self, path: str, content: dict[str, Any]) -> Any:
        """The answer to a request."""
        headers = {"Content-Type": "application/json"}
        with urlopen(
            Request(f"{self.url}/{path}", json.dumps(content).encode(), headers), timeout=300
        ) as got:
            return json.loads(got.read() or b"null")

    def answers(self) -> list[Any]:
        """The tokens after each prompt, with their log-probabilities and those of the prompt."""
        told = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        found = []
        for prompt in PROMPTS:
            (choice,) = self.post("v1/completions", {**told, "prompt": prompt, "prompt_logprobs": 1})[
                "choices"
            ]
            prompted = [
                sorted(each["logprob"] for each in one.values()) for one in choice["prompt_logprobs"][1:]
            ]
            tokens = [int(each.removeprefix("token_id:")) for each in choice["logprobs"]["tokens"]]
            found.append([tokens, choice["logprobs"]["token_logprobs"], prompted])
        return found

    def kill(self) -> None:
        """Kill all its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    model: Path,
    log: Path,
    *,
    tp: int = 1,
    dtype: str = "float32",
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
    transfers: bool = True,
) -> Iterator[Server]:
    """A server of a model."""
    from tests.environments import python

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)),
        *("--load-format", "reshard", "--enforce-eager", *(TRANSFERS if transfers else ())),
        *("--max-model-len", "64", "--max-num-seqs", "4", "--dtype", dtype, "--skip-tokenizer-init"),
        *("--return-tokens-as-token-ids", "--gpu-memory-utilization", "0.5", "--served-model-name", "m"),
        *("--tensor-parallel-size", str(tp), *options),
    ]
    binding = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1" if tp == 2 else "0"}
    told = {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **binding,
        **(env or {}),
    }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=out,
            stderr=out,
            env={**os.environ, **told},
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait(server)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def _wait(server: Server) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        with suppress(URLError, OSError), urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text(errors='replace')[-4000:]}")


def answers_of(llm: Any) -> list[Any]:
    """What `Server.answers` returns, of a model that vLLM has loaded in this process."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    found = []
    for each in prompts:  # one by one, as the server gets them
        (answer,) = llm.generate([each], how, use_tqdm=False)
        prompted = [sorted(one.logprob for one in place.values()) for place in answer.prompt_logprobs[1:]]
        out = answer.outputs[0]
        scores = [place[token].logprob for place, token in zip(out.logprobs, out.token_ids, strict=True)]
        found.append([list(out.token_ids), scores, prompted])
    return found


def main(out: str, dtype: str, tp: str, *folders: str) -> None:
    """Write the answers for each folder."""
    from vllm import LLM

    found = []
    for folder in folders:
        llm = LLM(
            model=folder,
            dtype=dtype,
            tensor_parallel_size=int(tp),
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.5,
        )
        found.append(answers_of(llm))
        del llm
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
