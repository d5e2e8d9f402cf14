"""Saves of several ranks: what one rank has written is seen by another, and a fault on one rank is the fault of all."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cs336_systems.train.checkpoint import Store
from tests.distributed import checkpoint_cases as cases


def failed_save(store: Store) -> list[str]:
    """Save a checkpoint, which fails on all ranks; return the warnings of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cases.save(store, 1) is None
    return [str(warning.message) for warning in caught]


@pytest.mark.ranks(2, 4)
def test_what_ranks_have_saved_is_loaded(tmp_path):
    """Also shards that are empty: tensors of one row and of three."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(values: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(values, mesh, [Shard(0)])

    whole = {f"{rows} rows": torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)) for rows in (1, 3, 9)}
    whole["vector"] = torch.arange(6.0)
    store = Store(tmp_path / "checkpoints")
    assert store.save({name: sharded(values) for name, values in whole.items()}, cases.tiny_manifest(1)) is not None
    found = Store(tmp_path / "checkpoints").newest()
    assert found is not None
    state = {name: sharded(torch.zeros_like(values)) for name, values in whole.items()}
    store.load(found, state)
    assert all(torch.equal(state[name].full_tensor(), values) for name, values in whole.items())
    store.load(found, plain := {name: torch.zeros_like(values) for name, values in whole.items()})
    assert all(torch.equal(plain[name], values) for name, values in whole.items())


@pytest.mark.ranks(2)
def test_a_folder_that_is_not_shared(tmp_path):
    """Every rank has a disk of its own: no save counts, and nothing is left of it."""
    folder = tmp_path / f"node-{dist.get_rank()}"
    lines = failed_save(Store(folder))
    expected = "rank 0 does not see what rank 1 has written: __1_0.distcp is missing; --output must be on a file system"
    assert [expected in line for line in lines] == ([True] if dist.get_rank() == 0 else [])
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2, 4)
def test_another_rank_hashes_what_a_rank_has_written(tmp_path):
    """A byte changes after it was written and hashed; the size does not."""
    ranks, rank, see = dist.get_world_size(), dist.get_rank(), Store._see
    for victim in range(ranks):

        class Changed(Store):
            def _see(self, folder, hashes):
                if rank == victim:  # noqa: B023 - used in this turn of the loop only
                    file = folder / f"__{rank}_0.distcp"
                    file.write_bytes(file.read_bytes()[:-1] + b"x")
                dist.barrier()
                return see(self, folder, hashes)

        lines = failed_save(Changed(tmp_path / f"{ranks}-{victim}"))
        expected = f"rank {(victim + 1) % ranks} does not see what rank {victim} has written: __{victim}_0.distcp"
        assert [expected in line for line in lines] == ([True] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_a_fault_on_one_rank_is_that_of_all(tmp_path):
    for on, errors in ((1, ("EIO", cases.VANISHED)), (0, ("EIO",))):
        assert cases.saves_with_faults(tmp_path, on, [fault for fault in cases.faults(on) if fault[1] in errors]) == []
