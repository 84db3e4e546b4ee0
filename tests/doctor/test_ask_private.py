"""What `reshard doctor --ask` sends has no secrets, no names of users and machines, and no addresses."""

from __future__ import annotations

import getpass
import re
import socket
from pathlib import Path

import pytest

from reshard.diagnosis.ask.redaction import redacted
from tests.commandline import reshard
from tests.doctor.asked import endpoint
from tests.work import calls

SECRETS = {
    "HF_TOKEN={}": "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",
    "loading with hf token {} failed": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    'OPENAI_API_KEY="{}"': "sk-proj-abc123DEF456ghi789",
    "{} is no key": "sk-ant-api03-Zz9Zz9Zz9Zz9",
    "git: {}": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "pat {}": "github_pat_11ABCDEFG0123456789_abcdef",
    "aws {}": "AKIAIOSFODNN7EXAMPLE",
    "aws_secret_access_key = {}": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_SESSION_TOKEN: {}": "FwoGZXIvYXdzEBYaDFk+/w==",
    "headers={{'Authorization': 'Bearer {}'}}": "abc.def-1234567",
    "authorization: Basic {}": "dXNlcjpwYXNzd29yZA==",
    "Cookie: session={}": "c00k1ec00k1e",
    "X-Api-Key: {}": "zzz999zzz",
    "wandb: API key {}": "0123456789abcdef0123456789abcdef01234567",
    "WANDB_API_KEY={}": "wandb_v1_AbCdEf0123456789_xyzxyzxyz",
    "wandb login --relogin {}": "fedcba9876543210fedcba9876543210fedcba98",
    "train.py --hub_token {} --lr 1": "plainwords",
    "args: ['--token', '{}']": "alsoplain",
    '{{"password": "{}"}}': "hunter2",
    "--password {}": "hunter3",
    "DB_PASSWORD={}": "pa$$w0rd!x",
    "secret_key: {}": "s3cr3tvalue",
    "machine host login bob password {}": "netrcpw77",
    "curl -u {} http://localhost": "bob:pw77pw77",
    "https://alice:{}@git.example.com/x.git": "urlpw123",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature={}": "5ec2e75ec2e7",
    "jwt {}": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdef123",
    "deepspeed.launcher.launch --world_info={} --x": "eyJsb2NhbGhvc3QiOiBbMCwgMV19",
    "slack https://hooks.slack.com/services/{}": "T00000000/B0000/abcdefgh",
    "ALIYUN {}": "LTAI5tAbCdEfGhIjKlMn",
    "google {}": "AIzaSyA1234567890abcdefghijklmnopqrstuvw",
    "MYSQL_PWD={}": "mypwd99",
    "export SSHPASS={}": "sshpw88",
    "DefaultEndpointsProtocol=https;AccountKey={};": "QWxhZGRpbjpvcGVu==",
    "密码：{}": "zhpw77",
    "webhook /hook/{}": "01234567-89ab-cdef-0123-456789abcdef",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----": "MIIEpAIBAAKCAQEAn3zzwords",
    "blob {}": "QWxhZGRpbjpvcGVuIHNlc2FtZQ1234QWxhZGRpbjpvcGVuIHNlc2FtZQ",
}
PEOPLE = {
    'File "/home/{}/train.py", line 3': "jdoe",
    "/mnt/data/home/{}/ckpt": "mmuster",
    "/Users/{}/x": "annapple",
    r"C:\Users\{}\x": "winuser",
    "/Users/{}/Documents/x": "Jane Appleseed",
    r"C:\Users\{}\Documents": "Win Dower",
    "/home/{}/训练.py": "张三丰",
    "USER={}": "envuser",
    "[{}@box ~]$ torchrun": "shelluser",
    "wandb: Currently logged in as: {} (myteamname)": "wbuser",
    "View run at https://wandb.ai/{}/proj/runs/1": "wbteam",
    "mail {} now": "jane.doe+x@example.co.uk",
    "ssh {}@somewhere": "sshuser",
}
MACHINES = {
    "MASTER_ADDR={}": "clusterhead",
    "--master_addr {}": "gpu-node-03",
    "[W socket.cpp:601] failed to connect to [{}]:29500": "tserver9",
    "{}:123:456 [0] NCCL INFO Bootstrap": "ncclbox",
    "  host      : {}": "workerbox",
    "rdzv_endpoint={}:29400": "rdzv7.example",
    "connect to {}:29500 failed": "10.17.3.44",
    "from fe80 {}": "fe80::1ff:fe23:4567:890a",
    "http://{}/v1/models": "inference.corp.example.com",
    "host {} is down": "ip-10-0-3-7",
    "SLURM_JOB_NODELIST={}": "h100s[03-06,09]",
    "srun: error: {}: task 3: Exited with exit code 1": "hal9k",
    "slurmstepd: error: *** STEP 12.0 ON {} CANCELLED AT 12:00": "deepthought",
    "[pod/{} container] x": "x-worker-0",
    "process 3 on node {} died": "rack4b7",
    "pod llm-{}: x": "trainer-worker-12",
    "(RayTask pid=7, ip={}) x": "172.31.20.74",
    "nodes {} 8": "cn042.cluster.internal",
}
KEPT = """\
pad_token=<pad> eos_token_id: 2 max_tokens=4096 query_key_value missing_keys: ['a'] use_auth_token=True token=128009
wandb: ERROR api_key not configured (no-tty). train.py:1205: torch.distributed.run self.net(x) threading.local
Can't load tokenizer for 'Qwen/Qwen2.5-7B': https://huggingface.co/Qwen/Qwen2.5-7B/resolve/main/config.json
KeyError: 'model.layers.0.self_attn.q_proj.weight' key=model.embed_tokens.weight shape torch.Size([32000, 4096])
ncclDevKernel_AllReduce_Sum_bf16_RING_LL Qwen3OmniMoeThinkerForConditionalGeneration get_hf_quantizer hf_hub_download
c10::Error at::native::copy x[1::2] 12:34:56:789 0000:3b:00.0 127.0.0.1:29500 0.0.0.0 localhost
nvidia-cublas-cu12==12.4.5.8 nvidia-cudnn-cu12    9.1.0.70 cuda version 12.4.1.0 transformers 4.46.0
File "/opt/conda/lib/python3.11/site-packages/transformers/trainer.py", line 12, in train
_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE rank0: loss 1.5"""


