"""Descriptions in YAML: an indexed Job with its Service for Kubernetes, a task for SkyPilot."""

import re
from typing import Any

from cs336_systems.train.cluster.job import PORTS, RENTED, Job
from cs336_systems.train.cluster.yaml_text import dump

COME_WITHIN = 1800
"""Seconds in which all machines must join the rendezvous: images are pulled first."""
RENDEZVOUS = (f"--rdzv-conf=join_timeout={COME_WITHIN},read_timeout={COME_WITHIN}",)


def kubernetes(job: Job) -> str:
    """Return a headless Service, which gives pods their names, and an indexed Job with one pod for each machine.

    A pod that is deleted or evicted gets SIGTERM, which torchrun passes on, and as long to save as it needs to.
    """
    flags = job.flags
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": flags.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": flags.name},
        },
    }
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": flags.name},
        "spec": {
            "completions": flags.nodes,
            "parallelism": flags.nodes,
            "completionMode": "Indexed",
            "backoffLimit": flags.nodes * flags.requeues,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}],
            },
            "activeDeadlineSeconds": job.seconds,
            "template": {"metadata": {"labels": {"app": flags.name}}, "spec": _pod(job)},
        },
    }
    return f"# Start: kubectl apply -f FILE\n{dump(service)}---\n{dump(work)}"


def _pod(job: Job) -> dict[str, Any]:
    flags = job.flags
    # Every pod has its own network, so the port is free.
    torchrun = job.torchrun(
        nodes=str(flags.nodes),
        endpoint=f"{flags.name}-0.{flags.name}:{PORTS.start}",
        identifier=flags.name,
        extra=RENDEZVOUS,
    )
    resources: dict[str, Any] = {"cpu": job.cpus_per_node}
    if flags.gpus_per_node:
        resources["nvidia.com/gpu"] = flags.gpus_per_node
    container = {
        "name": "train",
        "image": flags.image,
        # exec: the signal at the pod's end reaches torchrun. Kubernetes itself reads $(NAME) and $$.
        "command": ["/bin/bash", "-c", re.sub(r"\$(?=[$(])", "$$", _shell(job, f"exec {torchrun}"))],
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [{"name": "shared", "mountPath": flags.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "subdomain": flags.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": flags.stop_before,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": flags.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's buffers: a container's own 64 MiB are too few
        ],
    }


def skypilot(job: Job) -> str:
    """Return a task for `sky jobs launch`, which starts it again after a preemption and after failures."""
    flags = job.flags
    resources: dict[str, Any] = {"cpus": f"{job.cpus_per_node}+"}
    if flags.gpus_per_node:
        resources["accelerators"] = f"{flags.gpu or RENTED}:{flags.gpus_per_node}"
    if flags.image:
        resources["image_id"] = f"docker:{flags.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": flags.requeues}
    torchrun = job.torchrun(
        nodes='"$SKYPILOT_NUM_NODES"', endpoint='"$first:$port"', identifier='"$SKYPILOT_TASK_ID"', extra=RENDEZVOUS
    )
    rendezvous = (
        "# The first node hosts the rendezvous; all nodes derive the same port from the name of the task.\n"
        "first=${SKYPILOT_NODE_IPS%%$'\\n'*}\n"
        'sum=$(cksum <<< "$SKYPILOT_TASK_ID")\n'
        f"port=$(({PORTS.start} + ${{sum%% *}} % {len(PORTS)}))\n"
    )
    limit = f"timeout --signal=TERM --kill-after={flags.stop_before} {job.seconds - flags.stop_before}"
    task: dict[str, Any] = {"name": flags.name, "num_nodes": flags.nodes, "resources": resources}
    if flags.volume:
        task["volumes"] = {flags.mount: flags.volume}
    return "# Start: sky jobs launch FILE\n" + dump(
        {**task, "run": _shell(job, f"{rendezvous}exec {limit} {torchrun}")}
    )


def _shell(job: Job, last: str) -> str:
    return f"{job.environment()}\n\nset -u\n{last}\n"
