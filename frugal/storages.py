"""Addresses of storages that fsspec knows, such as `s3://bucket/run`, of data and of copies of runs.

Credentials come from the storage's own files and variables, never from the address.
"""

import os
from urllib.parse import urlsplit

from frugal.errors import RequestError, first_line, refuse

_EXTRAS = {"s3": "frugal-trainer[s3]", "s3a": "frugal-trainer[s3]"}
_SECRET = ("KEY", "SECRET", "TOKEN", "PASSWORD", "CREDENTIAL")


def is_address(source: str) -> bool:
    """Return whether a name is an address of a storage."""
    return "://" in source


def check(flag: str, *addresses: str) -> None:
    """Refuse addresses that no storage can have, without asking it.

    Raises:
        RequestError: an address has credentials, or its kind of storage is unknown or not installed.
    """
    for address in addresses:
        parts = urlsplit(address)
        refuse(
            (
                parts.password is not None or parts.query,
                f"{flag} {parts.scheme}://... has credentials in its address",
                "it is kept in the run's record, and shown in lists of processes",
                "put them where the storage's library looks, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        )
        import fsspec  # type: ignore[import-untyped]  # it has no type hints

        try:
            fsspec.get_filesystem_class(parts.scheme or "file")
        except (ImportError, ValueError) as error:
            package = _EXTRAS.get(parts.scheme)
            raise RequestError(
                f"{flag} {address} cannot be used", because=first_line(error),
                hint=f"pip install '{package}'" if package else "install the package that fsspec needs for it",
            ) from None  # fmt: skip


def explained(error: Exception) -> str:
    """Return the first line of an error, without what variables for credentials have."""
    said = first_line(error)
    for name, value in os.environ.items():
        if len(value) > 7 and any(word in name.upper() for word in _SECRET):
            said = said.replace(value, f"<{name}>")
    return said
