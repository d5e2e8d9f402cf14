"""Findings of the experiments with several ranks: the sentences, in both languages."""

import pytest

from tests.unit.experiments.attention.attention_cells import records_of
from tests.unit.experiments.ranks.samples import SAMPLES, collective_cell
from tests.unit.report.step_cells import stated

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
        "1 of 2 layouts of xxl on 1,024 x H100 fit: ZeRO-3 is the one to take, 1,000.0 ms a step with 30.0 GiB on each "
        "GPU; none of 2 layouts of xxl on 64 x H100 fits.",
        "On 1,024 GPUs these wait for communication: ZeRO-3.",
    ],
}


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings_of_a_sample(experiment):
    assert stated(records_of(SAMPLES[experiment])) == SAID[experiment]


def test_ranks_on_gpus_come_first_and_gloo_is_named():
    said = stated(records_of([collective_cell(), collective_cell(backend="nccl")]))
    assert [text.split(":")[0] for text in said] == [
        "2 ranks, nccl on cpu",
        "2 ranks of one machine through Gloo (cpu)",
    ]
