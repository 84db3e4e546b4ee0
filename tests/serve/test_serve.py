"""`reshard serve`: names, revisions, ranges, faults, and what it must not do."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep

import pytest

import reshard
from tests import browser
from tests.commandline import listing, within
from tests.commandline import reshard as reshard_command
from tests.serve.server import Server, serving

WEIGHTS = "model.safetensors"
OPTIONS = ("--no-tokenizer",)


@pytest.fixture(scope="module")
def runs(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron run with two steps and one that was not finished, a run of the Trainer, a folder, and a link."""
    top = tmp_path_factory.mktemp("served") / "runs"
    run = top / "my run"
    model, other = hf_model("qwen3_moe"), hf_model("llama")
    for step, source in ((100, other), (200, model)):
        reshard.convert(source, top / "made", to="megatron", tp=2, no_tokenizer=True, overwrite=True)
        (made,) = (each for each in (top / "made").iterdir() if each.is_dir())
        shutil.copytree(made, run / f"iter_{step:07d}")
        shutil.copy(source / "config.json", run / f"iter_{step:07d}")
    shutil.copytree(run / "iter_0000200", run / "iter_0000300")
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    for step in (5, 10):
        shutil.copytree(other, top / f"trainer/checkpoint-{step}")
    shutil.copytree(model, top / "deep/inner/checkpoints/plain")
    shutil.rmtree(top / "made")
    return top


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("lines") / "lines", runs, *OPTIONS) as running:
        yield running


def test_each_run_is_a_model_and_each_step_a_revision(server: Server) -> None:
    (listening, *_) = server.events()
    assert listening["notes"] == ["models: local/deep-inner-plain, local/my-run, local/trainer"]
    assert [each["id"] for each in server.ask("/api/models").json] == [
        "local/deep-inner-plain",
        "local/my-run",
        "local/trainer",
    ]
    branches = server.ask("/api/models/local/my-run/refs").json["branches"]
    commits = {each["name"]: each["targetCommit"] for each in branches}
    assert list(commits) == ["main", "iter_0000200", "iter_0000100"]
    assert commits["main"] == commits["iter_0000200"] != commits["iter_0000100"]
    assert {server.commit("my-run", name) for name in ("main", "200", "iter_0000200", commits["main"])} == {
        commits["main"]
    }


def test_every_file_is_what_convert_writes(server: Server, runs: Path, tmp_path: Path) -> None:
    reshard.convert(runs / "my run/iter_0000100", tmp_path / "out", no_tokenizer=True)
    entries = server.ask("/api/models/local/my-run/tree/100?recursive=true").json
    written = {path: size for path, (size, _) in listing(tmp_path / "out").items()}
    assert {each["path"] for each in entries} == {*written, "README.md"}
    for each in entries:
        if each["path"] not in ("README.md", "reshard.json"):
            answer = server.file("my-run", each["path"], "100")
            assert answer.body == (tmp_path / "out" / each["path"]).read_bytes()
            assert each["size"] == len(answer.body) == int(answer.headers["Content-Length"])
    assert b"verify" not in server.file("my-run", "README.md").body  # its record has no digests


def test_a_step_that_is_not_complete_says_why(server: Server) -> None:
    answer = server.ask("/api/models/local/my-run/revision/iter_0000300")
    assert (answer.status, answer.headers["X-Error-Code"]) == (404, "RevisionNotFound")
    assert "latest_checkpointed_iteration.txt names step 200" in answer.headers["X-Error-Message"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/local/nobody", "RepoNotFound"),
        ("/api/models/other/my-run", "RepoNotFound"),
        ("/api/models/local/my-run/revision/400", "RevisionNotFound"),
        ("/local/my-run/resolve/main/nothing.json", "EntryNotFound"),
        ("/local/my-run/resolve/main/../../../etc/passwd", "EntryNotFound"),
        ("/local/my-run/resolve/main/%2e%2e/%2e%2e/etc/passwd", "EntryNotFound"),
        ("/api/models/local/my-run/tree/main/nothing", "EntryNotFound"),
    ],
)
def test_what_is_not_there_has_the_code_of_the_hub(server: Server, path: str, code: str) -> None:
    answer = server.ask(path)
    assert (answer.status, answer.headers["X-Error-Code"]) == (404, code)


