"""Joining the other ranks."""

import deepspeed
import deepspeed.ops


def join() -> None:
    """Enter the process group the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, ...); again: nothing.

    On CPU, DeepSpeed would compile an operator for inference with the first compiler it finds, and leave its shared
    buffers, 66 MiB a rank, in /dev/shm for good. Training never calls it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)
