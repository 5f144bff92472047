"""The final model on the Hugging Face hub, by the library's own upload (`train.push-to-hub`).

The repository is made before training, private unless it exists, so that a wrong name or token is reported at once. The
model folder is uploaded when the run is over. A failure then does not fail the run: its model is saved, and the command
that uploads it is printed.
"""

import shlex
from pathlib import Path

from frugal.distributed import rank_logs
from frugal.errors import RequestError, first_line


def check(repository: str | None) -> None:
    """Make the private repository, unless it exists or none is asked for.

    Raises:
        RequestError: its name is wrong, or the hub cannot be reached or does not allow it.
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
            hint="check with `hf auth whoami` that you are logged in, or leave train.push-to-hub out and upload later",
        ) from None


def push(folder: Path, repository: str) -> None:
    """Upload the model in `folder`, and print where it is, or the command that uploads it later if that fails."""
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
