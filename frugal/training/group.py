"""How ranks come together."""

import sys

import deepspeed


def form() -> None:
    """Enter the process group that the environment describes, if this process is in none yet. Collective.

    Without DeepSpeed's shared-memory kernel for CPU ranks, which costs more than it saves: it is compiled when first
    used, a process killed while loading it leaves a lock that later runs wait on for ever, and its buffers (66 MiB a
    rank) stay in /dev/shm after the run. gloo does the same sums.
    """
    # Not `deepspeed.comm.torch.build_shm_op`: that attribute is torch itself.
    setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # noqa: B010  # unknown to mypy
    deepspeed.init_distributed(auto_mpi_discovery=False)
