"""What the system and the shell say on a machine in Chinese."""

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.text.chinese_messages import in_english

SAID = {
    "run.sh: 第 12 行： 4711 段错误               （核心已转储） python train.py": "killed-crash",
    "run.sh: 行 7:  4711 已杀死               python train.py": "killed-by-signal",
    "OSError: [Errno 28] 设备上没有空间: '/data/out/model.safetensors'": "disk-full",
    "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - 地址已在使用).": "port-in-use",
}


@pytest.mark.parametrize("said", SAID)
def test_a_message_in_chinese_is_the_same_failure(said: str) -> None:
    codes = [each.code for each in diagnose_text("run.log", f"开始训练\n{said}\n")]
    english = [each.code for each in diagnose_text("run.log", f"开始训练\n{in_english(said)}\n")]
    assert codes == english
    assert SAID[said] in codes


@pytest.mark.parametrize(
    "said", ["没有段错误的日志", "程序已终止训练", "'未找到命令行参数'", "Segmentation fault"]
)
def test_other_text_stays_as_it_is(said: str) -> None:
    assert in_english(said) == said
