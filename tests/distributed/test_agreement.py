"""Ranks that differ: every rank names the setting, the values and the ranks; a rendezvous that fails names its cause.

Most tests hold the meeting in threads of this process, over a store of torch.
"""

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from cs336_systems.config import UserError
from cs336_systems.flags import build, flat
from cs336_systems.parallel import peers, rendezvous
from cs336_systems.parallel.collectives import together
from cs336_systems.parallel.peers import Peers, RankError, in_background, ranks_named
from cs336_systems.parallel.rendezvous import Entry, Facts, Meeting, Place, join
from cs336_systems.train import agreement
from cs336_systems.train.agreement import VARIABLES, facts_of, read_once_per_host, require_shared
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.token_file import TokenFile
from tests.distributed.train_cases import fields

pytestmark = pytest.mark.xdist_group("ranks")
PATIENCE = 240.0
WORLD = 3


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"a text" * 100)
    return fields(tmp_path / "run", parallel="ddp")


def facts(settings, device="cpu", **changes) -> Facts:
    return facts_of(build(TrainSettings, {**settings, **changes}), device)


def in_threads(work, count=WORLD) -> list[Exception | None]:
    """Call `work(rank)` in a thread for each rank; return what each raised."""

    def outcome(rank):
        try:
            work(rank)
        except (UserError, RankError) as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(outcome, range(count)))


@pytest.fixture
def meet(monkeypatch):
    """Return a function that lets ranks with these facts join through a TCP store, and returns what each raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))

    def begin(each: list[Facts | None], *, timeout=PATIENCE, failures=None, sizes=None):
        stores = []  # kept until all have ended, as a process would keep it

        def work(rank):
            time.sleep(0.05 * min(rank, 1))  # torch waits a second before it tries again to connect
            if each[rank] is not None:
                size = (sizes or {}).get(rank, len(each))
                place = Place(rank, size, rank, size, hosts_store=rank == 0)
                stores.append(join(place, each[rank], timeout, (failures or {}).get(rank, "")))

        return in_threads(work, len(each))

    return begin


# -- settings ---------------------------------------------------------------------------------------------------------

CHANGES = {
    "output": "elsewhere",
    "steps": 9,
    "seed": 1,
    "validation_share": 0.2,
    "batch_size": 12,
    "micro_batch_size": 2,
    "size": "small",
    "vocab_size": 300,
    "context_length": 32,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 1,
    "d_ff": 64,
    "precision": "bf16",
    "attention": "sdpa",
    "checkpoint_blocks": 1,
    "compile": True,
    "fast": "off",
    "optimizer_state": "bf16",
    "learning_rate": 2e-2,
    "final_share": 0.2,
    "warmup_steps": 2,
    "weight_decay": 0.2,
    "beta1": 0.8,
    "beta2": 0.9,
    "max_grad_norm": 2.0,
    "most_skipped": 5,
    "loss_scale_growth": 10,
    "parallel": "fsdp",
    "rank_timeout": 5.0,
    "save_every": 3,
    "async_save": True,
    "keep": 3,
    "keep_every": 5,
    "log_every": 2,
    "tensorboard": True,
    "eval_every": 7,
    "eval_batches": 2,
    "sample_prompt": "another prompt",
    "sample_tokens": 3,
}


@pytest.mark.parametrize("flag", CHANGES)
def test_a_setting_that_differs_on_one_rank_is_named_on_every_rank(flag, settings, meet):
    common, other = facts(settings), facts(settings, **{flag: CHANGES[flag]})
    before, after = common.required[f"--{flag}"], other.required[f"--{flag}"]
    found = meet([common, other, common])
    expected = f"ranks differ in --{flag}: {before} on ranks 0, 2 and {after} on rank 1; "
    assert [str(error) for error in found] == [f"{expected}start all ranks with the same command"] * WORLD
    assert all(isinstance(error, UserError) for error in found)  # exit code 2


def test_every_flag_is_compared(settings):
    assert {f"--{name}" for name in flat(build(TrainSettings, settings))} <= facts(settings).required.keys()


def test_what_may_differ(settings, meet, tmp_path, monkeypatch):
    """The path of the data, the index of the device, and how the output is written; Python's version is a warning."""
    (tmp_path / "copy.txt").write_bytes(b"a copy")
    monkeypatch.chdir(tmp_path)
    one = facts(settings, device="cuda")
    changed = {"data": str(tmp_path / "copy.txt"), "output": "./run"}
    with mock.patch("platform.python_version_tuple", return_value=("3", "99", "0")):
        other = facts_of(build(TrainSettings, {**settings, **changed, "device": "cuda:1"}), "cuda")
    with pytest.warns(UserWarning, match=r"version of Python: 3\.\d+ on rank 0 and 3\.99 on rank 1"):
        assert meet([one, other]) == [None, None]


