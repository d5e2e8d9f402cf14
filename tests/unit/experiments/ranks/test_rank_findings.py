"""Findings of the experiments with several ranks: the sentences, in both languages."""

import pytest

from tests.unit.experiments.attention.attention_cells import records_of
from tests.unit.experiments.ranks.samples import SAMPLES, collective_cell
from tests.unit.report.step_cells import stated

SAID = {
    "feed_forward_costs": [
        "In forward, communication hides behind matmuls on this many H100: FSDP up to 33, TP up to 9.",
        "With both communications on one link, 16 groups of 4 devices are the best split: 0.28 ms.",
    ],
    "collectives": [
        "2 ranks of one machine through Gloo (CPU): all-reduce of 100 MB takes 101.00 ms. That is 0.99 GB/s over the "
        "busiest link. The fitted bandwidth is 1.00 GB/s (all-reduce), the latency 1,000 us.",
    ],
    "ddp": [
        "2 ranks of one machine through Gloo (GPU): bucketed DDP (1 MB) is the fastest of our 2 wrappers with 200.00 "
        "ms a step. It is 2.0 times as fast as naive DDP (400.00 ms). It is 1.2 times as fast as PyTorch DDP (250.00 "
        "ms). Bucketed DDP (1 MB) hides 50% of its communication, naive DDP hides no communication.",
    ],
    "bucket_model": [
        "2 ranks of one machine through Gloo (GPU), emulated slow network: the best bucket has 1 MB, as predicted. It"
        " leaves 30.00 ms exposed. Of 2 sizes the prediction is worst for 1 MB: 11.49 ms, measured 30.00 ms.",
    ],
    "optimizer_sharding": [
        "2 ranks of one machine through Gloo (GPU): our sharded optimizer holds 300.0 MiB on a rank, 25% less than "
        "our DDP (400.0 MiB). A step takes 300.00 ms: 1.5 times as long as with our DDP.",
    ],
    "fsdp": [
        "2 ranks of one machine through Gloo (GPU): our FSDP holds 200.0 MiB on a rank, 50% less than our DDP (400.0 "
        "MiB). A step takes 100.00 ms: 2.0 times as fast as with our DDP. PyTorch FSDP holds 400.0 MiB and takes "
        "150.00 ms.",
    ],
    "parallel_plan": [
        "1 of 2 layouts of xxl on 1,024 x H100 fit: ZeRO-3 is the one to take, 1,000.0 ms a step with 30.0 GiB on each "
        "GPU. 0 of 2 layouts of xxl on 64 x H100 fit.",
        "On 1,024 GPUs these wait for communication: ZeRO-3.",
    ],
}


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings_of_a_sample(experiment):
    assert stated(records_of(SAMPLES[experiment])) == SAID[experiment]


def test_ranks_on_gpus_come_first_and_gloo_is_named():
    said = stated(records_of([collective_cell(), collective_cell(backend="nccl")]))
    assert [text.split(":")[0] for text in said] == [
        "2 ranks through NCCL (CPU)",
        "2 ranks of one machine through Gloo (CPU)",
    ]