def test_a_path_info_of_some_files(server: Server) -> None:
    body = json.dumps({"paths": ["config.json", "nothing"]})
    answer = server.ask(
        "/api/models/local/my-run/paths-info/main", "POST", body, Content_Type="application/json"
    )
    assert [each["path"] for each in answer.json] == ["config.json"]
    for wrong in ("[]", "{", '{"paths": 3}'):
        asked = server.ask(
            "/api/models/local/my-run/paths-info/main", "POST", wrong, Content_Type="application/json"
        )
        assert asked.status == 400
    form = server.ask("/api/models/local/my-run/paths-info/main", "POST", "paths=config.json&expand=True")
    assert form.json == answer.json
    huge = server.ask("/api/models/local/my-run/paths-info/main", "POST", "x" * (2 << 20))
    assert huge.status == 413
    pieces = server.ask("/api/models/local/my-run/paths-info/main", "POST", iter([b"x" * (1 << 20)] * 2))
    assert pieces.status == 413, "of an unknown length"
    deep = '{"paths": ' + "[" * 100_000
    asked = server.ask(
        "/api/models/local/my-run/paths-info/main", "POST", deep, Content_Type="application/json"
    )
    assert asked.status == 400


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", [(0, 1)]),
        ("bytes=8-107", [(8, 108)]),
        ("bytes=-5", [(-5, None)]),
        ("bytes=100-", [(100, None)]),
        ("bytes=0-9,20-29,-3", [(0, 10), (20, 30), (-3, None)]),
        ("bytes=5-999999999999", [(5, None)]),
        ("bytes=999999999999-", None),
        ("bytes=-0", None),
        ("bytes=9-8", None),
        ("lines=1-2", []),
        ("bytes=a-b", []),
        ("bytes=" + ",".join(["0-0"] * 100), []),
    ],
)
def test_ranges(server: Server, asked: str, expected: list[tuple[int, int | None]] | None) -> None:
    whole = server.file("my-run", WEIGHTS).body
    answer = server.file("my-run", WEIGHTS, Range=asked)
    if expected is None:
        assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
    elif not expected:
        assert (answer.status, answer.body) == (200, whole)
    elif len(expected) == 1:
        ((begin, end),) = expected
        assert (answer.status, answer.body) == (206, whole[begin:end])
        first = begin if begin >= 0 else len(whole) + begin
        assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.body) - 1}/{len(whole)}"
    else:
        assert "Content-Range" not in answer.headers
        boundary = re.fullmatch(r"multipart/byteranges; boundary=(\w+)", answer.headers["Content-Type"])
        assert boundary
        parts = answer.body.split(f"\r\n--{boundary[1]}".encode())[1:-1]
        assert [part.split(b"\r\n\r\n", 1)[1] for part in parts] == [whole[a:b] for a, b in expected]
        assert int(answer.headers["Content-Length"]) == len(answer.body)


def test_etags_answer_conditions(server: Server) -> None:
    head = server.ask(f"/local/my-run/resolve/main/{WEIGHTS}", "HEAD")
    etag = head.headers["ETag"]
    assert (head.status, head.body) == (200, b"")
    assert head.headers["X-Repo-Commit"] == server.commit("my-run")
    assert server.file("my-run", WEIGHTS, If_None_Match=etag).status == 304
    assert server.file("my-run", WEIGHTS, If_None_Match='"another"').status == 200
    assert server.file("my-run", WEIGHTS, Range="bytes=0-3", If_Range=etag).status == 206
    assert server.file("my-run", WEIGHTS, Range="bytes=0-3", If_Range='"another"').status == 200


def test_it_reads_what_it_sends(server: Server) -> None:
    body = server.file("trainer", WEIGHTS, Range="bytes=1000-300000").body
    with within(60):
        while (last := server.events()[-1]).get("bytes") != len(body):
            sleep(0.1)
    assert last["bytes"] == 299001
    assert last["read"] <= 1.05 * last["bytes"]