def test_weights_that_only_rank_0_sees_give_the_same_facts_as_the_flags_of_their_shape(settings, tmp_path):
    model = build(TrainSettings, settings).model
    weights = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(1)}, weights, {"model": json.dumps(model.to_dict())})
    first = facts(settings, init=str(weights))
    assert facts(settings, init=str(weights), num_kv_heads=2).required == first.required
    weights.unlink()
    assert facts(settings, init=str(weights)).required == first.required
    assert facts(settings, init=str(weights), d_ff=48).required != first.required


@pytest.mark.parametrize("what", ["device", "data", "torch", "source", *VARIABLES])
def test_other_facts_that_must_be_equal(what, settings, meet, tmp_path, monkeypatch):
    one, named = facts(settings), what
    if what == "device":
        other = facts(settings, device="cuda")
    elif what == "data":
        np.zeros(100, np.uint16).tofile(tmp_path / "t.bin")
        other = facts(settings, data=str(tmp_path / "t.bin"), vocab_size=256)
    elif what in ("torch", "source"):
        patched, named = {"torch": ("_version", "version of torch"), "source": ("_source_hash", "code of")}[what]
        monkeypatch.setattr(agreement, patched, lambda *_: "another")
        other = facts(settings)
    else:
        monkeypatch.setenv(what, "7")
        other = facts(settings)
    for error in meet([one, other]):
        assert named in str(error)
        assert "on rank 0 and" in str(error)


def test_many_differences_are_one_line():
    each = {rank: {f"--flag{n}": str(rank) for n in range(20)} for rank in range(1000)}
    line = rendezvous._differ(each)
    assert "--flag7: 0 on rank 0 and 1 on rank 1" in line
    assert "996 other values" in line
    assert "and in 12 other settings" in line
    assert len(line) < 1500


@pytest.mark.parametrize(
    ("ranks", "text"), [([1], "rank 1"), ([4, 0, 2, 3, 7], "ranks 0, 2-4, 7"), ([0, 1], "ranks 0-1")]
)
def test_names_of_ranks(ranks, text):
    assert ranks_named(ranks) == text


# -- the rendezvous ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_before_the_meeting_is_named(failed, meet):
    """Its error, and not that it did not come or that its settings are unknown."""
    same = Facts({"--seed": "1"})
    each = [Facts() if rank == failed else same for rank in range(WORLD)]
    for error in meet(each, failures={failed: "no file 'x'"}):
        assert isinstance(error, UserError)
        assert str(error) == f"rank {failed} of 3 failed: no file 'x'"


def test_a_missing_rank(meet):
    begin = time.monotonic()
    found = meet([Facts(), Facts(), None], timeout=1.0)[:2]
    assert time.monotonic() - begin > 1.0
    for error in found:
        assert isinstance(error, RankError)
        assert "2 of 3 ranks came to the rendezvous at MASTER_ADDR '127.0.0.1'" in str(error)
        assert str(error).endswith("within 1 s; missing: rank 2")


