"""Whether the Hugging Face hub can be asked at all, so that a typo costs no half minute of retries."""

import functools
import os
import socket
from urllib.parse import urlsplit


@functools.cache
def reachable() -> bool:
    """Whether the hub's host can be found: not switched off, and its name resolves or a proxy does that for us."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def why_not(error: Exception) -> str:
    """One line about a failed look-up."""
    if reachable():
        return f"the hub answers: {first_line(error)}"
    from huggingface_hub import constants

    cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the network does not reach it"
    return f"the hub cannot be asked ({cause}), and its local cache does not have it"


def first_line(error: BaseException) -> str:
    """The type and the first line of an error: `KeyError: 'n_layers'`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
