"""`reshard serve` of checkpoints in a bucket, on moto's server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import reshard
from tests.commandline import listing
from tests.serve.server import serving
from tests.stores.s3_server import BUCKET, s3_server


def test_a_run_in_a_bucket_is_a_model(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    sources = {100: hf_model("llama"), 200: hf_model("qwen3_moe")}
    for step, model in sources.items():
        made, run = tmp_path / f"made-{step}", tmp_path / f"iter_{step:07d}"
        reshard.convert(model, made, to="megatron", tp=2)
        (made / "release").rename(run)
        (made / "config.json").rename(run / "config.json")
    with s3_server() as s3:
        for folder in tmp_path.glob("iter_*"):
            for name in (each for each in folder.rglob("*") if each.is_file()):
                s3.client.upload_file(str(name), BUCKET, f"my run/{name.relative_to(tmp_path).as_posix()}")
        s3.client.put_object(Bucket=BUCKET, Key="my run/iter_0000300/.metadata", Body=b"being written")
        s3.client.put_object(Bucket=BUCKET, Key="my run/latest_checkpointed_iteration.txt", Body=b"200")
        url = f"s3://{BUCKET}/my run"
        with serving(tmp_path / "lines", url, "--no-tokenizer", **s3.environment) as server:
            branches = server.ask("/api/models/local/my-run/refs").json["branches"]
            assert [each["name"] for each in branches] == ["main", "iter_0000200", "iter_0000100"]
            unfinished = server.ask("/api/models/local/my-run/revision/300")
            assert (unfinished.status, "names step 200" in unfinished.json["error"]) == (404, True)
            for step in sources:
                reshard.convert(tmp_path / f"iter_{step:07d}", tmp_path / f"{step}", no_tokenizer=True)
                for name in listing(tmp_path / f"{step}").keys() - {"reshard.json"}:
                    written = (tmp_path / f"{step}" / name).read_bytes()
                    assert server.file("my-run", name, str(step)).body == written
            part = server.file("my-run", "model.safetensors", Range="bytes=5000-90000").body
            assert part == (tmp_path / "200/model.safetensors").read_bytes()[5000:90001]
