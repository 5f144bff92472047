"""`python -m bench.emulated_gpu.setup`: a virtual environment whose torch finds emulated CUDA cards.

It gets torch's CUDA build (527 MB) without NVIDIA's packages, its Triton (190 MB), everything else in the versions of
`constraints.txt`, and the emulated libraries, compiled here in seconds. `--liger` adds Liger's kernels, which the tiled
loss then takes. It needs gcc, g++ and nm, and CUDA's headers: of an installed toolkit
(CUDA_HOME, /usr/local/cuda), else from NVIDIA's packages. A second call brings both up to date.

`--only-torch torch==2.15.0` installs just that into an environment that exists, for `make contract` and `make release`:
a build for CPUs where pip finds one, else the CUDA build over emulated libraries. It then requires no package of
NVIDIA's, so that pip can install others beside it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.emulated_gpu.environment import FOLDER, ROOT
from bench.emulated_gpu.libraries import build

TORCH = "torch===2.13.0"
"""Arbitrary equality: a local version such as 2.13.0+cpu is not meant."""

LIGER = ("liger-kernel==0.8.5", "trl==1.16.0")
"""Liger's kernels, and TRL's loss, which `bench.kernels.account` counts."""

HEADER_PACKAGES = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
HERE = Path(__file__).parent
REPLACED = re.compile(r"^Requires-Dist: (nvidia|cuda)-.*\n", re.MULTILINE)
"""Lines of torch's metadata with packages that the emulation replaces."""


class SetUpError(Exception):
    """Something that set-up needs is missing; the message says what, why and what to do."""


def main() -> None:
    """Set up, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of the environment  [default: {FOLDER.name}]")
    parser.add_argument("--liger", action="store_true", help="also Liger's kernels")
    parser.add_argument("--only-torch", metavar="torch==VERSION", help="nothing else, in an environment that exists")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    try:
        if asked.only_torch:
            install_torch(folder, asked.only_torch)
            return
        set_up(folder, with_liger=asked.liger)
    except SetUpError as error:
        raise SystemExit(str(error)) from None
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        raise SystemExit(f"error: set-up failed\n  because this failed: {command[:400]}") from None
    print(f"\n{folder} is ready. To see one of its cards:")
    print(
        f"  EMULATED_GPU_CARD=rtx3060 {folder}/bin/python -c 'import torch; print(torch.cuda.get_device_properties(0))'"
    )


def set_up(folder: Path, *, with_liger: bool = False) -> None:
    """Make the environment in `folder`, or bring the emulated libraries of an existing one up to date.

    Raises:
        SetUpError: a compiler or CUDA's headers are missing.
    """
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install_torch(folder, TORCH)
    pip_install(folder, "-c", ROOT / "constraints.txt", "setuptools", "wheel", "ninja", "-e", ROOT)
    if with_liger:
        pip_install(folder, "--no-deps", *LIGER)


def install_torch(folder: Path, torch: str) -> None:
    """Install a torch in the environment `folder`, and emulated libraries if it is a CUDA build.

    Raises:
        SetUpError: a compiler or CUDA's headers are missing.
    """
    pip_install(folder, "--no-deps", torch)
    site = next(folder.glob("lib/python3.*/site-packages"))
    if not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
        return
    check_tools()
    require_nothing_of_nvidia(next(site.glob("torch-*.dist-info/METADATA")))
    with tempfile.TemporaryDirectory() as scratch:
        headers = installed_headers() or downloaded_headers(Path(scratch) / "headers")
        for line in build(site, headers, Path(scratch) / "build"):
            print(line)
    install_answers(site)


def check_tools() -> None:
    """Raises SetUpError if a compiler is missing."""
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if missing:
        raise SetUpError(
            f"error: {' and '.join(missing)} not found\n  because the emulated libraries are compiled here\n\n"
            "hint: apt-get install gcc g++ binutils"
        )


def require_nothing_of_nvidia(metadata: Path) -> None:
    """Remove from torch's `metadata` the packages that the emulation replaces: pip would install gigabytes."""
    metadata.write_text(REPLACED.sub("", metadata.read_text()))


def pip_install(folder: Path, *arguments: str | Path) -> None:
    """Install packages in the environment `folder`, DeepSpeed without compiled operators."""
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})


def installed_headers() -> tuple[Path, ...] | None:
    """The folder of headers of an installed CUDA toolkit."""
    homes = [Path(text) for text in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if text]
    for home in homes:
        if all((home / "include" / header).exists() for header in HEADERS):
            return (home / "include",)
    return None


def downloaded_headers(scratch: Path) -> tuple[Path, ...]:
    """The folders of headers in NVIDIA's packages, unpacked into `scratch`.

    Raises:
        SetUpError: they cannot be had, or do not hold what is needed.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", scratch, *HEADER_PACKAGES], check=False)
    folders = tuple(sorted({found.parent for found in scratch.rglob("include/*.h")}))
    missing = [header for header in HEADERS if not any((folder / header).exists() for folder in folders)]
    if done.returncode or missing:
        raise SetUpError(
            f"error: CUDA's headers not found: {', '.join(missing)}\n"
            f"  because neither CUDA_HOME nor /usr/local/cuda has them, nor do {', '.join(HEADER_PACKAGES)}\n\n"
            "hint: install CUDA 13's toolkit and set CUDA_HOME to it"
        )
    return folders


def install_answers(site: Path) -> None:
    """Have each process of the environment import `answers` once it imports DeepSpeed."""
    for name, source in {"emulated_gpu_answers": "answers.py", "emulated_gpu_late_answers": "late_answers.py"}.items():
        new = site / f"{name}.py.new"
        new.write_text((HERE / source).read_text())
        new.rename(site / f"{name}.py")
    (site / "emulated_gpu.pth").write_text("import emulated_gpu_late_answers\n")


if __name__ == "__main__":
    main()
