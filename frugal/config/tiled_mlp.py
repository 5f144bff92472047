"""What a tiled MLP does not go with."""

from frugal.errors import RequestError


def check(mlp: str, zero_stage: int | None, offload: str, activation_checkpointing: str) -> None:
    """`--mlp` beside what else is pinned.

    Raises:
        RequestError: the two are impossible together.
    """
    if mlp != "tiled":
        return
    if activation_checkpointing == "selective":
        other, because = "--activation-checkpointing selective", "it keeps the products of all slices until backward"
    elif zero_stage == 3 or offload in ("all", "nvme"):
        other = "--zero-stage 3" if zero_stage == 3 else f"--offload {offload}"
        because = "ZeRO-3 gathers the parameters of each part of an MLP only while that part runs"
    else:
        return
    raise RequestError(f"--mlp tiled is impossible with {other}", because=because, hint="leave one of them out")
