"""Schemes of URLs that messages treat specially. In those of any other scheme, all that may be a secret is hidden."""

S3 = ("s3", "s3a")
GOOGLE_CLOUD = ("gs", "gcs")
ALIBABA_OSS = ("oss",)
AZURE = ("az", "abfs", "abfss")
"""An @ after the scheme separates container and account, and is no secret."""
HUB = ("hf",)
WEB = ("http", "https")
IMAGES = ("docker", "oci")
"""Images of containers: what follows the colon is a tag."""

BUCKETS = (*S3, *GOOGLE_CLOUD, *ALIBABA_OSS)
"""Object stores, in whose URLs a colon or an @ before the first slash can only belong to credentials."""
