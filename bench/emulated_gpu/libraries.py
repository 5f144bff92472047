"""Compile the emulated CUDA libraries and put them where a virtual environment's torch looks for CUDA's.

What torch needs to know of is written by hand, in `source/`. Every other symbol that its libraries import from CUDA's
becomes a stub that returns 0. Which those are, torch's own libraries say (`nm`).
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

from bench.emulated_gpu.cards import c_table

SOURCE = Path(__file__).parent / "source"

LIBRARIES = {
    "libcuda.so.1": (
        r"cuMemset\w*|cu(Init|Driver|Device|Ctx|Get|Mem|Module|Link|Func|Launch|Occupancy|Pointer|Tensor|Stream"
        r"|Multicast|Green|Dev|Kernel|Library|Event)[A-Z0-9]\w*|cuInit",
        ("device.c", "driver.c", "modules.c"),
    ),
    "libcudart.so.13": (r"cuda[A-Z]\w*|__cuda\w*", ("cudart.c",)),
    "libcublas.so.13": (r"cublas(?!Lt)\w*", ("libraries.c",)),
    "libcublasLt.so.13": (r"cublasLt\w*", ("libraries.c",)),
    "libcudnn.so.9": (r"cudnn\w*", ("cudnn.c",)),
    "libnccl.so.2": (r"nccl\w*", ("nccl.c",)),
    "libnvrtc.so.13": (r"nvrtc\w*", ("libraries.c",)),
    "libcufft.so.12": (r"cufft\w*", ("libraries.c",)),
    "libcusparse.so.12": (r"cusparse(?!Lt)\w*", ()),
    "libcusparseLt.so.0": (r"cusparseLt\w*", ()),
    "libcusolver.so.12": (r"cusolver\w*", ()),
    "libcurand.so.10": (r"curand\w*", ()),
    "libcufile.so.0": (r"cuFile\w*", ()),
    "libcupti.so.13": (r"cupti\w*", ()),
    "libnvshmem_host.so.3": (r"nvshmem\w*", ("libraries.c",)),
}
"""By soname: its symbols, where torch does not name a version, and its sources. libcuda.so.1 has to be the first."""

ASKED_BY_NAME = (
    "cuCtxFromGreenCtx",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSetCurrent",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAddressRange",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemsetD32Async",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuStreamWriteValue32",
)
"""Of the driver, which torch looks up with cudaGetDriverEntryPointByVersion and does not import."""

STUB = """extern void emu_stub(const char *);
#define S(n) __attribute__((visibility("default"))) long n(void) { emu_stub(#n); return 0; }
"""


def build(site: Path, headers: tuple[Path, ...], scratch: Path) -> list[str]:
    """Compile all libraries for the torch in the `site` folder of packages; a line on each. `scratch` may be kept."""
    target = site / "nvidia" / "cu13" / "lib"
    target.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "cards.inc").write_text(c_table())
    wanted = _wanted(site / "torch" / "lib")
    include = [f"-I{folder}" for folder in (*headers, scratch)]
    told = []
    for soname, (_, sources) in LIBRARIES.items():
        own, stubs = _library(soname, sources, wanted[soname], include, scratch, target)
        told.append(f"{soname}: {own} functions by hand, {stubs} stubs")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", SOURCE / "nvml.c"]
    _link(command, target / "libnvidia-ml.so.1")
    _tracker(site, include, target)
    return told


def compile_source(source: Path, macro: str, include: list[str], out: Path) -> None:
    """One source into an object file. `macro` says for which of the libraries, as some share a file."""
    options = ["-O1", "-fPIC", "-std=gnu11", "-Wall", "-Wno-unused-parameter", f"-DLIB_{macro}"]
    subprocess.run(["gcc", "-c", *options, *include, "-o", out, source], check=True)


def _library(
    soname: str, sources: tuple[str, ...], wanted: dict[str, str], include: list[str], scratch: Path, target: Path
) -> tuple[int, int]:
    """Compile one; how many functions are written by hand, and how many stubs were made."""
    macro = soname.split(".")[0].removeprefix("lib")
    objects = [scratch / f"{macro}_{Path(source).stem}.o" for source in sources]
    for source, out in zip(sources, objects, strict=True):
        compile_source(SOURCE / source, macro, include, out)
    own = _symbols("--defined-only", "--extern-only", *objects) if objects else set()
    stubs = sorted(set(wanted) - own)
    stub_source = scratch / f"{macro}_stubs.c"
    stub_source.write_text(STUB + "".join(f"S({name})\n" for name in stubs))
    command = ["gcc", "-shared", "-O1", "-fPIC", "-w", f"-Wl,-soname,{soname}"]
    if versions := sorted({version for version in wanted.values() if version}):
        script = scratch / f"{macro}.map"
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
        command.append(f"-Wl,--version-script={script}")
    command += [*map(str, objects), str(stub_source), "-ldl", "-lpthread"]
    if soname != "libcuda.so.1":
        command += [str(target / "libcuda.so.1"), "-Wl,-rpath,$ORIGIN"]
    _link(command, target / soname)
    return len(own & set(wanted)), len(stubs)


def _tracker(site: Path, include: list[str], target: Path) -> None:
    torch = site / "torch"
    command = ["g++", "-shared", "-std=c++20", "-O1", "-fPIC", "-w", f"-I{torch}/include", *include]
    command += [SOURCE / "tracker.cpp", target / "libcuda.so.1"]
    command += [torch / "lib" / "libc10_cuda.so", torch / "lib" / "libc10.so"]
    _link(command, target / "libemulated_gpu_tracker.so")


def _link(command: list, path: Path) -> None:
    """Run it with an output of its own, then rename: a process that has the old library open keeps it."""
    new = path.with_name(path.name + ".new")
    subprocess.run([*command, "-o", new], check=True)
    new.rename(path)


def _wanted(torch_lib: Path) -> dict[str, dict[str, str]]:
    """By soname the symbols that torch's libraries import, each with its version (empty: none)."""
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    for name, version in (_imported(torch_lib) | dict.fromkeys(ASKED_BY_NAME, "")).items():
        for soname, (pattern, _) in LIBRARIES.items():
            if version == soname or (version in ("", "NVSHMEM") and re.fullmatch(pattern, name)):
                wanted[soname][name] = version
                break
    return wanted


def _imported(torch_lib: Path) -> dict[str, str]:
    """Version by symbol that torch's libraries leave to others."""
    imported: dict[str, str] = {}
    for library in sorted(torch_lib.glob("*.so")):
        for symbol in _symbols("-D", "--undefined-only", library):
            name, _, version = symbol.partition("@")
            imported[name] = version.lstrip("@") or imported.get(name, "")
    return imported


def _symbols(*arguments: str | Path) -> set[str]:
    text = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in text.splitlines() if line and not line.endswith(":")}
