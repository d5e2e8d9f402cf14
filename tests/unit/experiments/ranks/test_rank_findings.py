"""Findings of the experiments with several ranks: the sentences, in both languages, and odd data."""

import dataclasses
import re

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import CELL_TIME
from cs336_systems.report.cells import group
from cs336_systems.report.sections import findings_of
from tests.unit.experiments.ranks.samples import SAMPLES, collective_cell

SAID = {
    "collectives": [
        "2 ranks of one machine through Gloo (cpu): all_reduce of 100 MB takes 101.00 ms, 0.99 GB/s over the "
        "busiest link; fitted bandwidth in GB/s: 1.00 (all_reduce); latency 1,000 us.",
    ],
    "ddp": [
        "2 ranks of one machine through Gloo (cuda): bucketed 1 is the fastest of 2, 200.00 ms a step, 2.0 times as "
        "fast as naive (400.00 ms); torch DDP takes 250.00 ms; of communication bucketed 1 hides 50%, naive -50%.",
    ],
    "bucket_model": [
        "2 ranks of one machine through Gloo (cuda), emulated network of 0.1 GB/s and 1 ms: the best bucket is 1 MB "
        "predicted (11.49 ms exposed) and 1 MB measured (30.00 ms); of 2 sizes the prediction is worst for 1 MB: "
        "11.49 ms, measured 30.00.",
    ],
    "optimizer_sharding": [
        "2 ranks of one machine through Gloo (cuda): sharded holds 300.0 MiB on a rank, 25% less than ddp (400.0), "
        "and takes 300.00 ms a step, 1.5 times as long.",
    ],
    "fsdp": [
        "2 ranks of one machine through Gloo (cuda): fsdp holds 200.0 MiB on a rank, 50% less than ddp (400.0), and "
        "takes 100.00 ms a step, 0.50 times as long; torch fully_shard 400.0 MiB and 150.00 ms.",
    ],
    "parallel_plan": [
        "Of 2 layouts of xxl on 1,024 x h100 1 fit: zero3 has the shortest step, 1,000.0 ms, with 30.0 GiB on a GPU; "
        "of 2 layouts of xxl on 64 x h100 0 fit.",
        "On 1,024 GPUs these wait for communication: zero3.",
    ],
}


def numbers(text):
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def findings(cells):
    return findings_of(catalogue()[cells[0].experiment], cells)


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings_of_a_sample(experiment):
    found = findings(SAMPLES[experiment])
    assert [text.en for text in found] == SAID[experiment]
    for text in found:
        assert numbers(text.en) == numbers(text.zh)
        assert text.zh.endswith("。")


def test_ranks_on_gpus_come_first_and_gloo_is_named():
    said = findings([collective_cell(), collective_cell(backend="nccl")])
    assert [text.en.split(":")[0] for text in said] == [
        "2 ranks, nccl on cpu",
        "2 ranks of one machine through Gloo (cpu)",
    ]


@pytest.mark.parametrize("experiment", SAMPLES)
@pytest.mark.parametrize("samples", [(), (float("nan"),), (0.0,), (-1.0, -2.0), ("text",), (None,)], ids=repr)
def test_odd_samples_raise_nothing(experiment, samples):
    records = [record for cell in SAMPLES[experiment] for record in cell.records]
    for metric in {record.metric for record in records} - {CELL_TIME}:
        findings(group(dataclasses.replace(r, samples=samples) if r.metric == metric else r for r in records))
    findings(group(dataclasses.replace(record, samples=samples) for record in records))


@pytest.mark.parametrize("experiment", SAMPLES)
def test_missing_metrics_raise_nothing(experiment):
    records = [record for cell in SAMPLES[experiment] for record in cell.records]
    for metric in {record.metric for record in records}:
        findings(group(record for record in records if record.metric != metric))
