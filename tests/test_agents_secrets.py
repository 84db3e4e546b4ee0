"""What agents are given has no tokens, keys or passwords."""

from __future__ import annotations

import pytest

from reshard.runs.mcp.secrets import without_keys

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


@pytest.mark.parametrize(("text", "value"), SECRETS.items())
def test_each_is_recognized_alone(text: str, value: str) -> None:
    assert value not in without_keys(text.format(value))


@pytest.mark.parametrize("line", KEPT.split("\n"))
def test_what_a_failure_needs_stays(line: str) -> None:
    assert without_keys(line) == line
