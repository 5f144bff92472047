"""The final model on the Hugging Face hub, by the library's own upload (`--push-to-hub REPO`).

The repository is made before training, private unless it is there already, so that a name or a token that is wrong is
said at once. The model folder is uploaded when the run is over. What fails then does not fail the run: its model is
saved, and the command that uploads it is said.
"""

import shlex
from pathlib import Path

from frugal.distributed import rank_logs
from frugal.errors import RequestError, first_line


def check(repository: str | None) -> None:
    """Make the private repository, unless it is there or none is asked for.

    Raises:
        RequestError: its name is none, or the hub cannot be asked or does not allow it.
    """
    if repository is None:
        return
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
    except Exception as error:  # the network and the hub fail in many ways
        raise RequestError(
            f"cannot make the repository {repository} on the hub",
            because=first_line(error),
            hint="see that `hf auth whoami` tells who you are, or leave --push-to-hub out and upload later",
        ) from None


def push(folder: Path, repository: str) -> None:
    """Upload the model in `folder`, and say where it is; where that fails, the command that does it later."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with frugal")
    except Exception as error:  # as before; the model is on the disk
        command = shlex.join(["hf", "upload", repository, str(folder), "."])
        rank_logs.to_console(
            f"warning: the model is saved, and could not be uploaded to {repository}\n  because {first_line(error)}\n\n"
            f"hint: upload it later: {command}"
        )
    else:
        rank_logs.to_console(f"model uploaded: {commit.commit_url}")
