"""The batch script of `cs336 launch --slurm`, run with stand-ins of Slurm's programs on two "nodes" of this machine."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from cs336_systems import record
from tests.distributed.train_cases import fields, text_of
from tests.helpers import Marked, exit_code, wait_until

pytestmark = pytest.mark.xdist_group("ranks")
HANG = 280.0
STEPS = 300

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
def cluster(tmp_path_factory) -> Path:
    """A folder with the stand-ins in `bin`, and data in a file whose name needs quoting."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "bin").mkdir()
    job = random.SystemRandom().randrange(1, 1 << 30)  # the port is derived from it
    for name, text in STAND_INS.items():
        path = folder / "bin" / name
        path.write_text("#!/bin/bash" + text.format(folder=folder, job=job))
        path.chmod(0o755)
    (folder / "it's $HOME.txt").write_bytes(text_of(5000))
    return folder


def submitted(cluster: Path, output: Path) -> Marked:
    script = cluster / f"{output.name}.sbatch"
    settings = fields(output, data="it's $HOME.txt", steps=STEPS, parallel="ddp", save_every=1000, rank_timeout=60)
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    launch = ["launch", "--slurm", "--nodes=2", "--gpus_per_node=0", "--cpus_per_rank=1", "--stop_before=60"]
    assert exit_code([*launch, "-o", str(script), "--", "train", *words]) == 0
    path = f"{cluster / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Marked(
        [str(cluster / "bin" / "sbatch"), str(script)], cluster, log=cluster / f"{output.name}.log", PATH=path
    )


def losses(output: Path) -> list[tuple[int, float]]:
    records = record.load(str(output)).records
    return [pair for one in records if one.metric == "loss" for pair in enumerate(one.samples)]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_requeued_is_the_undisturbed_one(cluster):
    whole, stopped = cluster / "whole run", cluster / "stopped"
    job = submitted(cluster, whole)
    assert wait_until(lambda: job.ended, HANG)
    assert job.process.returncode == 0, job.log.read_text()[-3000:]

    job = submitted(cluster, stopped)
    assert wait_until(lambda: job.said("step 2") or job.ended, HANG)
    os.kill(int((cluster / "batch.pid").read_text()), signal.SIGUSR1)
    assert wait_until(lambda: job.ended, HANG)
    log = job.log.read_text()
    assert job.process.returncode == 0, log[-3000:]
    assert log.count("stopped before the time limit; requeued") == 1
    assert losses(stopped) == losses(whole)
    assert not job.alive()
