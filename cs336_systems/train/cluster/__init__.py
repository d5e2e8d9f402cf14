"""Scripts that start `cs336 train` on a cluster: Slurm, Kubernetes, SkyPilot."""
