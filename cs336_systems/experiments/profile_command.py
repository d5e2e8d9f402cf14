"""`cs336 profile` records kernels and memory of a step."""

import sys
from dataclasses import dataclass, replace

from cs336_systems.config import RunConfig, UserError, flag, flag_like, nearest
from cs336_systems.experiments.catalogue import Request, catalogue
from cs336_systems.experiments.kernels.kernel_time import KERNELS
from cs336_systems.experiments.session import SessionArguments, new_run_file, require_runnable, run_session
from cs336_systems.predict.model_flags import OWN_MODEL, ShapeArguments
from cs336_systems.record import output_file


def _profiles() -> list[str]:
    """Return the names of the experiments that are part of a profile."""
    return [name for name, experiment in catalogue().items() if experiment.profile is not None]


@dataclass(frozen=True)
class ProfileArguments(SessionArguments, ShapeArguments):
    model: str | None = flag(None, OWN_MODEL, excludes=("attention", "checkpoint_blocks"))
    compile: bool = flag_like(RunConfig, "compile")
    fast: str = flag_like(RunConfig, "fast")
    nsys: bool = flag(False, "kernels by Nsight Systems instead of torch.profiler, where it is installed")
    only: tuple[str, ...] = flag((), f"only these of {', '.join(_profiles())}")
    output: str | None = flag(
        None,
        "folder for records.jsonl, figures/ and files/ (traces, timelines), or a .jsonl file in it; cells that it "
        "already holds are not run again (default: under runs/)",
    )


def run_profile(arguments: ProfileArguments) -> int:
    """Measure the profiles asked for, show them, and return the exit code."""
    from cs336_systems.measure.readers.nsys import find_nsys

    wanted = arguments.only or tuple(_profiles())
    for name in wanted:
        if name not in _profiles():
            raise UserError(f"--only {name!r}{nearest(name, _profiles())}; choose from: {', '.join(_profiles())}")
    if arguments.nsys and KERNELS.name not in wanted:
        raise UserError(f"--nsys records kernels, and --only {','.join(wanted)} leaves them out; drop one of the two")
    if arguments.peak_tflops is not None:
        raise UserError("--peak_tflops is for MFU, which a profile does not show; leave it out")
    by_nsys = arguments.nsys and find_nsys() is not None
    if arguments.nsys and not by_nsys:
        print("nsys is not installed, or not on PATH: using torch.profiler", file=sys.stderr)

    def requests_on(device: str, gpu_memory: int | None) -> list[Request]:
        run = _without_graph(_configured(arguments, device))
        require_runnable(run)
        requests = []
        for name in wanted:
            check = catalogue()[name].profile
            reason = check(run) if check else None
            if reason is None:
                own = {"profiler": "nsys"} if by_nsys and name == KERNELS.name else {}
                requests.append((name, {**run.to_dict(), **own}))
            elif name in arguments.only:
                raise UserError(f"--only {','.join(arguments.only)}: {reason}")
        return requests

    requests_on(arguments.device or "cuda", None)  # reports mistakes before a process is started
    path = output_file(arguments.output) if arguments.output else new_run_file("profile")
    return run_session(arguments, path, requests_on).code


def _configured(arguments: ProfileArguments, device: str) -> RunConfig:
    return arguments.run_config(
        default_size="small" if device.startswith("cuda") else "tiny",
        device=device,
        model_factory=arguments.model,
        compile=arguments.compile,
        fast=arguments.fast,
        warmup_steps=arguments.warmup_steps,
        num_steps=RunConfig.num_steps if arguments.num_steps is None else arguments.num_steps,
    )


def _without_graph(run: RunConfig) -> RunConfig:
    """Return the run without CUDA graphs, whose kernels cannot be attributed to a phase, module or line."""
    if "graph" not in run.fast_parts:
        return run
    return replace(run, fast=",".join(run.fast_parts - {"graph"}) or "off")
