"""A GPU without the memory of earlier tests."""

import gc

import pytest
import torch


@pytest.fixture
def clean_gpu():
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