@pytest.mark.slow
def test_two_hundred_clients_get_the_same_bytes(server: Server) -> None:
    whole = server.file("my-run", WEIGHTS).body
    with ThreadPoolExecutor(200) as pool:
        heads = [pool.submit(server.ask, f"/local/my-run/resolve/main/{WEIGHTS}", "HEAD") for _ in range(400)]
        bodies = [pool.submit(server.file, "my-run", WEIGHTS) for _ in range(200)]
        assert {each.result().headers["ETag"] for each in heads} == {heads[0].result().headers["ETag"]}
        assert all(each.result().body == whole for each in bodies)


def test_nothing_is_written(server: Server, runs: Path) -> None:
    before = listing(runs)
    server.file("trainer", WEIGHTS)
    server.ask("/")
    assert listing(runs) == before
    assert server.ask("/local/my-run/resolve/main/config.json", "PUT").status == 405
    assert server.ask("/api/models/local/my-run", "DELETE").status == 405


def test_the_page_names_runs_steps_and_what_is_wrong(server: Server) -> None:
    page = server.ask("/").body.decode()
    for told in (
        "local/my-run",
        "iter_0000100",
        "names step 200",
        "qwen3_moe",
        "TP2",
        "hf download local/trainer",
    ):
        assert told in page
    assert "<script" not in page
    assert "://" not in page.replace(server.address, "")  # it loads nothing from elsewhere


@browser.needed
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_browser_draws_the_page(server: Server, colours: str, tmp_path: Path) -> None:
    scheme = f"--blink-settings=preferredColorScheme={int(colours == 'light')}"
    drawn = browser.drawn(server.address, f"--user-data-dir={tmp_path}", scheme)
    assert drawn.count("<section>") == 3


def test_another_name_for_this_machine_is_refused(server: Server) -> None:
    """A page of the web may have its own name lead to 127.0.0.1."""
    assert server.ask("/api/models", Host="evil.example").status == 400
    assert server.ask("/api/models", Host=f"localhost:{server.port}").status == 200


def test_long_headers_are_refused(server: Server) -> None:
    with suppress(ConnectionError):
        assert server.ask("/api/models", X_Long="a" * 1_000_000).status in (400, 431)
    assert server.ask("/api/models").status == 200


