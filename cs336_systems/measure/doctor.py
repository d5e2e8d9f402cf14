"""Checks of this machine: what is present, what is missing, and how to fix it."""

import importlib.util
import shutil
from dataclasses import dataclass

import torch

from cs336_systems.measure.environment import capture
from cs336_systems.measure.readers.nsys import find_nsys
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.record import GIB


@dataclass(frozen=True)
class Finding:
    mark: str
    """"ok", "note" (works with limitations) or "bad"."""
    what: str
    seen: str
    fix: str = ""


def examine() -> list[Finding]:
    triton = (capture().triton or "present") if importlib.util.find_spec("triton") else None
    nvml = "bindings present" if importlib.util.find_spec("pynvml") else None
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    return [
        _torch(),
        _gpu(),
        *_gpu_state(),
        _optional("triton", triton, "pip install triton (Linux); torch.compile on a GPU needs it"),
        _optional("NVML", nvml, "pip install nvidia-ml-py, to record clocks and throttling"),
        _optional("nsys", find_nsys() and "present", "torch.profiler is used instead"),
        _optional("C++ compiler", compiler, "torch.compile on a CPU needs one: apt-get install g++"),
        *_host(),
    ]


def _optional(what: str, seen: str | None, fix: str) -> Finding:
    """Check an optional part; `seen` is None if it is absent."""
    return Finding("ok", what, seen) if seen else Finding("note", what, "absent", fix)


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return Finding("bad", "torch", torch.__version__, "needs 2.11 or newer: pip install -U torch")
    return Finding("ok", "torch", torch.__version__)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("ok", "GPU", f"{len(names)} x {names[0]}")
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return Finding("bad", "GPU", "present, but this torch has no CUDA", "install a CUDA build of torch")
    if shutil.which("nvidia-smi"):
        return Finding("bad", "GPU", "torch cannot reach it", "check nvidia-smi and the driver's version")
    return Finding("note", "GPU", "none", "everything runs on the CPU; `cs336 fit` predicts for a GPU")


def _gpu_state() -> list[Finding]:
    if not torch.cuda.is_available():
        return []
    environment = capture()
    findings = []
    known = peak_flops(environment.gpu, "bf16") or peak_flops(environment.gpu, "fp16")
    if known:
        findings.append(Finding("ok", "dense peak", f"{known / 1e12:.0f} TFLOP/s in half precision"))
    else:
        findings.append(Finding("note", "dense peak", "not known, MFU is N/A", "give it with --peak_tflops"))
    if environment.other_gpu_processes:
        count = environment.other_gpu_processes
        findings.append(
            Finding("note", "other processes", f"{count} on the GPU", "they disturb timings: end them or wait")
        )
    if environment.throttle_reasons:
        reasons = ", ".join(environment.throttle_reasons)
        findings.append(Finding("note", "clocks", f"throttled: {reasons}", "let it cool, check the power limit"))
    free, total = torch.cuda.mem_get_info()
    mark = "ok" if free > 0.9 * total else "note"
    findings.append(Finding(mark, "GPU memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"))
    return findings


def _host() -> list[Finding]:
    environment = capture()
    memory = f"{environment.memory / GIB:.1f} GiB" if environment.memory else "unknown memory"
    free = shutil.disk_usage(".").free
    disk = Finding("ok", "disk", f"{free / GIB:.1f} GiB free")
    if free < GIB:
        disk = Finding("bad", "disk", f"{free / GIB:.2f} GiB free", "records and compile caches need space")
    return [Finding("ok", "CPU", f"{environment.cpu}, {environment.cpu_cores} cores, {memory}"), disk]
