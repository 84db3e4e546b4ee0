"""Messages of the system and the shell in Chinese, as a machine with `LANG=zh_CN.UTF-8` prints them, in English.

The words are those of the catalogues of glibc and bash (`zh_CN/LC_MESSAGES/libc.mo`, `bash.mo`).
"""

from __future__ import annotations

import re

_ENGLISH = {
    "未找到命令": "command not found",
    "没有那个文件或目录": "No such file or directory",
    "权限不够": "Permission denied",
    "无法分配内存": "Cannot allocate memory",
    "设备上没有空间": "No space left on device",
    "超出磁盘限额": "Disk quota exceeded",
    "地址已在使用": "Address already in use",
    "拒绝连接": "Connection refused",
    "连接超时": "Connection timed out",
    "连接被对方重设": "Connection reset by peer",
    "断开的管道": "Broken pipe",
    "没有到主机的路由": "No route to host",
    "未知的名称或服务": "Name or service not known",
    "域名解析暂时失败": "Temporary failure in name resolution",
    "已杀死": "Killed",
    "已终止": "Terminated",
    "已放弃": "Aborted",
    "段错误": "Segmentation fault",
    "总线错误": "Bus error",
    "非法指令": "Illegal instruction",
}
_SAID = re.compile(
    r"(?:(?P<colon>[:：]) ?|(?P<before>^|\] |\d  ?|[\u4e00-\u9fff] ))"  # after a name, a number, or words in Chinese
    rf"(?P<said>{'|'.join(_ENGLISH)})(?P<dumped> ?[(（](?:核心已转储|吐核)[)）])?(?=$|[\s:：'\".，。；！？、])"
)

_LINE = re.compile(r"[:：] ?(?:行 ?(\d{1,6})|第 ?(\d{1,6}) ?行)[:：]")
"""Where in a script the shell was."""


def in_english(line: str) -> str:
    """A line with the system's words in English, where the system says them; any other text as it is."""
    if line.isascii():
        return line
    return _SAID.sub(_translated, _LINE.sub(lambda match: f": line {match[1] or match[2]}:", line))


def _translated(match: re.Match[str]) -> str:
    before = ": " if match["colon"] else match["before"]
    return before + _ENGLISH[match["said"]] + (" (core dumped)" if match["dumped"] else "")