@pytest.mark.parametrize("sizes", [{0: 2}, {1: 4}, {0: 1}], ids=str)
def test_ranks_with_another_world_size(sizes, meet, monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE", 0.5)
    found = meet([Facts()] * WORLD, sizes=sizes, timeout=2.0 if sizes == {0: 1} else PATIENCE)
    alone = sizes == {0: 1}  # rank 0 has no reason to wait for others
    assert found[0] is None if alone else "WORLD_SIZE" in str(found[0])
    assert all("ranks differ in WORLD_SIZE" in str(error) for error in found[1:])


def test_a_rendezvous_that_never_answers(monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        error = in_background(lambda: join(Place(1, 2, 1, 2), Facts(), 1.0)).exception(PATIENCE)
    assert isinstance(error, UserError)
    assert f"MASTER_ADDR '127.0.0.1', MASTER_PORT {port}: connected, but no answer within 1 s" in str(error)


def test_entries_of_dead_ranks_do_not_count(monkeypatch):
    """torchrun restarts ranks on the same store: here a round failed, and in another one only rank 2 came."""
    store = dist.HashStore()

    def hold(rank, failure=""):
        entry = Entry(os.urandom(8).hex(), WORLD, {}, {}, failure)
        verdicts[rank] = Meeting(store, Place(rank, WORLD), entry).hold(PATIENCE)

    verdicts: dict[int, rendezvous.Verdict] = {}
    in_threads(lambda rank: hold(rank, "no file" if rank == 1 else ""))
    assert {verdict.problem for verdict in verdicts.values()} == {"rank 1 of 3 failed: no file"}
    store.set("entry-2", json.dumps(Entry("dead", WORLD, {}, {}, "also stale")))
    late = threading.Timer(0.5, hold, (1,))
    late.start()
    in_threads(lambda rank: None if rank == 1 else hold(rank))
    late.join()
    assert {verdict.problem for verdict in verdicts.values()} == {""}
    assert len({verdict.group for verdict in verdicts.values()}) == 1


@pytest.mark.parametrize("error", [UserError("no space left"), ZeroDivisionError("division by zero")], ids=type)
def test_the_error_of_a_rank_is_named_by_the_others(error):
    store = dist.HashStore()
    ranks = [Peers(store, rank, 2) for rank in (0, 1)]
    ranks[1].report(error)
    ranks[0].report(RuntimeError("later"))
    loss = ranks[0].loss()
    assert isinstance(loss, UserError) == isinstance(error, UserError)
    cause = str(error) if isinstance(error, UserError) else f"ZeroDivisionError: {error}"
    assert str(loss) == f"rank 1 of 2 failed: {cause}; rank 0 stops"


def test_a_rank_that_cannot_leave_is_ended(monkeypatch, capsys):
    """As in a collective of NCCL, which never returns when another rank has failed."""
    ended = threading.Event()
    monkeypatch.setattr(peers, "LEAVE_WITHIN", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    store, codes = dist.HashStore(), []
    with Peers(store, 0, 2):
        Peers(store, 1, 2).report(UserError("no space left"))
        assert ended.wait(PATIENCE)
    assert codes == [2]
    assert "rank 1 of 2 failed: no space left; rank 0 stops" in capsys.readouterr().err


# -- in ranks ---------------------------------------------------------------------------------------------------------


def raised(work, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        work(*arguments)
    return str(caught.value)


@pytest.mark.ranks(3)
def test_mistakes_on_some_ranks_are_raised_on_all():
    rank = dist.get_rank()

    def work(fails):
        if fails:
            raise UserError("no luck")
        return rank

    assert together(lambda: work(False)) == rank
    assert raised(together, lambda: work(True)) == "no luck"
    assert raised(together, lambda: work(rank == 1)) == "on rank 1: no luck"


@pytest.mark.ranks(3)
def test_a_folder_that_is_not_shared(tmp_path):
    """Each rank names the ranks that do not see it; nothing is left behind."""
    rank, folder = dist.get_rank(), tmp_path / "shared"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    stale = folder / f"{agreement.NONCE}stale"
    stale.touch()
    require_shared(folder)
    own = tmp_path / f"own-{min(rank, 1)}"
    own.mkdir(exist_ok=True)
    with mock.patch.object(agreement, "SHARED_WITHIN", 0.3):
        expected = f"ranks 1-2 cannot see what rank 0 writes there; {agreement.MUST_BE_SHARED}"
        assert raised(require_shared, own).endswith(expected)
        missing = folder if rank < 2 else tmp_path / "missing"
        assert "rank 2 cannot see what rank 0" in raised(require_shared, missing)
        with (
            mock.patch.object(Path, "write_text", side_effect=OSError(13, "Permission denied"))
            if rank == 1
            else mock.MagicMock()
        ):
            assert raised(require_shared, folder).startswith("on rank 1: cannot write to")
    dist.barrier()
    assert [*folder.iterdir(), *own.iterdir()] == []


@pytest.mark.ranks(3)
def test_data_is_read_once_on_a_machine_and_compared(tmp_path):
    rank, reads = dist.get_rank(), []
    shared, same, other = (tmp_path / name for name in ("shared.bin", f"same-{rank}.npy", f"other-{rank}.bin"))
    tokens = np.arange(5000, dtype="<u2")
    if rank == 0:
        tokens.tofile(shared)
    dist.barrier()
    np.save(same, tokens)
    tokens[4321] += rank == 2
    tokens.tofile(other)
    real = TokenFile.summary

    def counted(file):
        reads.append(file.path)
        return real(file)

    with mock.patch.object(TokenFile, "summary", counted):
        found = read_once_per_host(TokenFile(shared))
        assert len(reads) == (rank == 0)
        assert read_once_per_host(TokenFile(same if rank == 1 else shared)) == found
        assert len(reads) == (1 if rank < 2 else 0) + (rank == 0)
        error = raised(read_once_per_host, TokenFile(other))
        assert error.startswith("ranks differ in the tokens of --data: ")
        assert " on ranks 0-1 and " in error
    short = TokenFile(other)
    if rank == 1:
        os.truncate(other, 100)
    assert raised(read_once_per_host, short).startswith("on rank 1: --data")
