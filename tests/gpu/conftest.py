"""A GPU without the memory of earlier tests."""

import gc

import pytest
import torch


@pytest.fixture
def clean_gpu():
    free_memory()
    torch.manual_seed(0)
    yield
    free_memory()


def free_memory() -> None:
    """Free what earlier tests have left, workspaces of cuBLAS included: peaks count those of a new process."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
