"""Buckets of S3, and of servers with its interface."""

from __future__ import annotations

from reshard.stores.address import Kind
from reshard.stores.entry import Entry
from reshard.stores.objects import ObjectStore
from reshard.stores.ranges import Body, Wanted


class S3(ObjectStore):
    """A bucket of S3."""

    kind = Kind(
        ("s3", "s3a"),
        "s3fs",
        "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true; "
        "`aws s3 ls URL` tells whether they work",
    )

    def fetch(self, wanted: Wanted) -> bytes:
        from fsspec.asyn import sync

        content: bytes = sync(self.fs.loop, self._fetched, wanted)
        return content

    async def _fetched(self, wanted: Wanted) -> bytes:
        """Not by the `cat_file` of s3fs, which does not compare the range and the ETag of an answer."""
        bucket, key, version = self.fs.split_path(self._key(wanted.url))
        of_version = {"VersionId": version} if version else {}
        span = f"bytes={wanted.begin}-{wanted.end - 1}"
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **of_version)
        body = answer["Body"]
        try:
            size = wanted.size_in(answer.get("ContentRange"))
            wanted.check_state(Entry(size, 0, answer.get("ETag", "").strip('"')))
            content = Body(wanted, size)
            while part := await body.read(1 << 20):
                content.add(part)
            return content.content()
        finally:
            body.close()
