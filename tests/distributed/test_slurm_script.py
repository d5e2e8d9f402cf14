"""The batch script of `cs336 launch --slurm`, run with stand-ins of Slurm's programs on two "nodes" of this machine."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.train_cases import Run, fields, losses_of, perform, text_of
from tests.forked_python import Interpreter
from tests.helpers import Marked, exit_code, wait_until

pytestmark = pytest.mark.xdist_group("ranks")
HANG = 280.0
STEPS = 60

STAND_INS = {
    # One job: starts the script, and starts it again for as long as it has asked for that.
    "sbatch": """
export SLURM_JOB_ID={job} SLURM_NNODES=2 SLURM_JOB_NODELIST='localhost,localhost' SLURM_RESTART_COUNT=0
while :; do
    rm -f {folder}/requeued
    bash "$1" &
    echo $! > {folder}/batch.pid
    wait $!
    code=$?
    [ -e {folder}/requeued ] || exit $code
    SLURM_RESTART_COUNT=$((SLURM_RESTART_COUNT + 1))
done
""",
    # A task for each node; signals other than SIGTERM are passed on to the tasks.
    "srun": """
while [[ $1 == --* ]]; do shift; done
tasks=()
trap 'kill -USR1 "${{tasks[@]}}"' USR1
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & tasks+=($!); done
worst=0
for task in "${{tasks[@]}}"; do
    while wait "$task"; code=$?; kill -0 "$task" 2> /dev/null; do :; done
    wait "$task" || worst=$?
done
exit $worst
""",
    "scontrol": """
case "$1 $2" in
    "show hostnames") tr , '\\n' <<< "$3" ;;
    "requeue {job}") touch {folder}/requeued ;;
    *) exit 1 ;;
esac
""",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Path]:
    """A folder with the stand-ins in `bin`, a forked Python among them, and data in a file whose name needs quoting."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "bin").mkdir()
    job = random.SystemRandom().randrange(1, 1 << 30)  # the port is derived from it
    for name, text in STAND_INS.items():
        path = folder / "bin" / name
        path.write_text("#!/bin/bash" + text.format(folder=folder, job=job))
        path.chmod(0o755)
    (folder / "it's $HOME.txt").write_bytes(text_of(5000))
    with Interpreter(folder / "bin"):
        yield folder


def settings_of(output: Path) -> dict[str, Any]:
    return fields(output, data="it's $HOME.txt", steps=STEPS, parallel="ddp", save_every=1000)


def submitted(cluster: Path, output: Path) -> Marked:
    """Start the job in the background."""
    words = [word for name, value in settings_of(output).items() for word in (f"--{name}", str(value))]
    launch = ["launch", "--slurm", "--nodes=2", "--gpus_per_node=0", "--cpus_per_rank=1", "--stop_before=60"]
    assert exit_code([*launch, "-o", str(cluster / "job.sh"), "--", "train", *words]) == 0
    variables = {"PATH": f"{cluster / 'bin'}:{os.environ['PATH']}", "PYTHON_EXEC": str(cluster / "bin" / "python")}
    return Marked([str(cluster / "bin" / "sbatch"), str(cluster / "job.sh")], cluster, cluster / "log", **variables)


@pytest.mark.slow
def test_a_job_that_is_stopped_and_requeued_trains_to_the_end(cluster, rank_groups):
    """With the losses of a run that nothing has stopped, of two ranks as well."""
    whole, stopped = cluster / "whole", cluster / "a stopped run"
    rank_groups.call(2, perform, Run(settings_of(whole)))
    job = submitted(cluster, stopped)
    try:
        assert wait_until(lambda: job.said("step 2/") or job.ended, HANG)
        os.kill(int((cluster / "batch.pid").read_text()), signal.SIGUSR1)
        assert wait_until(lambda: job.ended, HANG)
        log = job.log.read_text()
        assert job.process.returncode == 0, log[-3000:]
        assert log.count("requeued, and cs336 train resumes") == log.count("resumed at step") == 1
        assert losses_of(stopped) == losses_of(whole)
        assert len(losses_of(stopped)) == STEPS
        assert not job.alive()
    finally:
        for pid in job.alive():
            os.kill(pid, signal.SIGKILL)
