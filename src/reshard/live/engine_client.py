"""A vLLM server as a trainer reaches it: `VLLMWeightSyncClient` in `vllm/distributed/weight_transfer/base.py`, 0.32."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from reshard.base.errors import ReshardError
from reshard.base.foreign_text import printable_line

PAUSES = ("wait", "abort", "keep", "none")
"""What becomes of requests that are running when new weights come: vLLM's modes of `/pause`, and no pause."""


class VLLMServer:
    """The server at a URL. From before an update until it has succeeded it pauses, unless `pause` is none."""

    def __init__(self, url: str, pause: str, timeout: float) -> None:
        self._url, self._pause, self._timeout = url.rstrip("/"), pause, timeout

    def __str__(self) -> str:
        return self._url

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let its ranks meet those of the trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let its ranks leave."""
        self._post("shutdown_weight_transfer_engine", {})

    def start_weight_update(self) -> None:
        """Pause, and be ready for new weights."""
        if self._pause != "none":
            self._post(f"pause?mode={self._pause}", {})
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive them."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Use them."""
        self._post("finish_weight_update", {"weight_version": weight_version} if weight_version else {})
        if self._pause != "none":
            self._post("resume", {})

    def _post(self, path: str, content: dict[str, Any]) -> None:
        """Raise ReshardError for what the server refuses, and OSError if it does not answer."""
        request = Request(
            f"{self._url}/{path}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urlopen(request, timeout=self._timeout) as response:
                response.read()
        except HTTPError as error:
            found = f"{error.code}: {error.read(2000).decode(errors='replace')}"
            raise self._refused(path, found) from error

    def _refused(self, path: str, found: str) -> ReshardError:
        return ReshardError(
            "transfer-engine-refused",
            f"an engine did not do what /{path} asks for",
            file=self._url,
            found=printable_line(found),
            rule="vLLM has these addresses with VLLM_SERVER_DEV_MODE=1",
            remedy="look into its log; start it with VLLM_SERVER_DEV_MODE=1, --load-format reshard and "
            '--weight-transfer-config \'{"backend": "reshard"}\'',
        )