def test_a_client_that_vanishes_costs_nothing(server: Server) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                f"GET /local/my-run/resolve/main/{WEIGHTS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.recv(10)
    assert server.file("my-run", WEIGHTS).status == 200


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with a tensor that no buffer between two processes holds."""
    import numpy as np
    from safetensors.numpy import save_file

    run = tmp_path / "large"
    run.mkdir()
    (run / "config.json").write_text('{"model_type": "nobody_has_this"}')
    save_file({"weight": np.ones((64 << 20,), np.uint8)}, run / WEIGHTS)
    return run


def test_a_source_that_changes_cuts_the_answer_and_has_another_etag(large: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "lines", large, *OPTIONS) as server:
        connection = server.connection()
        connection.request("GET", f"/local/large/resolve/main/{WEIGHTS}")
        response = connection.getresponse()
        got = len(response.read(1 << 20))
        with (large / WEIGHTS).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\2")
        while part := response.read(1 << 20):
            got += len(part)
        assert got < 64 << 20
        answer = server.file("large", WEIGHTS)
        assert answer.body[-1:] == b"\2"
        assert answer.headers["ETag"] != response.headers["ETag"]
        stale = server.file("large", WEIGHTS, response.headers["X-Repo-Commit"])
        assert (stale.status, stale.headers["X-Error-Code"]) == (404, "RevisionNotFound")
        cut = [each for each in server.events() if each.get("error")]
        assert "changed while it was read" in cut[0]["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the open files")
def test_no_source_stays_open_and_a_deleted_one_is_said(large: Path, tmp_path: Path) -> None:
    """The disk would have no room for a deleted file that is open."""
    with serving(tmp_path / "lines", large, *OPTIONS) as server:
        assert server.file("large", WEIGHTS, Range="bytes=0-3").status == 206
        with within(60):
            while len(server.events()) < 3:
                sleep(0.01)
        descriptors = Path(f"/proc/{server.process.pid}/fd")
        opened = [each.readlink() for each in descriptors.iterdir() if each.is_symlink()]
        assert large / WEIGHTS not in opened
        shutil.rmtree(large)
        sleep(1.1)  # sources are looked at once in a second
        assert server.file("large", WEIGHTS).status == 404


def test_a_new_step_becomes_main(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "my run", run)
    with serving(tmp_path / "lines", run, *OPTIONS) as server:
        before = server.commit("run")
        (run / "latest_checkpointed_iteration.txt").write_text("300")
        with within(60):
            while (after := server.commit("run")) == before:  # folders are looked at once in a second
                sleep(0.1)
        assert after == server.commit("run", "iter_0000300")
        assert server.commit("run", before) == before  # who has begun with the older step can go on


@pytest.mark.slow
def test_slow_clients_do_not_take_memory(large: Path, tmp_path: Path) -> None:
    request = f"GET /local/large/resolve/main/{WEIGHTS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with serving(tmp_path / "lines", large, *OPTIONS, "--memory", "64MiB") as server, ExitStack() as clients:
        used = []
        for _ in range(3):
            for _ in range(50):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                client.sendall(request)
            client.recv(10)
            assert server.ask("/api/models").status == 200
            used.append(server.resident())
        assert used[2] - used[0] < 32 << 20  # 100 clients more


def test_links_out_of_the_folders_are_not_followed(runs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    shutil.copy(runs / "deep/inner/checkpoints/plain/model.safetensors", secret)
    (secret / "passwd").write_text("toor")
    run = tmp_path / "runs/linked"
    shutil.copytree(runs / "deep/inner/checkpoints/plain", run)
    (run / WEIGHTS).unlink()
    (run / WEIGHTS).symlink_to(secret / WEIGHTS)
    template = tmp_path / "runs/template"
    shutil.copytree(runs / "deep/inner/checkpoints/plain", template)
    (template / "chat_template.jinja").unlink(missing_ok=True)
    (template / "chat_template.jinja").symlink_to(secret / "passwd")
    with serving(tmp_path / "lines", tmp_path / "runs", *OPTIONS) as server:
        assert server.file("template", "chat_template.jinja").status == 404  # as `convert` leaves it out
        refused = server.file("linked", WEIGHTS)
        assert (refused.status, "leads out of the folders" in refused.json["error"]) == (404, True)
        (planned,) = (each for each in server.events() if each["event"] == "planned")
        assert any("chat_template.jinja" in note for note in planned["notes"])


def test_a_token_is_needed_elsewhere(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_TOKEN", "")
    refused = reshard_command("serve", str(runs), "--host", "0.0.0.0", "--port", "0")
    assert (refused.code, "needs a token" in refused.err) == (2, True)
    with serving(tmp_path / "lines", runs, *OPTIONS, "--host", "0.0.0.0", RESHARD_TOKEN="s3cret") as server:
        assert server.ask("/api/models").status == 401
        assert server.ask("/api/models", Authorization="Bearer wrong").status == 401
        assert server.ask("/api/models", Authorization="Basic !!").status == 401
        assert server.ask("/api/models", Authorization="Bearer s3cret").status == 200
        browser = base64.b64encode(b":s3cret").decode()
        assert server.ask("/", Authorization=f"Basic {browser}").status == 200


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signals_end_it(large: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "lines", large, *OPTIONS) as server:
        connection = server.connection()
        connection.request("GET", f"/local/large/resolve/main/{WEIGHTS}")
        connection.getresponse().read(10)
        server.process.send_signal(number)
        _, printed = server.process.communicate()
        assert server.process.returncode in (128 + number, -number)
        assert "Traceback" not in printed


WRONG = {
    "not there": (["{}/nothing"], "no such file"),
    "no port": (["{}", "--port", "99999"], "cannot listen"),
    "no host": (["{}", "--host", "999.1.1.1", "--token", "x"], "cannot listen"),
    "no number": (["{}", "--port", "many"], "--port"),
    "no paths": ([], "PATH"),
    "no dtype": (["{}", "--dtype", "float3"], "float3"),
    "no quantization": (["{}", "--quantize", "fp3"], "fp3"),
    "no base": (["{}", "--base", "{}/nothing"], "nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(case: str, runs: Path) -> None:
    words, told = WRONG[case]
    ended = reshard_command("serve", *(word.format(runs) for word in words))
    assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert told in ended.err
