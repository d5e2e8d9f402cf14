"""Checks of a started group of ranks: which ranks there are, what differs between them, and which rank or link is slow.

torchrun --nproc_per_node 8 -m cs336_systems doctor --ranks --output /shared/runs
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from cs336_systems.config import UserError
from cs336_systems.measure.doctor import Finding
from cs336_systems.measure.environment import capture
from cs336_systems.parallel.collectives import gather, on_first
from cs336_systems.parallel.launch import Rank, default_device, process_group, spawn, this_rank
from cs336_systems.parallel.link_speed import MOST_PAIRED, Link, measure_links
from cs336_systems.parallel.peers import ranks_by_value, ranks_named
from cs336_systems.parallel.rendezvous import differences, is_under_torchrun
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, counted, say
from cs336_systems.train.agreement import code_facts, require_shared

SLOW = 0.7
"""A rank or link is reported if its rate is below this share of the median of its kind."""
CLOCK_LIMIT = 1.0
"""Maximum seconds between the clocks of two ranks; with more, their logs are hard to read together."""
MOST_LINKS = 20
"""Maximum number of links in the table; the slowest are listed."""
MATMUL = {"cpu": 512, "cuda": 8192}
"""Size of the square matmul that shows how fast a rank computes."""


@dataclass(frozen=True)
class RankFacts:
    """The machine and software of a rank, as reported by the rank."""

    host: str
    device: str
    cores: int
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions and other values that should be equal on all ranks, by name."""
    gpu: str = ""
    """Identifier of the GPU, unique among all; empty on a CPU."""


@dataclass(frozen=True)
class GroupReport:
    """The results of all checks of a group; equal on all ranks."""

    ranks: Sequence[RankFacts]
    links: Sequence[Link]
    rates: Sequence[float]
    """FLOP/s of a matmul, by rank."""
    backend: str
    folder: str = ""
    """The folder of `--output`, if it was checked."""
    folder_problem: str = ""

    def findings(self) -> list[Finding]:
        return [
            *self._shape(),
            *self._versions(),
            *self._folder(),
            *self._clocks(),
            self._slowest_rank(),
            *self._slowest_links(),
        ]

    def tables(self) -> list[Table]:
        return [_rank_table(self), *([_link_table(self)] if self.links else [])]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.ranks[rank].host}, {self.ranks[rank].device})"

    def clock(self, rank: int) -> float | None:
        """Return how far the clock of a rank is ahead of rank 0's, if the two were measured as a pair."""
        found = {link.second: link.clock for link in self.links if link.first == 0}
        return 0.0 if rank == 0 else found.get(rank)

    def median_bandwidth(self, rank: int) -> float | None:
        own = [link.bandwidth for link in self.links if rank in (link.first, link.second)]
        return statistics.median(own) if own else None

    def is_local(self, link: Link) -> bool:
        return self.ranks[link.first].host == self.ranks[link.second].host

    def _shape(self) -> Iterator[Finding]:
        hosts = ranks_by_value((rank, facts.host) for rank, facts in enumerate(self.ranks))
        seen = f"{counted(len(self.ranks), 'rank')} on {counted(len(hosts), 'host')}, {self.backend}"
        if len({len(ranks) for ranks in hosts.values()}) > 1:
            listed = ", ".join(f"{len(ranks)} on {host}" for host, ranks in hosts.items())
            yield Finding("note", "ranks", f"{seen}: {listed}", "give every host the same --nproc_per_node")
        else:
            yield Finding("ok", "ranks", seen)
        gpus = ranks_by_value((rank, facts.gpu) for rank, facts in enumerate(self.ranks) if facts.gpu)
        for ranks in gpus.values():
            if len(ranks) > 1:
                shared = f"{ranks_named(ranks)} share {self.ranks[ranks[0]].device}"
                yield Finding("bad", "GPU", shared, "start one rank for each GPU")

    def _versions(self) -> Iterator[Finding]:
        found = differences({rank: facts.versions for rank, facts in enumerate(self.ranks)})
        for line in found:
            yield Finding("bad", "versions", line, "install the same packages on all hosts")
        if not found:
            yield Finding("ok", "versions", f"equal on all {len(self.ranks)} ranks")

    def _folder(self) -> Iterator[Finding]:
        if self.folder_problem:
            yield Finding("bad", "shared folder", self.folder_problem)
        elif self.folder:
            yield Finding("ok", "shared folder", f"all ranks see what the others write in {self.folder!r}")

    def _clocks(self) -> Iterator[Finding]:
        if not self.links:
            return
        worst = max(self.links, key=lambda link: abs(link.clock))
        seen = f"{abs(worst.clock) * 1e3:.1f} ms between ranks {worst.first} and {worst.second} at most"
        if abs(worst.clock) - worst.latency > CLOCK_LIMIT:
            yield Finding(
                "note", "clocks", seen, "synchronize them, such as with chrony: lines of logs cannot be compared"
            )
        else:
            yield Finding("ok", "clocks", seen)

    def _slowest_rank(self) -> Finding:
        slowest = min(range(len(self.rates)), key=lambda rank: self.rates[rank])
        share = self.rates[slowest] / statistics.median(self.rates)
        seen = f"{self.name(slowest)}: {self.rates[slowest] / 1e12:.3g} TFLOP/s, {share:.0%} of the median"
        if share < SLOW:
            return Finding(
                "note", "slowest rank", seen, "all ranks wait for it: look for other processes, clocks, heat"
            )
        return Finding("ok", "slowest rank", seen)

    def _slowest_links(self) -> Iterator[Finding]:
        """Yield slow links; links within hosts and between hosts are compared separately."""
        for is_local, kind in ((True, "within a host"), (False, "between hosts")):
            links = [link for link in self.links if self.is_local(link) is is_local]
            if not links:
                continue
            slowest = min(links, key=lambda link: link.bandwidth)
            share = slowest.bandwidth / statistics.median(link.bandwidth for link in links)
            ends = f"{self.name(slowest.first)} to {self.name(slowest.second)}"
            seen = f"{kind}: {ends}: {slowest.bandwidth / 1e9:.3g} GB/s, {share:.0%} of the median"
            if share < SLOW:
                yield Finding(
                    "note", "slowest link", seen, "every collective runs at its speed: check cable and adapter"
                )
            else:
                yield Finding("ok", "slowest link", seen)