def test_nothing_private_is_received(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    private = [pair for pairs in (SECRETS, PEOPLE, MACHINES) for pair in pairs.items()]
    own = f"{getpass.getuser()} on {socket.gethostname()} in {Path.home()}/x"
    log.write_text("\n".join([*(text.format(value) for text, value in private), own, "ValueError: x"]))
    with endpoint() as served:
        reshard("doctor", log, "--ask", served.url, "--model", "m")
        received = served.bodies[0].decode()
    assert [value for _, value in private if value in received] == []
    assert "myteamname" not in received and str(Path.home()) + "/x" not in received
    signs = ("<secret>", r"<user-\d", r"<host-\d", r"<address-\d", "<e-mail>")
    assert [each for each in signs if not re.search(each, received)] == []


@pytest.mark.parametrize(("text", "value"), [*SECRETS.items(), *PEOPLE.items(), *MACHINES.items()])
def test_each_is_recognized_alone(text: str, value: str) -> None:
    assert value not in redacted(text.format(value))


@pytest.mark.parametrize("line", KEPT.split("\n"))
def test_what_a_failure_needs_stays(line: str) -> None:
    assert redacted(line) == line


def test_a_name_is_learned_once_and_replaced_everywhere() -> None:
    text = "[jdoe@box7 ~]$ x\nowner jdoe, /scratch/jdoe/run on box7; box71 and 10.1.1.1 to 10.1.1.2, 10.1.1.1"
    assert redacted(text).split("\n")[1] == (
        "owner <user-1>, /scratch/<user-1>/run on <host-1>; box71 and <address-1> to <address-2>, <address-1>"
    )
    assert redacted("on box7", context="[jdoe@box7 ~]$") == "on <host-1>"


def test_facts_are_redacted_too(tmp_path: Path) -> None:
    config = tmp_path / "train.sh"
    config.write_text("export HF_TOKEN=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\ntorchrun /home/jdoe/train.py\n")
    out = reshard("doctor", config, "--ask-dry-run").out
    assert "hf_Qw" not in out and "jdoe" not in out


def test_a_long_line_is_no_more_work_than_a_shorter_one() -> None:
    for unit in ("a1B-", "a.b@", "1:", "/home/", "::", "KEY=", "x ", "eyJ", "node-"):
        longer, long = unit * (40_000 // len(unit)), unit * (4000 // len(unit))
        redacted(long)  # compiles what is needed
        assert calls(lambda line=longer: redacted(line)) == calls(lambda line=long: redacted(line))
