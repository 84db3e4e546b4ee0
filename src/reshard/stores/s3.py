"""Buckets of S3, and of servers with its interface."""

from __future__ import annotations

from reshard.base import schemes
from reshard.stores.address import StoreKind
from reshard.stores.file_info import FileInfo
from reshard.stores.object_stores import ObjectStore
from reshard.stores.range_responses import RangeRequest, ResponseBody


class S3(ObjectStore):
    """A bucket of S3."""

    kind = StoreKind(
        schemes.S3,
        "s3fs",
        "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true; "
        "`aws s3 ls URL` tells whether they work",
    )

    def fetch(self, wanted: RangeRequest) -> bytes:
        from fsspec.asyn import sync

        content: bytes = sync(self.fs.loop, self._fetched, wanted)
        return content

    async def _fetched(self, wanted: RangeRequest) -> bytes:
        """Not by the `cat_file` of s3fs, which does not compare the range and the ETag of an answer."""
        bucket, key, version = self.fs.split_path(self.key(wanted.url))
        of_version = {"VersionId": version} if version else {}
        span = f"bytes={wanted.begin}-{wanted.end - 1}"
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **of_version)
        body = answer["Body"]
        try:
            size = wanted.size_in(answer.get("ContentRange"))
            wanted.check_state(FileInfo(size, 0, answer.get("ETag", "").strip('"')))
            content = ResponseBody(wanted, size)
            while part := await body.read(1 << 20):
                content.add(part)
            return content.content()
        finally:
            body.close()