def check_ranks(output: str | None, device: str | None, local_ranks: int | None, timeout: float) -> GroupReport | None:
    """Return the report on the ranks that torchrun has started, or on new ones; None on ranks other than the first."""
    device = (device or default_device()).split(":")[0]
    if is_under_torchrun():
        if local_ranks is not None:
            raise UserError("--local_ranks starts ranks, and torchrun has started some; leave it out")
        with process_group(device=device, timeout=timeout) as rank:
            report = examine_group(rank, output)
            return report if rank.rank == 0 else None
    count = local_ranks or max(2, torch.cuda.device_count() if device == "cuda" else 0)
    backend = "nccl" if device == "cuda" and count <= torch.cuda.device_count() else "gloo"
    return spawn(_examine_spawned, count, output, device, backend=backend, device=device, timeout=timeout)[0]


def _examine_spawned(output: str | None, device: str) -> GroupReport:
    return examine_group(this_rank(device), output)


def examine_group(
    rank: Rank, output: str | None = None, facts: Callable[[Rank], RankFacts] | None = None
) -> GroupReport:
    """Return the report on the group that this rank is in. Called by all ranks together.

    `facts` returns the facts of this rank.
    """
    ranks = gather((facts or own_facts)(rank))
    problem = _folder_problem(Path(output)) if output else ""
    dist.barrier()
    rates = gather(_matmul_rate(rank.device))
    return GroupReport(ranks, measure_links(), rates, dist.get_backend(), output or "", problem)


def own_facts(rank: Rank) -> RankFacts:
    environment = capture(str(rank.device))
    of_gpu = {"CUDA": environment.cuda, "NCCL": environment.nccl, "the driver": environment.driver}
    versions = {f"the version of {name}": value for name, value in of_gpu.items() if value}
    is_gpu = rank.device.type == "cuda"
    return RankFacts(
        host=platform.node(),
        device=f"{rank.device} {environment.gpu}" if is_gpu else "cpu",
        cores=environment.cpu_cores or 0,
        versions={"the version of Python": platform.python_version(), **code_facts(), **versions},
        gpu=str(torch.cuda.get_device_properties(rank.device).uuid) if is_gpu else "",
    )


def _folder_problem(folder: Path) -> str:
    """Return why the ranks do not share this folder, or an empty string; equal on all ranks."""

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {str(folder)!r}: {error.strerror}; choose another --output") from None

    try:
        on_first(make)
        require_shared(folder)
    except UserError as error:
        return str(error)
    return ""


def _matmul_rate(device: torch.device) -> float:
    """Return the FLOP/s of a matmul, the best of several: in bf16 on a GPU, in fp32 on a CPU."""
    size = MATMUL[device.type]
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        _ = (a @ a)[0, 0].item()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times[1:])


# -- tables -----------------------------------------------------------------------------------------------------------


def _rank_table(report: GroupReport) -> Table:
    columns = [
        Column(Text("rank")),
        word(Text("host", "主机")),
        word(Text("device", "设备")),
        Column(Text("cores", "核数")),
        Column(Text("matmul", "矩阵乘"), "TFLOP/s"),
        Column(Text("links, median", "链路带宽中位数"), "GB/s"),
        Column(Text("clock ahead of rank 0", "时钟领先 rank 0"), "ms"),
    ]
    rows = []
    for rank, facts in enumerate(report.ranks):
        bandwidth, clock = report.median_bandwidth(rank), report.clock(rank)
        rows.append(
            [
                str(rank),
                facts.host,
                facts.device,
                str(facts.cores),
                f"{report.rates[rank] / 1e12:.3g}",
                "-" if bandwidth is None else f"{bandwidth / 1e9:.3g}",
                "-" if clock is None else f"{clock * 1e3:.1f}",
            ]
        )
    return Table(Text("Ranks", "各 rank"), columns, rows)


def _link_table(report: GroupReport) -> Table:
    columns = [
        word(Text("link", "链路")),
        word(Text("hosts", "主机")),
        Column(Text("latency", "延迟"), "us"),
        Column(Text("bandwidth", "带宽"), "GB/s"),
    ]
    slowest = sorted(report.links, key=lambda link: link.bandwidth)
    rows = []
    for link in slowest[:MOST_LINKS]:
        hosts = " - ".join(dict.fromkeys(report.ranks[rank].host for rank in (link.first, link.second)))
        figures = f"{link.latency * 1e6:.1f}", f"{link.bandwidth / 1e9:.3g}"
        rows.append([f"{link.first} - {link.second}", hosts, *figures])
    notes = []
    if len(slowest) > MOST_LINKS:
        more = str(len(slowest) - MOST_LINKS)
        notes.append(say("{} faster links are not shown", "另有 {} 条更快的链路未列出", more))
    if len(report.ranks) > MOST_PAIRED:
        notes.append(
            say("above {} ranks only neighbours are measured", "超过 {} 个 rank 时只测量相邻的 rank", str(MOST_PAIRED))
        )
    return Table(Text("Links, the slowest first", "链路，最慢的在前"), columns, rows, notes)
