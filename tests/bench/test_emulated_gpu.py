"""Emulated GPUs, as far as torch's CPU build can check them: the cards, the sources, memory and collectives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.emulated_gpu import environment, libraries, setup
from bench.emulated_gpu.cards import CARDS, EmulatedCard, c_table
from frugal.config.hardware import cluster

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
NEED_HEADERS = {"driver.c", "cudart.c", "modules.c"}

FULL_CARD = """
import ctypes, sys
device = ctypes.CDLL(sys.argv[1])
device.emu_free_bytes.restype = ctypes.c_size_t
blocks = []
while True:
    block = ctypes.c_void_p()
    error = device.emu_malloc(0, ctypes.c_size_t(1 << 30), ctypes.byref(block))
    if error:
        break
    blocks.append(block)
print(error, len(blocks), device.emu_free_bytes(0) >> 20)
device.emu_free(blocks[1])
again = ctypes.c_void_p()
print(device.emu_malloc(0, ctypes.c_size_t(1 << 30), ctypes.byref(again)), again.value == blocks[1].value)
"""

RANK = """
import ctypes, os, sys
nccl, key, rank, world, ends = ctypes.CDLL(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
comm = ctypes.c_void_p()
assert nccl.ncclCommInitRank(ctypes.byref(comm), world, Id(key.encode()), rank) == 0
def all_reduce(kind, number, values, operation):
    data = (kind * len(values))(*values)
    size = ctypes.c_size_t(len(values))
    error = nccl.ncclAllReduce(data, data, size, number, operation, comm, None)
    return error or list(data)
def all_gather(values):
    data, every = (ctypes.c_int64 * len(values))(*values), (ctypes.c_int64 * (world * len(values)))()
    return nccl.ncclAllGather(data, every, ctypes.c_size_t(len(values)), 4, comm, None) or list(every)
sums, largest = all_reduce(ctypes.c_int64, 4, [rank, 7], 0), all_reduce(ctypes.c_float, 7, [rank + 0.5], 2)
print(sums, largest, all_gather([rank, -rank]), flush=True)
if ends == "one ends" and rank == 1:
    os._exit(0)
print(all_reduce(ctypes.c_uint8, 1, [rank + 3], 3))
"""


LAUNCHES = """
import ctypes, sys
driver, twice, once = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p(), ctypes.c_void_p()
for function, name in ((twice, b"twice"), (once, b"once")):
    assert driver.cuModuleGetFunction(ctypes.byref(function), None, name) == 0
for function in (twice, once, twice):
    assert driver.cuLaunchKernel(function, *[1] * 6, 0, None, None, None) == 0
driver.emu_stub(b"cublasGemmEx"), driver.emu_stub(b"cublasSetStream_v2")
driver.emulated_gpu_kernels(sys.argv[2].encode())
driver.cuLaunchKernelEx(None, once, None, None)
"""


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.key)
def test_a_card_is_the_one_that_is_planned_for(card: EmulatedCard) -> None:
    planned = cluster.CARDS[card.frugal_name]
    assert card.memory_bytes == pytest.approx(planned.memory_bytes, rel=0.01)
    assert (card.capability >= (8, 0)) == planned.has_bf16
    assert cluster.recognise_card(card.driver_name, card.memory_bytes) == card.frugal_name


def test_a_process_gets_its_card_and_no_rank_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made = environment.environment("t4", num_gpus=2, memory_bytes=1 << 30, expandable_segments=False)
    assert [made[f"EMULATED_GPU_{name}"] for name in ("CARD", "COUNT", "MEM")] == ["t4", "2", "1073741824"]
    assert not {"RANK", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & made.keys()
    assert environment.environment("t4", expandable_segments=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    with pytest.raises(ValueError, match="not 1 of rtx1"):
        environment.environment("rtx1")


def test_what_lacks_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        environment.NotSetUpError, match=f"hint: python -m bench.emulated_gpu.setup --folder {tmp_path}"
    ):
        environment.python(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "g++" else f"/usr/bin/{tool}")
    with pytest.raises(setup.SetUpError, match=r"(?s)error: g\+\+ not found\n.*hint: apt-get install gcc g\+\+"):
        setup.check_tools()


def test_torch_requires_its_triton_but_nothing_of_nvidia(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text(METADATA)
    setup.require_nothing_of_nvidia(tmp_path / "METADATA")
    left = [line for line in METADATA.splitlines() if "nvidia" not in line.lower() and "cuda-" not in line]
    assert (tmp_path / "METADATA").read_text().splitlines() == left and len(left) == 4


METADATA = """Name: torch
Requires-Dist: filelock
Requires-Dist: cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"
Requires-Dist: cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"
Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"
Requires-Dist: triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"
Requires-Dist: sympy>=1.13.3
"""
"""Lines of torch 2.15's."""

SOURCES = sorted(
    (source, soname.split(".")[0].removeprefix("lib"))
    for soname, (_, sources) in libraries.LIBRARIES.items()
    for source in sources
)


@needs_compiler
@pytest.mark.parametrize(("source", "macro"), SOURCES)
def test_a_source_compiles(source: str, macro: str, tmp_path: Path) -> None:
    headers = setup.installed_headers() if source in NEED_HEADERS else ()
    if headers is None:
        pytest.skip("no CUDA headers here")
    (tmp_path / "cards.inc").write_text(c_table())
    include = [f"-I{folder}" for folder in (*headers, tmp_path)]
    libraries.compile_source(libraries.SOURCE / source, macro, include, tmp_path / "out.o")
    assert (tmp_path / "out.o").exists()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Memory and collectives of the emulation in one library."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    folder = tmp_path_factory.mktemp("library")
    (folder / "cards.inc").write_text(c_table())
    objects = []
    for source in ("device.c", "nccl.c"):
        objects.append(str(folder / f"{source}.o"))
        libraries.compile_source(libraries.SOURCE / source, "nccl", [f"-I{folder}"], Path(objects[-1]))
    path = folder / "libboth.so"
    subprocess.run(["gcc", "-shared", "-o", path, *objects, "-lpthread"], check=True)
    return path


def test_a_card_is_full_when_its_memory_less_the_context_is_taken(library: Path) -> None:
    made = environment.environment("rtx3060", memory_bytes=4 << 30)
    done = subprocess.run(
        [sys.executable, "-c", FULL_CARD, library], env=made, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["2 3 524", "0 True"]  # 4 GiB, less 500 MiB and 3 GiB


@needs_compiler
@pytest.mark.skipif(setup.installed_headers() is None, reason="no CUDA headers here")
def test_launches_of_compiled_kernels_and_of_libraries_are_counted_by_name(tmp_path: Path) -> None:
    (tmp_path / "cards.inc").write_text(c_table())
    objects = [tmp_path / f"{source}.o" for source in ("device.c", "modules.c")]
    for source in objects:
        include = [f"-I{folder}" for folder in (*(setup.installed_headers() or ()), tmp_path)]
        libraries.compile_source(libraries.SOURCE / source.stem, "cuda", include, source)
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "driver.so", *objects, "-lpthread"], check=True)
    made = environment.environment("a100-80g", kernels=tmp_path / "end")
    subprocess.run([sys.executable, "-c", LAUNCHES, tmp_path / "driver.so", tmp_path / "now"], env=made, check=True)
    said = [(tmp_path / name).read_text().splitlines() for name in ("now", "end")]
    assert said == [["2 compiled:twice", "1 compiled:once", "1 library:cublasGemmEx"], ["1 compiled:once"]]


@pytest.mark.parametrize("ends", ["", "one ends"])
def test_ranks_exchange_small_values_and_learn_that_one_has_ended(library: Path, ends: str) -> None:
    key, made = f"test{os.getpid()}{bool(ends):d}", environment.environment("t4", num_gpus=3)
    command = [sys.executable, "-c", RANK, str(library), key]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", ends], env=made, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    exchanged, remote_error = "[3, 21] [2.5] [0, 0, 1, -1, 2, -2]", "6"
    expected = [[exchanged, remote_error if ends else "[3]"]] * 3
    if ends:
        expected[1] = [exchanged]
    assert said == expected
    command[-1:] = ["", "2", "4", ""]  # without an identifier it is alone among its twins
    alone = subprocess.run(command, env=made | {"EMULATED_GPU_COUNT": "4"}, capture_output=True, text=True, check=True)
    assert alone.stdout.splitlines() == ["[8, 28] [2.5] [2, -2, 2, -2, 2, -2, 2, -2]", "[5]"]
