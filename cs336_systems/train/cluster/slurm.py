"""Batch scripts for Slurm: one torchrun for each node, a stop with a checkpoint before the time limit, and a requeue.

The signal before the time limit goes to the batch shell alone (`B:`), which passes it on as SIGUSR1 through srun. srun
itself would take SIGTERM as an order to kill its tasks. torchrun ends with exit code 1 whatever its ranks ended with,
so the script remembers that it was asked to stop.
"""

from cs336_systems.train.cluster.job import PORTS, Job

SCRIPT = """\
#!/bin/bash
# Submit: sbatch FILE. Stop with a checkpoint: scancel --batch --signal=USR1 JOB requeues it, scancel JOB does not.
{directives}

{environment}

set -u -o pipefail
# The first node, where this script runs, hosts the rendezvous, on a port that nothing listens on.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{nodes%%$'\\n'*}}
attempt=${{SLURM_RESTART_COUNT:-0}}
port=$(({port} + (SLURM_JOB_ID + attempt) % {ports}))
while (exec 3<> "/dev/tcp/$first/$port") 2> /dev/null; do port=$((port + 1)); done

# Before the time limit: let the ranks end their step and save.
stopped=0
step=
trap 'stopped=1; [ -z "$step" ] || kill -USR1 "$step"' USR1
# Slurm has sent it to the ranks, too: wait for their save.
trap : TERM

# Nodes may end seconds apart: the last ones are still saving.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait}{container} \\
    {torchrun} &
step=$!
[ "$stopped" -eq 0 ] || kill -USR1 "$step"  # the signal came before srun had a number
while wait "$step"; code=$?; kill -0 "$step" 2> /dev/null; do :; done  # a trap ends a wait
[ "$stopped" -eq 0 ] || {{ wait "$step"; code=$?; }}  # the exit code of srun, not of the trap

if [ "$stopped" -eq 1 ] && [ "$code" -ne 0 ]; then
    if [ "$attempt" -lt {requeues} ]; then
        echo "stopped before the time limit; requeued, and cs336 train resumes"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "stopped after {requeues} requeues; sbatch this script again to go on"
    fi
    exit 75
fi
exit "$code"
"""


def script(job: Job) -> str:
    """Return the batch script."""
    flags = job.flags
    torchrun = job.torchrun(
        nodes='"$SLURM_NNODES"',
        endpoint='"$first:$port"',
        identifier='"$SLURM_JOB_ID-$attempt"',
        indent=" " * 8,
    )
    container = (
        f" --container-image={flags.image} --container-mounts={flags.mount}:{flags.mount}" if flags.image else ""
    )
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH --{directive}" for directive in _directives(job)),
        environment=job.environment(),
        port=PORTS.start,
        ports=len(PORTS),
        wait=flags.stop_before,
        container=container,
        torchrun=torchrun,
        requeues=flags.requeues,
    )


def _directives(job: Job) -> list[str]:
    flags = job.flags
    return [
        f"job-name={flags.name}",
        *([f"partition={flags.partition}"] if flags.partition else []),
        *([f"account={flags.account}"] if flags.account else []),
        f"nodes={flags.nodes}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={flags.gpus_per_node}"] if flags.gpus_per_node else []),
        f"cpus-per-task={job.cpus_per_node}",
        f"time={flags.time}",
        f"signal=B:USR1@{flags.stop_before}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.log",
    ]
