"""Whether the Hugging Face hub can be asked at all, so that a typo costs no half minute of retries."""

import functools
import os
import socket
from urllib.parse import urlsplit


def reachable() -> bool:
    """Whether the hub can be asked."""
    return unreachable_because() is None


@functools.cache
def unreachable_because() -> str | None:
    """Why the hub cannot be asked: it is switched off, or its host has no address here and no proxy might know it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return "the network does not reach it"
    return None


def use_cache_only() -> None:
    """Make `datasets`, which cannot be told so in a call, look into its local cache only; for the whole process."""
    import datasets
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def why_not(error: Exception) -> str:
    """One line about a failed look-up."""
    if (reason := unreachable_because()) is not None:
        return f"the hub cannot be asked ({reason}), and its local cache does not have it"
    return f"the hub answers: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The type and the first line of an error: `KeyError: 'n_layers'`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
