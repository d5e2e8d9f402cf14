"""Fills in an `Environment` from torch, NVML, git and the operating system."""

import contextlib
import datetime
import hashlib
import os
import platform
import socket
import subprocess
import timeit
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cs336_systems.record import Environment, Metric

_THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal (software)",
    0x0000000000000040: "thermal (hardware)",
    0x0000000000000080: "power brake",
}


def capture(device: str | None = None) -> Environment:
    """Return the environment of this machine with the GPU of `device`, or the first one. Clocks and other processes on
    the GPU are sampled once."""
    values: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _host_memory(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_git(),
    }
    if torch.cuda.is_available():
        values.update(_gpu(torch.device(device or "cuda").index or 0))
    return Environment(**values)


def _version(module: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "gpu_memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        **_nvml(index),
    }


class GpuSensor(NamedTuple):
    """Clock and power of a GPU as NVML reads them."""

    nvml: Any
    handle: Any

    def clock(self) -> float:
        """Return the clock of the SMs over its maximum."""
        now = self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
        return now / self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)

    def watts(self) -> float:
        return self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3

    def power_limit(self) -> float:
        """Return the limit in watts."""
        return self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3


@contextlib.contextmanager
def nvml_device(device: torch.device) -> Iterator[GpuSensor | None]:
    """Open NVML for a GPU; None where there is none."""
    try:
        import pynvml as nvml
    except ImportError:
        nvml = None
    if nvml is None or device.type != "cuda":
        yield None
        return
    with contextlib.ExitStack() as stack:
        sensor = None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            stack.callback(nvml.nvmlShutdown)
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            sensor = GpuSensor(nvml, nvml.nvmlDeviceGetHandleByUUID(name))
        yield sensor


def _nvml(index: int) -> dict[str, Any]:
    """Return driver, clocks, throttling and other processes on the GPU, as far as NVML can tell."""
    values: dict[str, Any] = {}
    with nvml_device(torch.device("cuda", index)) as sensor:
        if sensor is not None:
            with contextlib.suppress(sensor.nvml.NVMLError):
                _read(sensor, values)
    return values


def _read(sensor: GpuSensor, values: dict[str, Any]) -> None:
    """Add NVML's readings to `values`, up to the first one that is not available."""
    nvml, handle = sensor
    values["driver"] = nvml.nvmlSystemGetDriverVersion()
    values["sm_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    values["sm_clock_max_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    values["throttle_reasons"] = tuple(name for bit, name in _THROTTLE_REASONS.items() if reasons & bit)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    values["other_gpu_processes"] = sum(process.pid != os.getpid() for process in processes)


def _git() -> dict[str, Any]:
    """Return the commit of this package's checkout, or CS336_GIT_COMMIT for a tree without .git."""
    if commit := os.environ.get("CS336_GIT_COMMIT"):
        return {"git_commit": commit, "git_dirty": False}
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}

    def git(*arguments: str) -> str:
        # A copied or mounted tree may belong to another user; reading its commit is safe nevertheless.
        command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def measure_slowdown(config: Mapping[str, Any]) -> list[Metric]:
    """Measure how many times longer than in fp32 a matmul takes in low precision on this CPU (an instrument of quick
    runs).

    A CPU without instructions for a type emulates it, hundreds of times slower. It takes the minimum over many runs of
    one thread: on a busy machine threads wait for each other, which hides the difference.
    """

    def seconds(dtype: torch.dtype, repeat: int) -> float:
        a = torch.ones(128, 128, dtype=dtype)
        return min(timeit.repeat(lambda: a @ a, number=1, repeat=repeat))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            Metric(precision, "1", [seconds(getattr(torch, name), 4) / seconds(torch.float32, 20)])
            for precision, name in (("bf16", "bfloat16"), ("fp16", "float16"))
        ]
    finally:
        torch.set_num_threads(threads)


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or None


def _host_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
