"""`python -m bench.emulated_gpu.setup`: a virtual environment whose torch finds emulated CUDA cards.

It gets torch's CUDA build (527 MB) without NVIDIA's packages, its Triton (190 MB), everything else in the versions of
`constraints.txt`, and the emulated libraries, compiled here in seconds. `--liger` adds Liger's kernels, which the tiled
loss then takes. It needs gcc, g++ and nm, and CUDA's headers: of an installed toolkit
(CUDA_HOME, /usr/local/cuda), else from NVIDIA's packages. A second call brings both up to date.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from bench.emulated_gpu.environment import FOLDER, ROOT
from bench.emulated_gpu.libraries import build

TORCH = "torch===2.13.0"
"""Arbitrary equality: a local version such as 2.13.0+cpu is not meant."""

LIGER = "liger-kernel==0.8.5"

HEADER_PACKAGES = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
HERE = Path(__file__).parent
REPLACED = re.compile(r"nvidia|cuda|triton")
"""Packages that the emulation replaces, or that are installed apart."""

INSTALLED_APART = {"frugal-trainer", "torch", "deepspeed"}


class SetUpError(Exception):
    """Something that set-up needs is missing; the message says what, why and what to do."""


def main() -> None:
    """Set up, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of the environment  [default: {FOLDER.name}]")
    parser.add_argument("--liger", action="store_true", help="also Liger's kernels")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    try:
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
    check_tools()
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install_packages(folder, [LIGER] if with_liger else [])
    site = next(folder.glob("lib/python3.*/site-packages"))
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


def requirements() -> list[str]:
    """Every package that the project's own environment has for frugal, pinned to the version it has there.

    They are installed one by one without what they depend on, as that would be NVIDIA's packages.

    Raises:
        SetUpError: this process does not run in that environment.
    """
    installed = {_plain(each.metadata["Name"]): each for each in distributions()}
    if not {"frugal-trainer", "peft"} <= installed.keys():
        raise SetUpError(
            "error: this Python does not have frugal and its packages\n  because their versions are taken from it\n\n"
            "hint: make emulated"
        )
    versions: dict[str, str] = {}
    waiting = ["frugal-trainer", "peft", "setuptools", "wheel", "ninja"]
    while waiting:
        name = waiting.pop()
        if name in versions or name not in installed or REPLACED.match(name):
            continue
        versions[name] = installed[name].version
        lines = [line for line in installed[name].requires or [] if "extra ==" not in line]
        waiting += [_plain(re.split(r"[^\w.-]", line)[0]) for line in lines]
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in INSTALLED_APART]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def install_packages(folder: Path, more: list[str]) -> None:
    """torch's CUDA build and its Triton, DeepSpeed without compiled operators, what they need, `more`, and frugal."""
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    deepspeed = _pinned("deepspeed")
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    subprocess.run([*pip, *requirements()], check=True)
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, triton_of_torch(folder), *more], check=True)
    subprocess.run([*pip, "--no-build-isolation", deepspeed], check=True, env=environment)
    subprocess.run([*pip, "--no-build-isolation", "-e", ROOT], check=True)


def triton_of_torch(folder: Path) -> str:
    """The Triton that the environment's torch was made for, pinned, as torch's wheel requires it."""
    metadata = next(folder.glob("lib/python3.*/site-packages/torch-*.dist-info/METADATA")).read_text()
    return re.findall(r"^Requires-Dist: (triton==[\d.]+)", metadata, re.MULTILINE)[0]


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


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
