"""S3 by botocore's own synchronous client: to look at a bucket without the store's code."""

from __future__ import annotations

from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tests.kit.servers import ACCESS_KEY, BUCKET, SECRET_KEY


class RawS3:
    """A client of one endpoint, bound to `BUCKET`. Closed on leaving.

    It is patient: what it says of a bucket must not depend on how busy the machine is.
    """

    def __init__(self, endpoint: str, timeout_s: float = 60.0) -> None:
        self.client: Any = botocore.session.Session().create_client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 4},
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
            ),
        )

    def __enter__(self) -> RawS3:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def try_to_use(self) -> str | None:
        """Make the bucket and an object in it; None, or what is in the way."""
        try:
            if BUCKET not in [b["Name"] for b in self.client.list_buckets()["Buckets"]]:
                self.client.create_bucket(Bucket=BUCKET)
            self.put("ready", b"ready")
            if self.get("ready") != b"ready":
                return "it gives back other bytes than it was given"
            self.client.delete_object(Bucket=BUCKET, Key="ready")
        except (BotoCoreError, ClientError) as error:
            return str(error)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def get(self, key: str) -> bytes | None:
        """The object's bytes; None if there is none."""
        try:
            data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
        return data

    def begin_upload(self, key: str, *parts: bytes) -> str:
        """Begin a multipart upload and leave it dangling; its id."""
        upload: str = self.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        for number, part in enumerate(parts, 1):
            self.client.upload_part(
                Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=part
            )
        return upload

    def uploads(self, prefix: str) -> list[str]:
        """The keys of the multipart uploads that are neither completed nor aborted."""
        try:
            found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchUpload":  # rclone, where it holds none
                return []
            raise
        return [upload["Key"] for upload in found.get("Uploads", ())]
