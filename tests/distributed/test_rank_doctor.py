"""`cs336 doctor --ranks`: groups that are made up, ranks that look different, and the command."""

import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from cs336_systems.parallel.launch import this_rank
from cs336_systems.parallel.link_speed import MOST_PAIRED, Link, measure_links, rounds_of
from cs336_systems.train import agreement
from cs336_systems.train.rank_doctor import GroupReport, RankFacts, examine_group, own_facts
from tests.distributed.train_cases import command
from tests.helpers import exit_code

pytestmark = pytest.mark.xdist_group("ranks")
HANG = 240.0


# -- which pairs are measured -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, MOST_PAIRED])
def test_every_pair_of_few_ranks_alone(world_size):
    rounds = rounds_of(world_size)
    assert all(len(pairs) == 1 for pairs in rounds)
    assert len({pair for (pair,) in rounds}) == len(rounds) == world_size * (world_size - 1) // 2


@pytest.mark.parametrize("world_size", [MOST_PAIRED + 1, 64, 1023, 1024])
def test_the_neighbours_of_many_ranks_each_in_one_pair_at_a_time(world_size):
    rounds = rounds_of(world_size)
    assert len(rounds) <= 3
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert {pair for pairs in rounds for pair in pairs} == {(a, (a + 1) % world_size) for a in range(world_size)}


@pytest.mark.ranks(3)
def test_links_are_the_same_on_all_ranks():
    links = measure_links()
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, links)
    assert every == [links] * 3
    assert [(link.first, link.second) for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in links)


# -- what is said -----------------------------------------------------------------------------------------------------


def report(**changes: Any) -> GroupReport:
    """Four ranks on two hosts, all alike."""
    ranks = [
        RankFacts(f"node-{rank // 2}", f"cuda:{rank % 2} H200", 8, {"torch": "2.13"}, f"gpu{rank}") for rank in range(4)
    ]
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    links = [Link(a, b, 1e-5, 400e9 if a // 2 == b // 2 else 50e9, 0.001) for a, b in pairs]
    return dataclasses.replace(GroupReport(ranks, links, [600e12] * 4, "nccl"), **changes)


def said(found: GroupReport) -> dict[str, str]:
    """Return the findings that are not ok: the mark and the text by subject."""
    return {one.what: f"{one.mark} {one.seen}" for one in found.findings() if one.mark != "ok"}


def test_a_group_that_is_as_it_should_be():
    """Links between hosts may be slower than those within one."""
    assert said(report(folder="/shared")) == {}


def with_rank(number: int, **changes: Any) -> list[RankFacts]:
    ranks = list(report().ranks)
    ranks[number] = dataclasses.replace(ranks[number], **changes)
    return ranks


def with_link(first: int, second: int, **changes: Any) -> list[Link]:
    return [link._replace(**changes) if link[:2] == (first, second) else link for link in report().links]


@pytest.mark.parametrize(
    ("changes", "what", "parts"),
    [
        ({"ranks": with_rank(3, versions={"torch": "2.12"})}, "versions", ["bad", "2.12 on rank 3"]),
        ({"ranks": with_rank(3, gpu="gpu2")}, "GPU", ["bad", "ranks 2-3 share"]),
        ({"ranks": with_rank(3, host="node-0")}, "ranks", ["note", "3 on node-0, 1 on node-1"]),
        ({"folder": "x", "folder_problem": "rank 2 cannot see"}, "shared folder", ["bad", "rank 2 cannot see"]),
        ({"links": with_link(0, 3, clock=-5.0)}, "clocks", ["note", "5000.0 ms between ranks 0 and 3"]),
        ({"rates": [600e12, 300e12, 600e12, 600e12]}, "slowest rank", ["rank 1 (node-0, cuda:1 H200)", "50%"]),
        ({"links": with_link(1, 2, bandwidth=5e9)}, "slowest link", ["between hosts", "rank 1 (node-0", "10%"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_differs_is_named(changes, what, parts):
    found = said(report(**changes))
    assert set(found) == {what}
    assert all(part in found[what] for part in parts), found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_tables(language):
    ranks, links = report(links=with_link(1, 2, bandwidth=5e9)).tables()
    assert len(ranks.rows) == 4
    assert links.rows[0][0] == "1 - 2"
    assert "node-0 - node-1" in links.render("terminal", language)
    many = [RankFacts("one", "cpu", 1)] * 40
    ring = [Link(rank, (rank + 1) % 40, 1e-5, 1e9 + rank, 0.0) for rank in range(40)]
    links = GroupReport(many, ring, [1e9] * 40, "gloo").tables()[1]
    assert (len(links.rows), len(links.notes)) == (20, 2)


# -- ranks ------------------------------------------------------------------------------------------------------------


def looking_different(rank):
    facts = own_facts(rank)
    if rank.rank == 0:
        return facts
    return dataclasses.replace(facts, host="other", versions={**facts.versions, "the version of torch": "1.0"})


@pytest.mark.ranks(2)
def test_a_rank_that_looks_different():
    report = examine_group(this_rank(), facts=looking_different)
    assert "1.0 on rank 1" in said(report)["versions"]
    assert [facts.host == "other" for facts in report.ranks] == [False, True]
    assert "between hosts" in report.findings()[-1].seen


@pytest.mark.ranks(2)
def test_a_clock_that_is_ahead():
    ahead = 50.0 if dist.get_rank() == 1 else 0.0
    now = time.time
    with mock.patch("cs336_systems.parallel.link_speed.time.time", side_effect=lambda: now() + ahead):
        (link,) = measure_links()
    assert abs(link.clock - 50.0) < 1.0 + link.latency


@pytest.mark.ranks(2)
def test_a_folder_that_ranks_do_not_share(tmp_path):
    shared = examine_group(this_rank(), str(tmp_path / "shared"))
    assert "shared folder" not in said(shared)
    assert list((tmp_path / "shared").iterdir()) == []
    with mock.patch.object(agreement, "SHARED_WITHIN", 0.3):
        apart = examine_group(this_rank(), str(tmp_path / f"of-{dist.get_rank()}"))
    assert "rank 1 cannot see what rank 0 writes" in said(apart)["shared folder"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_under_torchrun(tmp_path):
    """Rank 0 speaks for all."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    argv = ["doctor", "--ranks", "--device", "cpu", "--output", str(tmp_path / "shared"), "--format", "csv"]
    processes = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        arguments = (argv, str(tmp_path / rank), {**common, "RANK": rank, "LOCAL_RANK": rank})
        processes.append(context.Process(target=command, args=arguments, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(HANG)
    printed = [Path(tmp_path / rank / name).read_text() for rank in "01" for name in ("stdout", "stderr")]
    assert [process.exitcode for process in processes] == [0, 0], printed
    assert "2 ranks on 1 host, gloo" in printed[0]
    assert "all ranks see what the others write" in printed[0]
    assert printed[1:] == ["", "", ""]


def test_ranks_of_our_own_launcher(capsys):
    assert exit_code(["doctor", "--ranks", "--local_ranks", "2", "--device", "cpu"]) == 0
    assert "2 ranks on 1 host, gloo" in capsys.readouterr().out
