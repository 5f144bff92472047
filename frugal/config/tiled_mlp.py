"""What a tiled MLP does not go with."""

from frugal.errors import RequestError


def check(mlp: str, offload: str, activation_checkpointing: str) -> None:
    """`--mlp` beside what else is pinned.

    Raises:
        RequestError: the two are impossible together.
    """
    if mlp != "tiled":
        return
    if activation_checkpointing == "selective":
        other, because = "--activation-checkpointing selective", "it keeps the products of all slices until backward"
    elif offload == "nvme":
        other = "--offload nvme"
        because = "an MLP's parameters are gathered all at once, for which there may be too few buffers"
    else:
        return
    raise RequestError(f"--mlp tiled is impossible with {other}", because=because, hint="leave one of them out")
